#include "ops/nn/decay.h"

#include <array>
#include <numeric>

#include "strided.h"

namespace furious {
namespace {

using testing::dense;
using testing::numeric_gradient;
using testing::relative_error;
using testing::same_bits;
using testing::strided_copy;
using testing::strided_empty;
using testing::tensor_of;
using testing::to_doubles;
using Values = std::vector<double>;

// Element i of a tensor over tokens meets element i mod n of a parameter of n elements.
template <class F>
Values broadcast(const Values& x, const Values& parameter, F&& f) {
  Values y;
  for (size_t i = 0; i < x.size(); ++i) y.push_back(f(x[i], parameter[i % parameter.size()]));
  return y;
}

double softplus_oracle(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
}

Shape random_shape(testing::Random& random) {
  return {random.integer(1, 3), random.integer(1, 9), random.integer(1, 20)};
}

constexpr Activation kFunctions[] = {Activation::softplus, Activation::softplus2, Activation::silu, Activation::sigmoid,
                                     Activation::log_sigmoid};

double function_oracle(double x, const HeadFunction& function) {
  const double sigmoid = 1 / (1 + std::exp(-x));
  double y = 0;
  if (function.f == Activation::softplus) y = softplus_oracle(x);
  if (function.f == Activation::softplus2) y = x * softplus_oracle(x);
  if (function.f == Activation::silu) y = x * sigmoid;
  if (function.f == Activation::sigmoid) y = sigmoid;
  if (function.f == Activation::log_sigmoid) y = -softplus_oracle(-x);
  return std::min(static_cast<double>(function.factor) * y, static_cast<double>(function.limit));
}

// Below the least value there is no gradient; at it, as PyTorch's clamp has it, there is.
TEST(HeadFunction, LeastValueCuts) {
  const HeadFunction function{.limit = 2, .least = static_cast<float>(std::log(2.0))};
  const Tensor x = testing::tensor_of({-3, 0, 1, 5}, {1, 1, 4}), dy = testing::tensor_of({1, 1, 1, 1}, {1, 1, 4});
  const Tensor y = head_function_forward(x, {}, function), dx = Tensor::empty_like(x);
  head_function_backward({dx, {}}, dy, x, {}, function);
  const std::vector<double> values = to_doubles(y), gradients = to_doubles(dx);
  EXPECT_EQ(y.data<float>()[0], function.least);
  EXPECT_EQ(y.data<float>()[3], function.limit);
  EXPECT_NEAR(values[2], std::log1p(std::exp(1.0)), 1e-6);
  EXPECT_EQ(gradients[0], 0);
  EXPECT_EQ(gradients[3], 0);
  EXPECT_NEAR(gradients[2], 1 / (1 + std::exp(-1.0)), 1e-6);
}

TEST(Decay, HeadFunctionsMatchTheOracle) {
  testing::Random random(1);
  for (const Activation f : kFunctions)
    for (int round = 0; round < 12; ++round) {
      const Shape shape = random_shape(random);
      HeadFunction function{.f = f, .factor = random.pick<float>({1, -1, 2, -2})};
      if (random.coin()) function.limit = static_cast<float>(random.uniform(0.2, 1));
      Tensor x = random.normal_tensor(shape, 4);
      const Tensor dy = random.normal_tensor(shape), bias = random.normal_tensor({shape[2]});
      const auto value = [&](const Values& at, const Values& b) {
        return broadcast(at, b, [&](double one, double shift) { return function_oracle(one + shift, function); });
      };
      // Finite differences are wrong at the kink of the limit: no value may be near it.
      for (int64_t i = 0; i < x.elements(); ++i) {
        float& at = x.data<float>()[i];
        const auto limit = static_cast<double>(function.limit);
        HeadFunction free = function;
        free.limit = std::numeric_limits<float>::infinity();
        while (std::fabs(function_oracle(static_cast<double>(at + bias.data<float>()[i % shape[2]]), free) - limit) <
               1e-3)
          at += 0.1f;
      }
      SCOPED_TRACE(::testing::Message() << static_cast<int>(f) << " factor " << function.factor << " limit "
                                        << function.limit);
      EXPECT_LT(relative_error(head_function_forward(strided_copy(x), bias, function),
                               value(to_doubles(x), to_doubles(bias))),
                1e-6);
      EXPECT_LT(relative_error(head_function_forward(x, {}, function), value(to_doubles(x), {0})), 1e-6);

      const HeadFunctionGradients out{strided_empty(shape), Tensor::empty_like(bias)};
      head_function_backward(out, dy, strided_copy(x), bias, function);
      const Values dx = numeric_gradient([&](const Values& at) { return value(at, to_doubles(bias)); }, to_doubles(x),
                                         to_doubles(dy));
      const Values db = numeric_gradient([&](const Values& at) { return value(to_doubles(x), at); }, to_doubles(bias),
                                         to_doubles(dy));
      EXPECT_LT(relative_error(out.x, dx, 1e-3), 3e-6);
      EXPECT_LT(relative_error(out.bias, db, 1), 3e-6);
    }
}

// At the limit itself the gradient passes, as PyTorch's clamp has it; above it there is none.
TEST(Decay, TheLimitStopsTheGradient) {
  const HeadFunction function{.limit = static_cast<float>(std::log(2.0))};
  const Tensor x = tensor_of({-1, 0, 1e-3f, 5}, {1, 1, 4}), ones = tensor_of({1, 1, 1, 1}, {1, 1, 4});
  const Tensor y = head_function_forward(x, {}, function), dx = Tensor::empty_like(x);
  head_function_backward({dx, {}}, ones, x, {}, function);
  EXPECT_EQ(y.data<float>()[2], function.limit);
  EXPECT_EQ(y.data<float>()[3], function.limit);
  EXPECT_LT(y.data<float>()[0], function.limit);
  EXPECT_GT(dx.data<float>()[0], 0);
  EXPECT_EQ(dx.data<float>()[2], 0);
  EXPECT_EQ(dx.data<float>()[3], 0);
}

TEST(Decay, SoftplusIsAccurateAtBothTails) {
  const std::vector<float> points = {-3e38f, -1000, -104, -80, -20, -1e-30f, 0, 20, 80, 1000, 3e38f};
  const int64_t n = static_cast<int64_t>(points.size());
  const Tensor x = tensor_of(points, {1, 1, n});
  const Tensor ones = Tensor::empty_like(x);
  fill(ones, 1.0f);
  const Tensor dx = Tensor::empty_like(x);
  head_function_backward({dx, {}}, ones, x, {}, {});
  const Values a = to_doubles(head_function_forward(x, {}, {.factor = -1}));
  const Values slope = to_doubles(dx);
  for (int64_t i = 0; i < n; ++i) {
    const double point = points[i];
    const double sigmoid = point < 0 ? std::exp(point) / (1 + std::exp(point)) : 1 / (1 + std::exp(-point));
    EXPECT_LE(a[i], 0) << point;
    EXPECT_NEAR(a[i], -softplus_oracle(point), 1e-6 * softplus_oracle(point) + 1e-44) << point;
    EXPECT_NEAR(slope[i], sigmoid, 1e-6 * sigmoid + 1e-44) << point;
  }
  const Tensor nan = tensor_of({std::nanf("")}, {1, 1, 1});
  for (const Activation f : kFunctions)
    for (const float limit : {1.0f, std::numeric_limits<float>::infinity()})
      EXPECT_TRUE(std::isnan(to_doubles(head_function_forward(nan, {}, {.f = f, .limit = limit}))[0]));
}

TEST(Decay, OriginalMatchesTheOracle) {
  testing::Random random(2);
  for (int round = 0; round < 20; ++round) {
    const Shape shape = random_shape(random);
    const Tensor dt = random.uniform_tensor(shape, 0.001, 2), da = random.normal_tensor(shape);
    const Tensor a_log = random.uniform_tensor({shape[2]}, 0, 2.8);
    const float factor = random.pick<float>({1, 2});
    const auto f = [&](const Values& at, const Values& logs) {
      return broadcast(at, logs, [&](double step, double log) { return -factor * std::exp(log) * step; });
    };
    const Values steps = to_doubles(dt), logs = to_doubles(a_log);
    EXPECT_LT(relative_error(original_decay_forward(strided_copy(dt), a_log, factor), f(steps, logs)), 1e-6);
    const OriginalDecayGradients out{strided_empty(shape), Tensor::empty_like(a_log)};
    original_decay_backward(out, da, strided_copy(dt), a_log, factor);
    const auto ddt = numeric_gradient([&](const Values& at) { return f(at, logs); }, steps, to_doubles(da));
    const auto dlog = numeric_gradient([&](const Values& at) { return f(steps, at); }, logs, to_doubles(da));
    EXPECT_LT(relative_error(out.dt, ddt), 2e-6);
    EXPECT_LT(relative_error(out.a_log, dlog, 1), 2e-6);
  }
}

TEST(Decay, DiscretizationMatchesTheOracle) {
  testing::Random random(3);
  for (int round = 0; round < 20; ++round) {
    const Shape shape{random.integer(1, 3), random.integer(1, 5), random.integer(1, 3), random.integer(1, 37)};
    const Tensor v = random.normal_tensor(shape), dy = random.normal_tensor(shape);
    const Tensor dt = random.uniform_tensor({shape[0], shape[1], shape[2]}, 0.001, 2);
    const auto f = [&](const Values& values, const Values& steps) {
      Values y;
      for (size_t i = 0; i < values.size(); ++i) y.push_back(values[i] * steps[i / shape[3]]);
      return y;
    };
    const Values values = to_doubles(v), steps = to_doubles(dt);
    EXPECT_LT(relative_error(discretize_forward(strided_copy(v), dt), f(values, steps)), 1e-6);
    const DiscretizeGradients out{strided_empty(shape), Tensor::empty_like(dt)};
    discretize_backward(out, dy, strided_copy(v), dt);
    const auto dv = numeric_gradient([&](const Values& at) { return f(at, steps); }, values, to_doubles(dy));
    const auto ddt = numeric_gradient([&](const Values& at) { return f(values, at); }, steps, to_doubles(dy));
    EXPECT_LT(relative_error(out.v, dv), 2e-6);
    EXPECT_LT(relative_error(out.dt, ddt, 1), 2e-6);
  }
}

TEST(Decay, DResidualMatchesTheOracle) {
  testing::Random random(4);
  for (int round = 0; round < 20; ++round) {
    const Shape shape{random.integer(1, 3), random.integer(1, 50), random.integer(1, 3), random.integer(1, 20)};
    const Tensor o = random.normal_tensor(shape), v = random.normal_tensor(shape), dy = random.normal_tensor(shape);
    const Tensor d = random.normal_tensor({shape[2], shape[3]});
    const Values base = to_doubles(o), values = to_doubles(v), factors = to_doubles(d);
    const auto f = [&](const Values& at, const Values& factor) {
      Values y = broadcast(at, factor, std::multiplies<double>());
      for (size_t i = 0; i < y.size(); ++i) y[i] += base[i];
      return y;
    };
    EXPECT_LT(relative_error(d_residual_forward(o, strided_copy(v), d), f(values, factors)), 1e-6);
    const DResidualGradients out{strided_empty(shape), Tensor::empty_like(d)};
    d_residual_backward(out, dy, strided_copy(v), d);
    const auto dd = numeric_gradient([&](const Values& at) { return f(values, at); }, factors, to_doubles(dy));
    EXPECT_LT(relative_error(out.v, broadcast(to_doubles(dy), factors, std::multiplies<double>())), 2e-6);
    EXPECT_LT(relative_error(out.d, dd, 1), 3e-6);
  }
}

TEST(Decay, SameBitsForEveryNumberOfThreads) {
  testing::Random random(5);
  const Tensor x = random.normal_tensor({2, 500, 7}), dy = random.normal_tensor({2, 500, 7});
  const Tensor bias = random.normal_tensor({7});
  const Tensor v = random.normal_tensor({2, 500, 7, 5}), d = random.normal_tensor({7, 5});
  const auto run = [&] {
    const HeadFunctionGradients softplus{Tensor::empty_like(x), Tensor::empty_like(bias)};
    head_function_backward(softplus, dy, x, bias, {});
    const OriginalDecayGradients decay{Tensor::empty_like(x), Tensor::empty_like(bias)};
    original_decay_backward(decay, dy, x, bias, 1);
    const DResidualGradients residual{Tensor::empty_like(v), Tensor::empty_like(d)};
    d_residual_backward(residual, v, v, d);
    return std::array{softplus.bias, decay.a_log, residual.d};
  };
  const auto first = testing::with_threads(1, run);
  for (int count : {2, 5}) {
    const auto again = testing::with_threads(count, run);
    for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(same_bits(first[i], again[i])) << i;
  }
}

// All operations of Mamba-2 around the mixer on a tape, where dt and v are each used twice, against finite differences.
TEST(Decay, ComposesOnTheTape) {
  testing::Random random(6);
  const Shape shape{1, 3, 2};
  const Variable x(random.normal_tensor(shape), true), bias(random.normal_tensor({2}), true);
  const Variable a_log(random.normal_tensor({2}), true);
  const Variable v(random.normal_tensor({1, 3, 2, 4}), true), d(random.normal_tensor({2, 4}), true);
  const Tensor da = random.normal_tensor(shape), dy = random.normal_tensor({1, 3, 2, 4});

  Tape tape;
  const Variable dt = head_function(tape, x, bias, {});
  const Variable a = original_decay(tape, dt, a_log);
  const Variable y = d_residual(tape, discretize(tape, v, dt), v, d);
  a.add_gradient(dense(da));
  tape.backward(y, dy);

  const auto objective = [&](const Values& xs, const Values& vs) {
    const Values steps = broadcast(xs, to_doubles(bias.value()),
                                   [](double value, double shift) { return softplus_oracle(value + shift); });
    const Values decays =
        broadcast(steps, to_doubles(a_log.value()), [](double step, double log) { return -std::exp(log) * step; });
    double sum = std::inner_product(decays.begin(), decays.end(), to_doubles(da).begin(), 0.0);
    const Values factors = to_doubles(d.value()), weights = to_doubles(dy);
    for (size_t i = 0; i < vs.size(); ++i) sum += weights[i] * vs[i] * (steps[i / 4] + factors[i % 8]);
    return Values{sum};
  };
  const Values xs = to_doubles(x.value()), vs = to_doubles(v.value());
  EXPECT_LT(
      relative_error(x.gradient(), numeric_gradient([&](const Values& at) { return objective(at, vs); }, xs, {1})),
      1e-5);
  EXPECT_LT(
      relative_error(v.gradient(), numeric_gradient([&](const Values& at) { return objective(xs, at); }, vs, {1})),
      1e-5);
  EXPECT_TRUE(a_log.gradient() && bias.gradient() && d.gradient());
}

TEST(Decay, SoftplusDecayIsNeverPositive) {
  Tape tape;
  const Variable x(tensor_of({-2, 3}, {1, 1, 2}), true);
  const Variable a = head_function(tape, x, {}, {.factor = -1});
  tape.backward(a, tensor_of({1, 1}, {1, 1, 2}));
  EXPECT_LT(relative_error(a.value(), {-softplus_oracle(-2), -softplus_oracle(3)}), 1e-6);
  EXPECT_LT(relative_error(x.gradient(), {-1 / (1 + std::exp(2)), -1 / (1 + std::exp(-3))}), 1e-6);
}

TEST(Decay, BadArgumentsAreNamed) {
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  using testing::expect_error;
  expect_error([&] { head_function_forward(zeros({2, 3}), {}, {}); }, {"head_function", "\"x\"", "rank 2"});
  expect_error(
      [&] {
        head_function_forward(zeros({2, 3, 4}), zeros({3}), {});
      },
      {"head_function", "\"bias\"", "[3]", "[4]"});
  expect_error(
      [&] {
        original_decay_forward(zeros({2, 3, 4}), zeros({3}), 1);
      },
      {"original_decay", "\"A_log\"", "[4]"});
  expect_error(
      [&] {
        discretize_forward(zeros({2, 3, 4, 5}), zeros({2, 3, 5}));
      },
      {"discretize", "\"dt\"", "[2, 3, 4]"});
  expect_error(
      [&] {
        d_residual_forward(zeros({2, 3, 4, 5}), zeros({2, 3, 4, 5}), zeros({5, 4}));
      },
      {"d_residual", "\"D\"", "[5, 4]", "[4, 5]"});
  expect_error(
      [&] {
        d_residual_forward(zeros({1, 3, 4, 5}), zeros({2, 3, 4, 5}), zeros({4, 5}));
      },
      {"d_residual", "\"o\"", "[1, 3, 4, 5]"});
}

}  // namespace
}  // namespace furious
