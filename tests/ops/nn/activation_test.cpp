#include "ops/nn/activation.h"

#include "strided.h"

namespace furious {
namespace {

using testing::relative_error;
using testing::to_doubles;

double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
}

double oracle(double x, Activation activation) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::softplus:
      return softplus(x);
    case Activation::softplus2:
      return x * softplus(x);
    case Activation::sigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::log_sigmoid:
      return -softplus(-x);
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  }
  return 0;
}

std::vector<double> oracle(const std::vector<double>& x, Activation activation) {
  std::vector<double> y;
  for (double value : x) y.push_back(oracle(value, activation));
  return y;
}

class ActivationTest : public ::testing::TestWithParam<Activation> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ActivationTest,
                         ::testing::Values(Activation::relu, Activation::silu, Activation::softplus,
                                           Activation::softplus2, Activation::sigmoid, Activation::log_sigmoid,
                                           Activation::gelu_tanh));

TEST_P(ActivationTest, ValueAndGradientMatchTheOracle) {
  testing::Random random(1);
  for (int round = 0; round < 20; ++round) {
    const Shape shape{random.integer(1, 3), random.integer(1, 5), random.integer(1, 40)};
    const Tensor x = random.normal_tensor(shape, 3);
    const Tensor dy = random.normal_tensor(shape);
    const Tensor dx = testing::strided_empty(shape);
    EXPECT_LT(
        relative_error(activation_forward(testing::strided_copy(x), GetParam()), oracle(to_doubles(x), GetParam())),
        1e-6);
    activation_backward(dx, dy, testing::strided_copy(x), GetParam());
    const auto expected = testing::numeric_gradient(
        [](const std::vector<double>& at) { return oracle(at, GetParam()); }, to_doubles(x), to_doubles(dy));
    EXPECT_LT(relative_error(dx, expected), 2e-6);
  }
}

// Compares element by element: in a norm, large values would hide small ones.
TEST_P(ActivationTest, IsAccurateAtTheTails) {
  std::vector<float> tails = {-1e4f, -104, -88, -1e-40f, 0, 1e-40f, 88, 104, 1e4f};
  if (GetParam() != Activation::softplus2) tails.insert(tails.begin(), -3e38f), tails.push_back(3e38f);
  const Tensor x = testing::tensor_of(tails, {static_cast<int64_t>(tails.size())});
  const Tensor y = activation_forward(x, GetParam());
  const Tensor dx = Tensor::empty_like(x);
  const Tensor ones = Tensor::empty_like(x);
  fill(ones, 1.0f);
  activation_backward(dx, ones, x, GetParam());
  EXPECT_TRUE(testing::all_finite(y));
  EXPECT_TRUE(testing::all_finite(dx));
  for (size_t i = 0; i < tails.size(); ++i) {
    const auto at = static_cast<double>(tails[i]);
    const double expected = oracle(at, GetParam()), step = std::max(1e-5, 1e-7 * std::fabs(at));
    const double slope = (oracle(at + step, GetParam()) - oracle(at - step, GetParam())) / (2 * step);
    EXPECT_NEAR(to_doubles(y)[i], expected, 1e-6 * std::fabs(expected) + 1e-37) << tails[i];
    if (at != 0 && std::fabs(at) < 1e-30 && GetParam() == Activation::relu) continue;  // beside the kink
    if (at == 0 && GetParam() == Activation::relu) continue;
    EXPECT_NEAR(to_doubles(dx)[i], slope, 1e-5 * std::fabs(slope) + 1e-9) << tails[i];
  }
}

TEST_P(ActivationTest, PropagatesNaN) {
  const Tensor x = testing::tensor_of({std::nanf(""), 1}, {2});
  EXPECT_TRUE(std::isnan(to_doubles(activation_forward(x, GetParam()))[0]));
}

TEST_P(ActivationTest, RecordsItsGradient) {
  testing::Random random(2);
  const Variable x(random.normal_tensor({3, 5}), true);
  const Tensor dy = random.normal_tensor({3, 5});
  const Tensor expected = Tensor::empty_like(dy);
  activation_backward(expected, dy, x.value(), GetParam());
  Tape tape;
  const Variable y = activation(tape, x, GetParam());
  tape.backward(y, dy);
  EXPECT_TRUE(testing::same_bits(y.value(), activation_forward(x.value(), GetParam())));
  EXPECT_TRUE(testing::same_bits(x.gradient(), expected));
}

TEST(Activation, NoneReturnsTheSameVariable) {
  Tape tape;
  const Variable x(testing::tensor_of({-1}, {1}), true);
  EXPECT_TRUE(activation(tape, x, Activation::none).same_as(x));
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Activation, BadArgumentsAreNamed) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  testing::expect_error([&] { activation_forward({}, Activation::relu); }, {"activation", "\"x\"", "missing"});
  testing::expect_error([&] { activation_forward(to_dtype(x, DType::bf16), Activation::relu); },
                        {"activation", "\"x\"", "bf16", "f32"});
  testing::expect_error(
      [&] {
        activation_backward(x, Tensor::zeros({3, 2}, DType::f32), x, Activation::relu);
      },
      {"activation backward", "\"dy\"", "[3, 2]", "[2, 3]"});
}

}  // namespace
}  // namespace furious
