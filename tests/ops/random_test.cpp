#include "ops/random.h"

#include <algorithm>
#include <numeric>

#include "base/parallel.h"
#include "base/random.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::same_bits;
using testing::to_doubles;

class Threads {  // sets the number of threads for one scope
 public:
  explicit Threads(int count) : before_(threads()) { set_threads(count); }
  ~Threads() { set_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

Tensor normal_tensor(int64_t count, uint64_t seed, uint64_t stream, float mean = 0, float stddev = 1) {
  Tensor out = Tensor::empty({count}, DType::f32);
  fill_normal(out, mean, stddev, seed, stream);
  return out;
}

Tensor uniform_tensor(int64_t count, uint64_t seed, uint64_t stream, float low = 0, float high = 1) {
  Tensor out = Tensor::empty({count}, DType::f32);
  fill_uniform(out, low, high, seed, stream);
  return out;
}

double moment(const std::vector<double>& x, int power) {
  return std::accumulate(x.begin(), x.end(), 0.0, [&](double sum, double v) { return sum + std::pow(v, power); }) /
         static_cast<double>(x.size());
}

double correlation(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = to_doubles(a);
  const std::vector<double> y = to_doubles(b);
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0) / static_cast<double>(x.size());
}

TEST(FillRandom, ElementIsLaneOfCounter) {
  const Tensor normal = normal_tensor(11, 42, 7);
  const Tensor uniform = uniform_tensor(11, 42, 7);
  for (int64_t i = 0; i < 11; ++i) {
    float four[4];
    four_normal(42, 7, i / 4, four);
    EXPECT_EQ(normal.data<float>()[i], four[i % 4]) << i;
    four_uniform(42, 7, i / 4, four);
    EXPECT_EQ(uniform.data<float>()[i], four[i % 4]) << i;
  }
}

TEST(FillRandom, ScaleAndShiftAreRoundedOneByOne) {
  const Tensor unit = normal_tensor(1000, 3, 1);
  const Tensor moved = normal_tensor(1000, 3, 1, 0.7f, 1.3f);
  for (int64_t i = 0; i < 1000; ++i) {
    const volatile float product = 1.3f * unit.data<float>()[i];
    ASSERT_EQ(moved.data<float>()[i], 0.7f + product);
  }
}

TEST(FillRandom, AShorterTensorIsAPrefix) {
  const Tensor whole = normal_tensor(100, 5, 0);
  for (int64_t count : {0, 1, 3, 4, 5, 99})
    EXPECT_TRUE(same_bits(normal_tensor(count, 5, 0), whole.slice(0, 0, count)));
}

TEST(FillRandom, SameBitsForAnyNumberOfThreads) {
  constexpr int64_t kCount = 50001;
  const auto fill_with = [&](int count) {
    const Threads scope(count);
    return std::pair(normal_tensor(kCount, 9, 2), uniform_tensor(kCount, 9, 2, -1, 1));
  };
  const auto one = fill_with(1);
  for (int count : {2, 3, 7}) {
    const auto many = fill_with(count);
    EXPECT_TRUE(same_bits(one.first, many.first)) << count;
    EXPECT_TRUE(same_bits(one.second, many.second)) << count;
  }
}

TEST(FillRandom, NormalHasTheMomentsOfANormal) {
  constexpr int64_t kCount = 400000;
  const std::vector<double> x = to_doubles(normal_tensor(kCount, 1234, 0));
  const double error = 1 / std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(moment(x, 1), 0, 5 * error);
  EXPECT_NEAR(moment(x, 2), 1, 5 * std::sqrt(2.0) * error);
  EXPECT_NEAR(moment(x, 3), 0, 5 * std::sqrt(15.0) * error);
  EXPECT_NEAR(moment(x, 4), 3, 5 * std::sqrt(96.0) * error);
}

TEST(FillRandom, NormalFollowsTheDistribution) {
  constexpr int64_t kCount = 100000;
  std::vector<double> x = to_doubles(normal_tensor(kCount, 77, 3));
  std::sort(x.begin(), x.end());
  double distance = 0;  // Kolmogorov-Smirnov
  for (int64_t i = 0; i < kCount; ++i) {
    const double cumulative = 0.5 * std::erfc(-x[i] / std::sqrt(2.0));
    distance = std::max(distance, std::fabs(cumulative - (static_cast<double>(i) + 0.5) / kCount));
  }
  EXPECT_LT(distance, 2.0 / std::sqrt(static_cast<double>(kCount)));
}

TEST(FillRandom, UniformStaysInRangeAndFillsItEvenly) {
  constexpr int64_t kCount = 100000;
  const std::vector<double> x = to_doubles(uniform_tensor(kCount, 8, 1, -2, 3));
  std::vector<int> bins(10);
  for (double value : x) {
    ASSERT_GE(value, -2);
    ASSERT_LE(value, 3);
    ++bins[std::min(9, static_cast<int>((value + 2) * 2))];
  }
  double chi_squared = 0;
  for (int count : bins) chi_squared += std::pow(count - kCount / 10.0, 2) / (kCount / 10.0);
  EXPECT_LT(chi_squared, 35);  // 9 degrees of freedom: p < 1e-4
}

TEST(FillRandom, StreamsAndSeedsAreIndependent) {
  constexpr int64_t kCount = 100000;
  const double limit = 5 / std::sqrt(static_cast<double>(kCount));
  const Tensor base = normal_tensor(kCount, 1, 0);
  EXPECT_LT(std::fabs(correlation(base, normal_tensor(kCount, 1, 1))), limit);
  EXPECT_LT(std::fabs(correlation(base, normal_tensor(kCount, 2, 0))), limit);
  EXPECT_LT(std::fabs(correlation(base, normal_tensor(kCount, 1, uint64_t{1} << 40))), limit);
  EXPECT_LT(std::fabs(correlation(base.slice(0, 0, kCount - 1), base.slice(0, 1, kCount - 1))), limit);
  EXPECT_NEAR(correlation(base, base), 1, limit * 2);
}

TEST(FillRandom, RefusesBadInput) {
  const Tensor out = Tensor::empty({4, 4}, DType::f32);
  expect_error([&] { fill_uniform({}, 0, 1, 0, 0); }, {"fill_uniform", "\"out\"", "missing"});
  expect_error([&] { fill_normal(Tensor::empty({4}, DType::bf16), 0, 1, 0, 0); }, {"fill_normal", "bf16", "f32"});
  expect_error([&] { fill_normal(out.slice(1, 0, 2), 0, 1, 0, 0); }, {"fill_normal", "not contiguous"});
  expect_error([&] { fill_uniform(out, 1, 0, 0, 0); }, {"fill_uniform", "from 1 to 0"});
  expect_error([&] { fill_normal(out, 0, -1, 0, 0); }, {"fill_normal", "-1"});
  expect_error([&] { fill_normal(out, NAN, 1, 0, 0); }, {"fill_normal", "nan"});
}

TEST(FillRandomCuda, SameBitsAsTheCpu) {
  if (describe_cuda_devices().empty()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kCount = 100003;
  const Device gpu{DeviceKind::cuda, 0};
  const Tensor there = Tensor::empty({kCount}, DType::f32, gpu);
  const Tensor back = Tensor::empty({kCount}, DType::f32);
  fill_normal(there, 0.3f, 1.7f, 11, 5);
  copy_between(back, there);
  EXPECT_TRUE(same_bits(back, normal_tensor(kCount, 11, 5, 0.3f, 1.7f)));
  fill_uniform(there, -0.3f, 1.7f, 11, 5);
  copy_between(back, there);
  EXPECT_TRUE(same_bits(back, uniform_tensor(kCount, 11, 5, -0.3f, 1.7f)));
}

TEST(FillRandomCuda, CopyRoundTrips) {
  if (describe_cuda_devices().empty()) GTEST_SKIP() << "no CUDA device";
  const Tensor here = normal_tensor(1000, 1, 1);
  const Tensor there = Tensor::empty({1000}, DType::f32, {DeviceKind::cuda, 0});
  const Tensor back = Tensor::zeros({1000}, DType::f32);
  copy_between(there, here);
  copy_between(back, there);
  EXPECT_TRUE(same_bits(here, back));
}

}  // namespace
}  // namespace furious
