#include "ops/nn/linear.h"

#include "base/parallel.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::numeric_gradient;
using testing::relative_error;
using testing::same_bits;
using testing::tensor_of;
using testing::to_doubles;

using Vector = std::vector<double>;

Vector linear_oracle(const Vector& x, const Vector& weight, const Vector& bias, int64_t in, int64_t out) {
  const auto rows = static_cast<int64_t>(x.size()) / in;
  Vector y(rows * out);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < out; ++o) {
      double sum = bias.empty() ? 0 : bias[o];
      for (int64_t i = 0; i < in; ++i) sum += x[r * in + i] * weight[o * in + i];
      y[r * out + o] = sum;
    }
  return y;
}

TEST(Linear, ForwardAgreesWithTheOracle) {
  testing::Random random(20);
  for (int i = 0; i < 30; ++i) {
    const int64_t in = random.integer(1, 70);
    const int64_t out = random.integer(1, 70);
    const Shape shape = random.pick<Shape>({{in}, {1, in}, {7, in}, {3, 5, in}, {2, 1, 3, in}});
    const Tensor x = random.normal_tensor(shape);
    const Tensor weight = random.normal_tensor({out, in});
    const Tensor bias = random.coin() ? random.normal_tensor({out}) : Tensor{};
    const Tensor y = linear_forward(x, weight, bias);
    Shape expected_shape = shape;
    expected_shape[shape.rank() - 1] = out;
    EXPECT_EQ(y.shape(), expected_shape);
    const Vector expected =
        linear_oracle(to_doubles(x), to_doubles(weight), bias ? to_doubles(bias) : Vector{}, in, out);
    EXPECT_LT(relative_error(y, expected), 3e-6) << to_string(shape) << " to " << out;
  }
}

TEST(Linear, AddsAResidualAndPassesItsGradient) {
  testing::Random random(22);
  for (int i = 0; i < 10; ++i) {
    const int64_t in = random.integer(1, 20), out = random.integer(1, 20), rows = random.integer(1, 9);
    const Tensor x = random.normal_tensor({2, rows, in}), weight = random.normal_tensor({out, in});
    const Tensor residual = random.normal_tensor({2, rows, out}), dy = random.normal_tensor({2, rows, out});
    const Tensor plain = linear_forward(x, weight);
    add_into(plain, residual);
    const Variable r(residual, true), input(x, true);
    Tape tape;
    const Variable y = linear(tape, input, Variable(weight, true), {}, MatmulPrecision::f32, r);
    EXPECT_LT(relative_error(y.value(), plain), 1e-6);
    tape.backward(y, dy);
    EXPECT_TRUE(same_bits(r.gradient(), dy));
    const Tensor dx = Tensor::empty_like(x);
    linear_backward_input({dx, false}, dy, weight);
    EXPECT_TRUE(same_bits(input.gradient(), dx));
  }
  const Tensor x = Tensor::zeros({3, 2}, DType::f32), weight = Tensor::zeros({4, 2}, DType::f32);
  expect_error(
      [&] {
        linear_forward(x, weight, {}, MatmulPrecision::f32, Tensor::zeros({3, 5}, DType::f32));
      },
      {"linear", "\"residual\"", "[3, 5]", "[3, 4]"});
  expect_error(
      [&] {
        linear_forward(x, weight, Tensor::zeros({4}, DType::f32), MatmulPrecision::f32,
                       Tensor::zeros({3, 4}, DType::f32));
      },
      {"linear", "bias", "residual"});
}

