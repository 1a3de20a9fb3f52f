// Products in 8-bit floats: the rounding to the bit, the sums against double precision, and a layer's gradients.
#include <cmath>

#include "cuda.h"
#include "ops/fp8.h"
#include "ops/nn/linear.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

#define SKIP_WITHOUT_FP8() \
  SKIP_WITHOUT_GPU();      \
  if (!fp8_supported(kGpu)) GTEST_SKIP() << "no 8-bit floats on this GPU"

// The number of a byte.
double number_of(uint8_t byte, Fp8Format format) {
  const int mantissa_bits = format == Fp8Format::e4m3 ? 3 : 2, bias = format == Fp8Format::e4m3 ? 7 : 15;
  const int exponent = (byte & 0x7F) >> mantissa_bits, mantissa = byte & ((1 << mantissa_bits) - 1);
  const bool is_nan = format == Fp8Format::e4m3 ? (byte & 0x7F) == 0x7F : exponent == 31;
  if (is_nan) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                    : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return (byte & 0x80) != 0 ? -size : size;
}

std::vector<double> numbers_of(const Fp8Factor& factor) {
  const Tensor here = to_device(factor.values, {}), scale = to_device(factor.scale, {});
  const auto* const bytes = static_cast<const uint8_t*>(here.raw());
  std::vector<double> numbers;
  for (int64_t i = 0; i < factor.rows() * factor.inner(); ++i)
    numbers.push_back(number_of(bytes[i], factor.format) * static_cast<double>(*scale.data<float>()));
  return numbers;
}

class Fp8Cuda : public ::testing::TestWithParam<Fp8Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, Fp8Cuda, ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2));

TEST_P(Fp8Cuda, RoundsToTheNearest) {
  SKIP_WITHOUT_FP8();
  const Fp8Format format = GetParam();
  Random random(1);
  std::vector<double> known;  // not negative
  for (int byte = 0; byte < 128; ++byte)
    if (const double number = number_of(static_cast<uint8_t>(byte), format); std::isfinite(number))
      known.push_back(number);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{16, 16}, {128, 144}, {272, 400}, {16, 1024}}) {
      const Tensor wide = to_gpu(random.normal_tensor({rows, columns + 16}), dtype);
      const Tensor x = wide.slice(1, 8, columns);  // rows that lie apart
      const Fp8Matrix q = to_fp8(x, format);
      const std::vector<double> from = to_doubles(to_cpu(x)), as_is = numbers_of(q.as_is),
                                transposed = numbers_of(q.transposed);
      double largest = 0;
      for (const double number : from) largest = std::max(largest, std::abs(number));
      const double scale = *to_device(q.as_is.scale, {}).data<float>();
      EXPECT_NEAR(scale * known.back(), largest, 1e-6 * largest);
      for (int64_t i = 0; i < rows * columns; ++i) {
        // No other number of the format is nearer, but for the rounding of x / scale to f32.
        const double place = std::abs(from[i]) / scale;
        const auto above = std::lower_bound(known.begin(), known.end(), place);
        const double up = above == known.end() ? known.back() : *above,
                     down = above == known.begin() ? known.front() : *(above - 1);
        const double best = std::min(std::abs(up - place), std::abs(place - down));
        ASSERT_LE(std::abs(std::abs(as_is[i]) / scale - place), best + 1e-5 * place + 1e-9) << i;
        ASSERT_TRUE(as_is[i] * from[i] >= 0) << i;
        ASSERT_EQ(transposed[i % columns * rows + i / columns], as_is[i]) << i;
      }
    }
  }
}

TEST_P(Fp8Cuda, ZerosAndNumbersThatAreNotFinite) {
  SKIP_WITHOUT_FP8();
  Tensor x = Tensor::zeros({16, 32}, DType::f32);
  for (const double number : numbers_of(to_fp8(to_gpu(x), GetParam()).as_is)) ASSERT_EQ(number, 0);
  x.data<float>()[40] = 1e-36f;
  for (const double number : numbers_of(to_fp8(to_gpu(x), GetParam()).as_is)) ASSERT_EQ(number, 0);
  x.data<float>()[40] = std::nanf("");
  x.data<float>()[3] = 2;
  const std::vector<double> with_nan = numbers_of(to_fp8(to_gpu(x), GetParam()).as_is);
  EXPECT_TRUE(std::isnan(with_nan[40]));
  EXPECT_NEAR(with_nan[3], 2, 1e-6);
  x.data<float>()[40] = INFINITY;
  EXPECT_TRUE(std::isnan(numbers_of(to_fp8(to_gpu(x), GetParam()).as_is)[40]));
}

