#include "ops/nn/layer_norm.h"

#include "strided.h"

namespace furious {
namespace {

using testing::relative_error;
using testing::to_doubles;

constexpr float kEps = 1e-5f;

std::vector<double> oracle(const std::vector<double>& x, const std::vector<double>& weight,
                           const std::vector<double>& bias) {
  const size_t n = weight.size();
  std::vector<double> y(x.size());
  for (size_t start = 0; start < x.size(); start += n) {
    double mean = 0, variance = 0;
    for (size_t i = 0; i < n; ++i) mean += x[start + i] / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) variance += std::pow(x[start + i] - mean, 2) / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i)
      y[start + i] = (x[start + i] - mean) / std::sqrt(variance + static_cast<double>(kEps)) * weight[i] + bias[i];
  }
  return y;
}

TEST(LayerNorm, ValueAndGradientsMatchTheOracle) {
  testing::Random random(1);
  for (int round = 0; round < 25; ++round) {
    const int64_t n = random.integer(2, 40);
    const Shape shape{random.integer(1, 3), random.integer(1, 4), n};
    const Tensor input = random.normal_tensor(shape, 2);
    for (int64_t i = 0; i < input.elements(); ++i) input.data<float>()[i] += 3;  // a mean to subtract
    const Variable x(testing::strided_copy(input), true);
    const Variable weight(random.normal_tensor({n}), true), bias(random.normal_tensor({n}), true);
    const Tensor dy = random.normal_tensor(shape);
    const auto xs = to_doubles(x.value()), ws = to_doubles(weight.value()), bs = to_doubles(bias.value());
    Tape tape;
    const Variable y = layer_norm(tape, x, weight, bias, kEps);
    EXPECT_LT(relative_error(y.value(), oracle(xs, ws, bs)), 2e-6);
    EXPECT_TRUE(testing::same_bits(y.value(), layer_norm_forward(x.value(), weight.value(), bias.value(), kEps)));
    tape.backward(y, dy);
    const auto gradient = [&](auto&& of, const std::vector<double>& at) {
      return testing::numeric_gradient(of, at, to_doubles(dy));
    };
    const auto dx = gradient([&](const auto& at) { return oracle(at, ws, bs); }, xs);
    EXPECT_LT(relative_error(x.gradient(), dx, 1), 2e-5) << "round " << round;
    const auto dw = gradient([&](const auto& at) { return oracle(xs, at, bs); }, ws);
    EXPECT_LT(relative_error(weight.gradient(), dw, 1), 1e-5);
    const auto db = gradient([&](const auto& at) { return oracle(xs, ws, at); }, bs);
    EXPECT_LT(relative_error(bias.gradient(), db, 1), 1e-5);
  }
}

TEST(LayerNorm, ConstantRowsAreTheBias) {
  const Tensor y = layer_norm_forward(testing::tensor_of({7, 7, 7, 0, 0, 0}, {2, 3}),
                                      testing::tensor_of({1, 2, 3}, {3}), testing::tensor_of({4, 5, 6}, {3}), kEps);
  EXPECT_EQ(to_doubles(y), (std::vector<double>{4, 5, 6, 4, 5, 6}));
}

TEST(LayerNorm, RefusesABiasOfAnotherLength) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32), weight = Tensor::zeros({3}, DType::f32);
  testing::expect_error([&] { layer_norm_forward(x, weight, Tensor::zeros({4}, DType::f32), kEps); }, {"bias"});
}

}  // namespace
}  // namespace furious