TEST(Linear, FusedLayersEqualSeparateLayers) {
  testing::Random random(23);
  for (int i = 0; i < 10; ++i) {
    const int64_t in = random.integer(1, 20), rows = random.integer(1, 9);
    const Variable x(random.normal_tensor({2, rows, in}), true), alone(to_dtype(x.value(), DType::f32), true);
    std::vector<Variable> weights, ones;
    int64_t out = 0;
    for (int64_t k = random.integer(1, 3); k >= 0; --k) {
      weights.emplace_back(random.normal_tensor({random.integer(1, 20), in}), k != 1);
      ones.emplace_back(to_dtype(weights.back().value(), DType::f32), k != 1);
      out += weights.back().value().size(0);
    }
    const Tensor dy = random.normal_tensor({2, rows, out});
    for (int pass = 0; pass < 2; ++pass) {  // the second accumulates into the gradients of the first
      Tape tape;
      const Variable y = joined_linear(tape, x, weights);
      ASSERT_EQ(y.value().shape(), (Shape{2, rows, out}));
      tape.backward(y, dy);
      int64_t start = 0;
      for (const Variable& weight : ones) {
        Tape own;
        const Variable part = linear(own, alone, weight);
        const int64_t size = weight.value().size(0);
        EXPECT_LT(relative_error(y.value().slice(-1, start, size), to_doubles(part.value())), 1e-6);
        own.backward(part, to_dtype(dy.slice(-1, start, size), DType::f32));
        start += size;
      }
    }
    EXPECT_LT(relative_error(x.gradient(), to_doubles(alone.gradient())), 1e-5);
    for (size_t k = 0; k < weights.size(); ++k)
      if (weights[k].needs_gradient()) {
        EXPECT_LT(relative_error(weights[k].gradient(), to_doubles(ones[k].gradient())), 1e-5) << k;
      }
  }
  expect_error(
      [] {
        const Variable x(Tensor::zeros({2, 3}, DType::f32));
        joined_linear(Tape::off(), x,
                      {Variable(Tensor::zeros({4, 3}, DType::f32)), Variable(Tensor::zeros({4, 5}, DType::f32))});
      },
      {"linear", "\"weights\"", "[4, 5]"});
}

TEST(Linear, BackwardAgreesWithFiniteDifferences) {
  testing::Random random(21);
  for (int i = 0; i < 6; ++i) {
    const int64_t in = random.integer(1, 9);
    const int64_t out = random.integer(1, 9);
    const Tensor x = random.normal_tensor({2, random.integer(1, 4), in});
    const Tensor weight = random.normal_tensor({out, in});
    const Tensor bias = random.normal_tensor({out});
    const Tensor dy = random.normal_tensor({2, x.size(1), out});
    const Vector xs = to_doubles(x);
    const Vector ws = to_doubles(weight);
    const Vector bs = to_doubles(bias);
    const Vector upstream = to_doubles(dy);
    const Tensor dx = Tensor::empty_like(x);
    const Tensor dweight = Tensor::empty_like(weight);
    const Tensor dbias = Tensor::empty_like(bias);
    linear_backward_input({dx, false}, dy, weight);
    linear_backward_weight({dweight, false}, dy, x);
    linear_backward_bias({dbias, false}, dy);
    const auto at_x = [&](const Vector& v) { return linear_oracle(v, ws, bs, in, out); };
    const auto at_weight = [&](const Vector& v) { return linear_oracle(xs, v, bs, in, out); };
    const auto at_bias = [&](const Vector& v) { return linear_oracle(xs, ws, v, in, out); };
    EXPECT_LT(relative_error(dx, numeric_gradient(at_x, xs, upstream)), 2e-6);
    EXPECT_LT(relative_error(dweight, numeric_gradient(at_weight, ws, upstream)), 2e-6);
    EXPECT_LT(relative_error(dbias, numeric_gradient(at_bias, bs, upstream)), 2e-6);
  }
}