TEST_P(Fp8Cuda, ProductsAgreeWithDoublePrecision) {
  SKIP_WITHOUT_FP8();
  Random random(2);
  for (int i = 0; i < 24; ++i) {
    const int64_t rows = 16 * random.integer(1, 20), columns = 16 * random.integer(1, 20),
                  inner = 16 * random.integer(1, 60);
    const Fp8Factor a = to_fp8(to_gpu(random.normal_tensor({rows, inner}, 0.01)), GetParam()).as_is;
    const Fp8Factor b = to_fp8(to_gpu(random.normal_tensor({inner, columns}, 30)), Fp8Format::e4m3).transposed;
    const std::vector<double> left = numbers_of(a), right = numbers_of(b);
    const DType dtype = random.coin() ? DType::f32 : DType::bf16;
    const Tensor before = to_gpu(random.normal_tensor({rows, columns}), dtype);
    const Tensor out = to_gpu(to_cpu(before), dtype);
    const int kind = static_cast<int>(random.integer(0, 2));  // new, added to out, with an addend
    Fp8Options options{.accumulate = kind == 1, .fast_sums = random.coin()};
    if (kind == 2) options.addend = before;
    matmul_fp8(out, a, b, options);
    std::vector<double> expected = to_doubles(to_cpu(before)), sizes(expected.size());
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < inner; ++k) {
          const double term = left[row * inner + k] * right[column * inner + k];
          sum += term;
          size += std::abs(term);
        }
        double& place = expected[row * columns + column];
        place = sum + (kind == 0 ? 0 : place);
        sizes[row * columns + column] = size;
      }
    const std::vector<double> got = to_doubles(to_cpu(out));
    // The tensor cores add products with 14 bits (fast) before they reach an f32. A bf16 result is rounded before and
    // after something is added to it.
    const double sums = options.fast_sums ? 2e-3 : 5e-4, stored = dtype == DType::bf16 ? 8e-3 : 1e-6;
    for (size_t k = 0; k < got.size(); ++k)
      ASSERT_NEAR(got[k], expected[k], sums * sizes[k] + stored * (1 + std::abs(expected[k]))) << k;
    const Tensor again = to_gpu(to_cpu(before), dtype);
    matmul_fp8(again, a, b, options);
    ASSERT_TRUE(same_bits(to_cpu(again), to_cpu(out)));
  }
}

// Layers side by side with a weight of 8 rows, whose gradient is a bf16 product, and one with a bias or a residual:
// results and gradients within what rounding to 8 bits allows.
TEST(Fp8LinearCuda, AgreesWithTheLayerInFloat) {
  SKIP_WITHOUT_FP8();
  Random random(3);
  for (int kind = 0; kind < 4; ++kind) {
    const Tensor x = random.normal_tensor({2, 32, 96}), r = random.normal_tensor({2, 32, 64}),
                 bias = random.normal_tensor({64});
    std::vector<Tensor> weights;
    for (const int64_t size : kind == 3 ? std::vector<int64_t>{8, 40, 16} : std::vector<int64_t>{64})
      weights.push_back(random.normal_tensor({size, 96}, 0.1));
    const Tensor dy = random.normal_tensor({2, 32, 64}, 1e-3);
    // The result, then the gradients.
    const auto run = [&](const std::function<Tensor(const Tensor&)>& place, DType dtype, MatmulPrecision precision) {
      Tape tape;
      const auto activation = [&](const Tensor& t) { return to_dtype(place(t), dtype); };
      const Variable own_x(activation(x), true), own_r = kind == 2 ? Variable(activation(r), true) : Variable(),
                                                 own_bias = kind == 1 ? Variable(place(bias), true) : Variable();
      std::vector<Variable> own_weights;
      for (const Tensor& weight : weights) own_weights.emplace_back(place(weight), true);
      const Variable y = kind == 3 ? joined_linear(tape, own_x, own_weights, precision)
                                   : linear(tape, own_x, own_weights[0], own_bias, precision, own_r);
      tape.backward(y, activation(dy));
      std::vector<Tensor> all{y.value(), own_x.gradient()};
      for (const Variable& weight : own_weights) all.push_back(weight.gradient());
      if (own_bias) all.push_back(own_bias.gradient());
      if (own_r) all.push_back(own_r.gradient());
      return all;
    };
    const auto here = [](const Tensor& t) { return t; };
    const auto there = [](const Tensor& t) { return to_gpu(t); };
    const std::vector<Tensor> expected = run(here, DType::f32, MatmulPrecision::f32),
                              rounded = run(there, DType::bf16, MatmulPrecision::fp8),
                              bf16 = run(there, DType::bf16, MatmulPrecision::bf16);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LT(relative_error(to_cpu(rounded[i]), expected[i]), 0.12) << kind << " " << i;
      EXPECT_LT(relative_error(to_cpu(bf16[i]), expected[i]), 0.01) << kind << " " << i;
    }
    // It was not the bf16 product that ran.
    EXPECT_GT(relative_error(to_cpu(rounded[0]), expected[0]), 0.01) << kind;
    EXPECT_GT(relative_error(to_cpu(rounded[1]), expected[1]), 0.01) << kind;
  }
}

}  // namespace
}  // namespace furious
