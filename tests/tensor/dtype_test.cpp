#include "tensor/dtype.h"

#include <algorithm>
#include <limits>

#include "support.h"

namespace furious {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What a 16-bit float with these many exponent and mantissa bits means, from the definition.
double value_of(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <class T>
struct Format;
template <>
struct Format<bfloat16> {
  static constexpr int exponent_bits = 8, mantissa_bits = 7;
};
template <>
struct Format<float16> {
  static constexpr int exponent_bits = 5, mantissa_bits = 10;
};

template <class T>
T from_bits(uint16_t bits) {
  T value;
  value.bits = bits;
  return value;
}

template <class T>
class HalfFloat : public ::testing::Test {
 protected:
  static double value(uint32_t bits) {
    return value_of(static_cast<uint16_t>(bits), Format<T>::exponent_bits, Format<T>::mantissa_bits);
  }
  static constexpr uint32_t kInfinityBits = ((1u << Format<T>::exponent_bits) - 1) << Format<T>::mantissa_bits;
};
using HalfTypes = ::testing::Types<bfloat16, float16>;
TYPED_TEST_SUITE(HalfFloat, HalfTypes);

TYPED_TEST(HalfFloat, EveryPatternMeansWhatTheFormatSaysAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float widened = static_cast<float>(from_bits<TypeParam>(static_cast<uint16_t>(bits)));
    const double expected = this->value(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(widened)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(TypeParam(widened)))) << bits;
      ASSERT_EQ(TypeParam(widened).bits & 0x8000, bits & 0x8000) << bits;
    } else {
      ASSERT_EQ(widened, expected) << bits;
      ASSERT_EQ(TypeParam(widened).bits, bits);
    }
  }
}

// Between two neighbours: below the midpoint the lower one, above it the higher one, on it the even one.
TYPED_TEST(HalfFloat, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < this->kInfinityBits; ++bits) {
    const double low = this->value(bits);
    // For rounding, the successor of the largest number is the next power of two.
    const double high = bits + 1 == this->kInfinityBits ? 2 * low - this->value(bits - 1) : this->value(bits + 1);
    const float middle = static_cast<float>(low + (high - low) / 2);
    ASSERT_EQ(middle, low + (high - low) / 2);
    const uint32_t even = bits & 1 ? bits + 1 : bits;
    for (uint32_t sign : {0u, 0x8000u}) {
      const float s = sign ? -1.0f : 1.0f;
      ASSERT_EQ(TypeParam(s * middle).bits, sign | even) << bits;
      ASSERT_EQ(TypeParam(s * std::nextafter(middle, 0.0f)).bits, sign | bits) << bits;
      ASSERT_EQ(TypeParam(s * std::nextafter(middle, kInfinity)).bits, sign | (bits + 1)) << bits;
    }
  }
}

TYPED_TEST(HalfFloat, Extremes) {
  EXPECT_EQ(TypeParam(kInfinity).bits, this->kInfinityBits);
  EXPECT_EQ(TypeParam(-kInfinity).bits, 0x8000u | this->kInfinityBits);
  EXPECT_EQ(TypeParam(std::numeric_limits<float>::max()).bits, this->kInfinityBits);
  EXPECT_EQ(TypeParam(0.0f).bits, 0);
  EXPECT_EQ(TypeParam(-0.0f).bits, 0x8000);
  EXPECT_EQ(TypeParam(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(std::numeric_limits<float>::quiet_NaN()))));
  // A NaN whose mantissa lies in the bits that are cut off.
  EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(std::bit_cast<float>(0x7F800001u)))));
}

TEST(DType, SizesAndNames) {
  for (const auto& [dtype, size, name] :
       {std::tuple(DType::f32, 4, "f32"), std::tuple(DType::bf16, 2, "bf16"), std::tuple(DType::f16, 2, "f16"),
        std::tuple(DType::i32, 4, "i32"), std::tuple(DType::f64, 8, "f64")}) {
    EXPECT_EQ(size_of(dtype), static_cast<size_t>(size));
    EXPECT_EQ(name_of(dtype), name);
    EXPECT_EQ(dtype_from_name(name), dtype);
  }
  testing::expect_error([] { dtype_from_name("fp16"); }, {"unknown dtype \"fp16\"", "f32, bf16, f16, i32, f64"});
}

}  // namespace
}  // namespace furious