TEST(Linear, BackwardAddsToASum) {
  testing::Random random(22);
  const Tensor x = random.normal_tensor({5, 3});
  const Tensor weight = random.normal_tensor({4, 3});
  const Tensor dy = random.normal_tensor({5, 4});
  const auto twice = [&](const Shape& shape, const std::function<void(const GradientTarget&)>& backward) {
    const Tensor once = Tensor::empty(shape, DType::f32);
    const Tensor sum = Tensor::empty(shape, DType::f32);
    fill(sum, 10.0f);
    backward({once, false});
    backward({sum, true});
    Vector expected = to_doubles(once);
    for (double& value : expected) value += 10;
    EXPECT_LT(relative_error(sum, expected), 1e-6);
  };
  twice({5, 3}, [&](const GradientTarget& target) { linear_backward_input(target, dy, weight); });
  twice({4, 3}, [&](const GradientTarget& target) { linear_backward_weight(target, dy, x); });
  twice({4}, [&](const GradientTarget& target) { linear_backward_bias(target, dy); });
}

TEST(Linear, BiasGradientOfManyRowsKeepsItsPrecision) {
  testing::Random random(23);
  constexpr int64_t kRows = 20000;
  constexpr int64_t kColumns = 67;
  const Tensor dy = random.uniform_tensor({kRows, kColumns}, 0.9, 1.1);
  const Vector values = to_doubles(dy);
  Vector expected(kColumns);
  for (int64_t i = 0; i < kRows * kColumns; ++i) expected[i % kColumns] += values[i];
  const Tensor dbias = Tensor::empty({kColumns}, DType::f32);
  linear_backward_bias({dbias, false}, dy);
  EXPECT_LT(relative_error(dbias, expected), 6e-8);
}

TEST(Linear, NoRows) {
  const Tensor x = Tensor::zeros({0, 3}, DType::f32);
  const Tensor weight = Tensor::zeros({4, 3}, DType::f32);
  EXPECT_EQ(linear_forward(x, weight).shape(), (Shape{0, 4}));
  const Tensor dy = Tensor::zeros({0, 4}, DType::f32);
  const Tensor dweight = Tensor::empty({4, 3}, DType::f32);
  const Tensor dbias = Tensor::empty({4}, DType::f32);
  fill(dweight, NAN);
  fill(dbias, NAN);
  linear_backward_weight({dweight, false}, dy, x);
  linear_backward_bias({dbias, false}, dy);
  EXPECT_EQ(to_doubles(dweight), Vector(12, 0.0));
  EXPECT_EQ(to_doubles(dbias), Vector(4, 0.0));
}

TEST(Linear, SumsGradientsOfSharedInputAndWeight) {
  testing::Random random(24);
  const Variable x(random.normal_tensor({2, 3, 5}), true);
  const Variable weight(random.normal_tensor({4, 5}), true);
  const Variable bias(random.normal_tensor({4}), true);
  Tape tape;
  const Variable y = add(tape, linear(tape, x, weight, bias), linear(tape, x, weight));
  const Tensor dy = random.normal_tensor({2, 3, 4});
  tape.backward(y, to_dtype(dy, DType::f32));
  const Vector xs = to_doubles(x.value());
  const Vector ws = to_doubles(weight.value());
  const Vector bs = to_doubles(bias.value());
  const auto both = [](const Vector& in_x, const Vector& in_w, const Vector& in_b) {
    Vector sum = linear_oracle(in_x, in_w, in_b, 5, 4);
    const Vector other = linear_oracle(in_x, in_w, {}, 5, 4);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    return sum;
  };
  const Vector upstream = to_doubles(dy);
  EXPECT_LT(relative_error(y.value(), both(xs, ws, bs)), 1e-6);
  const auto at_x = [&](const Vector& v) { return both(v, ws, bs); };
  const auto at_weight = [&](const Vector& v) { return both(xs, v, bs); };
  const auto at_bias = [&](const Vector& v) { return both(xs, ws, v); };
  EXPECT_LT(relative_error(x.gradient(), numeric_gradient(at_x, xs, upstream)), 2e-6);
  EXPECT_LT(relative_error(weight.gradient(), numeric_gradient(at_weight, ws, upstream)), 2e-6);
  EXPECT_LT(relative_error(bias.gradient(), numeric_gradient(at_bias, bs, upstream)), 2e-6);
}

