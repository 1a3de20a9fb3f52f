#include "base/random.h"

#include <algorithm>
#include <vector>

#include "support.h"

namespace furious {
namespace {

void expect_words(const RandomBits& bits, std::vector<uint32_t> expected) {
  EXPECT_EQ(std::vector<uint32_t>(bits.word, bits.word + 4), expected);
}

// Known answers of philox4x32-10 from the Random123 distribution (kat_vectors). Its counter is {counter, stream}.
TEST(Philox, KnownAnswers) {
  expect_words(random_bits(0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const uint64_t ones = ~uint64_t{0};
  expect_words(random_bits(ones, ones, ones), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect_words(random_bits(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(RandomDetail, LogAgreesWithTheLibrary) {
  testing::Random random(1);
  std::vector<uint64_t> numbers = {1, 2, 3, (uint64_t{1} << 32) - 1, uint64_t{1} << 32, 3037000500u, 3037000499u};
  for (int i = 0; i < 20000; ++i) numbers.push_back(1 + static_cast<uint64_t>(random.integer(0, 0xFFFFFFFF)));
  for (int shift = 0; shift < 32; ++shift) numbers.push_back((uint64_t{1} << shift) + 1);
  for (uint64_t n : numbers) {
    const double expected = std::log(static_cast<double>(n) * 0x1p-32);
    ASSERT_NEAR(random_detail::log_of_fraction(n), expected, 2e-13 + 4e-16 * std::fabs(expected)) << n;
  }
  EXPECT_EQ(random_detail::log_of_fraction(uint64_t{1} << 32), 0.0);
}

TEST(RandomDetail, CirclePointAgreesWithTheLibrary) {
  testing::Random random(2);
  std::vector<uint32_t> numbers;
  for (uint32_t octant = 0; octant < 8; ++octant)
    for (uint32_t offset : {0u, 1u, 0x10000000u, 0x1FFFFFFFu}) numbers.push_back((octant << 29) + offset);
  for (int i = 0; i < 20000; ++i) numbers.push_back(static_cast<uint32_t>(random.integer(0, 0xFFFFFFFF)));
  for (uint32_t n : numbers) {
    const long double angle = 2.0L * 3.14159265358979323846264338327950288L * n / 4294967296.0L;
    double cosine = 0;
    double sine = 0;
    random_detail::circle_point(n, cosine, sine);
    ASSERT_NEAR(cosine, static_cast<double>(std::cos(angle)), 1e-13) << n;
    ASSERT_NEAR(sine, static_cast<double>(std::sin(angle)), 1e-13) << n;
  }
}

TEST(Uniform, EndsAreZeroAndBelowOne) {
  EXPECT_EQ(uniform_from_bits(0), 0.0f);
  EXPECT_EQ(uniform_from_bits(0xFFFFFFFFu), 1.0f - 0x1p-24f);
}

TEST(Normal, ExtremeWordsGiveFiniteNumbers) {
  for (uint32_t a : {0u, 1u, 0xFFFFFFFFu})
    for (uint32_t b : {0u, 0x20000000u, 0x80000000u, 0xFFFFFFFFu}) {
      float first = NAN;
      float second = NAN;
      normal_from_bits(a, b, first, second);
      EXPECT_TRUE(std::isfinite(first) && std::isfinite(second)) << a << " " << b;
      EXPECT_LT(std::hypot(first, second), 6.67f);  // sqrt(64 ln 2)
    }
}

}  // namespace
}  // namespace furious
