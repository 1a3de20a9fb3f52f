// For all tests: random tensors from a printed seed, comparison by relative norm, finite differences in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "base/error.h"
#include "ops/elementwise.h"
#include "tensor/tensor.h"

namespace furious::testing {

// A random source for one test; the seed is printed when the test fails, and FURIOUS_TEST_SEED sets it.
class Random {
 public:
  explicit Random(uint64_t salt = 0);
  uint64_t seed() const { return seed_; }
  int64_t integer(int64_t low, int64_t high);  // both ends included
  bool coin() { return integer(0, 1) == 1; }
  double normal() { return std::normal_distribution<double>()(engine_); }
  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }
  template <class T>
  const T& pick(const std::vector<T>& choices) {
    return choices[integer(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  Tensor normal_tensor(const Shape& shape, double scale = 1, DType dtype = DType::f32);
  Tensor uniform_tensor(const Shape& shape, double low, double high, DType dtype = DType::f32);

 private:
  uint64_t seed_;
  std::mt19937_64 engine_;
  ::testing::ScopedTrace trace_;
};

Tensor tensor_of(const std::vector<float>& values, const Shape& shape);
Tensor int_tensor_of(const std::vector<int32_t>& values, const Shape& shape);

std::vector<double> to_doubles(const Tensor& tensor);  // in row-major order, whatever the strides and dtype

// ‖actual − expected‖ / (‖expected‖ + floor), for all numbers and for each row of a tensor (the innermost dimension; of
// a plain list, every kRowOfList numbers), so that a wrong row does not pass for rounding of all: the error of a row is
// relative to its own norm, or to that of rows in general where it is smaller. As a number it is the error of all, or a
// tenth of that of the worst row where that is more: rows may differ from each other in how much they lose to rounding,
// but not by more. Infinite if anything in actual is not finite.
inline constexpr int64_t kRowOfList = 64;
struct RelativeError {
  double all = 0, worst = 0;
  int64_t row = 0;  // the worst
  operator double() const { return std::max(all, worst / 10); }
};
void PrintTo(const RelativeError& error, std::ostream* out);
RelativeError relative_error(const std::vector<double>& actual, const std::vector<double>& expected,
                             double floor = 1e-30);
RelativeError relative_error(const Tensor& actual, const std::vector<double>& expected, double floor = 1e-30);
RelativeError relative_error(const Tensor& actual, const Tensor& expected, double floor = 1e-30);
bool all_finite(const Tensor& tensor);
bool same_bits(const Tensor& a, const Tensor& b);

// The gradient of Σ_k weights_k · f(x)_k with respect to x, by central differences in double precision. `f` is a
// plain double-precision forward function: the oracle of the operation under test.
using Function = std::function<std::vector<double>(const std::vector<double>&)>;
std::vector<double> numeric_gradient(const Function& f, const std::vector<double>& x,
                                     const std::vector<double>& weights, double step = 1e-5);

// Runs `statement` and expects a furious::Error whose message contains all of `parts`.
void expect_error(const std::function<void()>& statement, const std::vector<std::string>& parts);

}  // namespace furious::testing