TEST(Linear, ConstantsGetNoGradient) {
  testing::Random random(25);
  const Variable x(random.normal_tensor({3, 5}));
  const Variable weight(random.normal_tensor({4, 5}), true);
  Tape tape;
  tape.backward(linear(tape, x, weight), random.normal_tensor({3, 4}));
  EXPECT_FALSE(x.gradient().defined());
  EXPECT_TRUE(weight.gradient().defined());
}

TEST(Linear, StoredWeightsAreConverted) {
  testing::Random random(26);
  const Tensor x = random.normal_tensor({3, 5});
  for (DType dtype : {DType::bf16, DType::f16}) {
    const Tensor weight = random.normal_tensor({4, 5}, 1, dtype);
    EXPECT_TRUE(same_bits(linear_forward(x, weight), linear_forward(x, to_dtype(weight, DType::f32))));
  }
}

TEST(Linear, SameBitsTwice) {
  testing::Random random(27);
  const Tensor x = random.normal_tensor({130, 65});
  const Tensor weight = random.normal_tensor({67, 65});
  const Tensor bias = random.normal_tensor({67});
  EXPECT_TRUE(same_bits(linear_forward(x, weight, bias), linear_forward(x, weight, bias)));
}

TEST(Linear, RefusesBadInput) {
  const auto zeros = [](Shape shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor x = zeros({2, 3});
  const Tensor weight = zeros({4, 3});
  const Tensor dy = zeros({2, 4});
  expect_error([&] { linear_forward({}, weight); }, {"linear", "\"x\"", "missing"});
  expect_error([&] { linear_forward(x, {}); }, {"linear", "\"weight\"", "missing"});
  expect_error([&] { linear(Tape::off(), Variable(x), {}); }, {"linear", "\"weight\"", "missing"});
  expect_error([&] { linear_forward(x, zeros({4, 5})); }, {"linear", "\"x\"", "[2, 3]", "5"});
  expect_error([&] { linear_forward(x, zeros({12})); }, {"linear", "\"weight\"", "rank 1", "rank 2"});
  expect_error([&] { linear_forward(x, weight, zeros({3})); }, {"linear", "\"bias\"", "[3]", "[4]"});
  expect_error([&] { linear_forward(Tensor::zeros({2, 3}, DType::bf16), weight); }, {"linear", "\"x\"", "bf16"});
  expect_error([&] { linear_forward(x, Tensor::zeros({4, 3}, DType::i32)); }, {"linear", "\"weight\"", "i32"});
  expect_error([&] { linear_forward(zeros({2, 6}).slice(1, 0, 3), weight); }, {"linear", "\"x\"", "not contiguous"});
  expect_error([&] { linear_forward(zeros({}), weight); }, {"linear", "\"x\"", "rank 0"});
  expect_error(
      [&] {
        linear_backward_input({zeros({3, 3})}, dy, weight);
      },
      {"linear_backward_input", "dy", "[2, 4]", "[3, 4]"});
  expect_error(
      [&] {
        linear_backward_weight({zeros({4, 4})}, dy, x);
      },
      {"linear_backward_weight", "\"dweight\"", "[4, 4]", "[4, 3]"});
  expect_error(
      [&] {
        linear_backward_weight({zeros({4, 3})}, zeros({3, 4}), x);
      },
      {"linear_backward_weight", "dy", "[3, 4]"});
  expect_error([&] { linear_backward_bias({zeros({3})}, dy); }, {"linear_backward_bias", "\"dbias\"", "[3]", "[4]"});
  float there = 0;
  const Tensor elsewhere = Tensor::wrap(&there, {2, 3}, DType::f32, {DeviceKind::cuda, 0});
  expect_error([&] { linear_forward(elsewhere, weight); }, {"linear", "\"x\"", "cuda:0", "cpu"});
}

}  // namespace
}  // namespace furious
