#include "ops/nn/rms_norm.h"

#include "strided.h"

namespace furious {
namespace {

using testing::dense;
using testing::relative_error;
using testing::same_bits;
using testing::strided_copy;
using testing::strided_empty;
using testing::to_doubles;

constexpr float kEps = 1e-5f;

std::vector<double> oracle(const std::vector<double>& x, const std::vector<double>& weight,
                           const std::vector<double>& z, double eps = kEps) {
  const size_t n = weight.size();
  std::vector<double> y(x.size());
  for (size_t start = 0; start < x.size(); start += n) {
    double squares = 0;
    for (size_t i = start; i < start + n; ++i) {
      y[i] = z.empty() ? x[i] : x[i] * z[i] / (1 + std::exp(-z[i]));
      squares += y[i] * y[i];
    }
    for (size_t i = 0; i < n; ++i) y[start + i] *= weight[i] / std::sqrt(squares / n + eps);
  }
  return y;
}

struct Data {
  Data(testing::Random& random, const Shape& shape, bool gated)
      : x(strided_copy(random.normal_tensor(shape, 2))),
        weight(random.normal_tensor({shape[shape.rank() - 1]})),
        z(gated ? strided_copy(random.normal_tensor(shape, 2)) : Tensor()),
        dy(random.normal_tensor(shape)) {}

  std::vector<double> z_values() const { return z ? to_doubles(z) : std::vector<double>(); }
  RmsNormGradients gradients() const {
    const RmsNormGradients out{strided_empty(x.shape()), Tensor::empty_like(weight),
                               z ? strided_empty(x.shape()) : Tensor()};
    rms_norm_backward(out, dy, x, weight, rms_norm_forward(x, weight, kEps, z).inverse_rms, z);
    return out;
  }
  Tensor x, weight, z, dy;
};

class RmsNormTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Gate, RmsNormTest, ::testing::Bool());

TEST_P(RmsNormTest, ValueAndGradientsMatchTheOracle) {
  testing::Random random(1);
  for (int round = 0; round < 25; ++round) {
    const Data data(random, {random.integer(1, 3), random.integer(1, 4), random.integer(1, 40)}, GetParam());
    const auto x = to_doubles(data.x), weight = to_doubles(data.weight), z = data.z_values(), dy = to_doubles(data.dy);
    EXPECT_LT(relative_error(rms_norm_forward(data.x, data.weight, kEps, data.z).y, oracle(x, weight, z)), 1e-6);
    const RmsNormGradients out = data.gradients();
    const auto dx = testing::numeric_gradient([&](const auto& at) { return oracle(at, weight, z); }, x, dy);
    const auto dw = testing::numeric_gradient([&](const auto& at) { return oracle(x, at, z); }, weight, dy);
    EXPECT_LT(relative_error(out.x, dx, 1), 1e-5) << "round " << round;
    EXPECT_LT(relative_error(out.weight, dw, 1), 1e-5) << "round " << round;
    if (!GetParam()) continue;
    const auto dz = testing::numeric_gradient([&](const auto& at) { return oracle(x, weight, at); }, z, dy);
    EXPECT_LT(relative_error(out.z, dz, 1), 1e-5) << "round " << round;
  }
}

TEST(RmsNorm, AccumulatesIntoTheGradientOfAResidual) {
  testing::Random random(5);
  const Data data(random, {7, 37}, false);
  const RmsNormGradients alone = data.gradients();
  const Variable x(dense(data.x), true), weight(data.weight, true);
  const Tensor brought = random.normal_tensor({7, 37});
  Tape tape;
  const Variable y = rms_norm(tape, x, weight, kEps);
  x.add_gradient(to_dtype(brought, DType::f32));
  tape.backward(y, data.dy);
  add_into(brought, dense(alone.x));
  EXPECT_TRUE(same_bits(x.gradient(), brought));
  EXPECT_TRUE(same_bits(weight.gradient(), alone.weight));
}

// A row of the weight for each group is a norm of each group alone.
TEST_P(RmsNormTest, GroupsMatchTheOracle) {
  testing::Random random(6);
  for (int round = 0; round < 10; ++round) {
    const int64_t groups = random.integer(1, 4), n = random.integer(1, 20), rows = random.integer(1, 5);
    const Shape shape{2, rows, groups, n};
    const auto input = [&] { return strided_copy(random.normal_tensor(shape, 2)); };
    const Variable x(input(), true), weight(random.normal_tensor({groups, n}), true);
    const Variable z = GetParam() ? Variable(input(), true) : Variable();
    const Tensor dy = random.normal_tensor(shape);
    const auto f = [&](const std::vector<double>& at, const std::vector<double>& w, const std::vector<double>& gate) {
      std::vector<double> y;
      for (int64_t row = 0; row < 2 * rows * groups; ++row) {
        const auto part = [n](const std::vector<double>& from, int64_t i) {
          return from.empty() ? from : std::vector<double>(from.begin() + i * n, from.begin() + (i + 1) * n);
        };
        const auto own = oracle(part(at, row), part(w, row % groups), part(gate, row));
        y.insert(y.end(), own.begin(), own.end());
      }
      return y;
    };
    const auto xs = to_doubles(x.value()), ws = to_doubles(weight.value());
    const auto zs = GetParam() ? to_doubles(z.value()) : std::vector<double>();
    Tape tape;
    const Variable y = rms_norm(tape, x, weight, kEps, z);
    tape.backward(y, dy);
    EXPECT_LT(relative_error(y.value(), f(xs, ws, zs)), 1e-6);
    const auto gradient = [&](auto&& of, const std::vector<double>& at) {
      return testing::numeric_gradient(of, at, to_doubles(dy));
    };
    EXPECT_LT(relative_error(x.gradient(), gradient([&](const auto& at) { return f(at, ws, zs); }, xs), 1), 1e-5);
    EXPECT_LT(relative_error(weight.gradient(), gradient([&](const auto& at) { return f(xs, at, zs); }, ws), 1), 1e-5);
    if (!GetParam()) continue;
    EXPECT_LT(relative_error(z.gradient(), gradient([&](const auto& at) { return f(xs, ws, at); }, zs), 1), 1e-5);
  }
}

TEST_P(RmsNormTest, SameBitsForEveryNumberOfThreads) {
  testing::Random random(2);
  const Data data(random, {500, 70}, GetParam());
  const RmsNormGradients first = testing::with_threads(1, [&] { return data.gradients(); });
  for (int count : {1, 2, 5}) {
    const RmsNormGradients again = testing::with_threads(count, [&] { return data.gradients(); });
    EXPECT_TRUE(same_bits(dense(first.x), dense(again.x)));
    EXPECT_TRUE(same_bits(first.weight, again.weight));
    EXPECT_TRUE(!GetParam() || same_bits(dense(first.z), dense(again.z)));
  }
}

TEST_P(RmsNormTest, RecordsItsGradients) {
  testing::Random random(3);
  const Data data(random, {4, 9}, GetParam());
  const RmsNormGradients expected = data.gradients();
  const Variable x(data.x, true), weight(data.weight, true);
  const Variable z = GetParam() ? Variable(data.z, true) : Variable();
  Tape tape;
  tape.backward(rms_norm(tape, x, weight, kEps, z), data.dy);
  EXPECT_TRUE(same_bits(x.gradient(), dense(expected.x)));
  EXPECT_TRUE(same_bits(weight.gradient(), expected.weight));
  EXPECT_TRUE(!GetParam() || same_bits(z.gradient(), dense(expected.z)));
}

TEST(RmsNorm, ManyRowsMatchTheOracle) {
  testing::Random random(4);
  const Data data(random, {1000, 5}, false);
  const auto x = to_doubles(data.x);
  const auto dw = testing::numeric_gradient([&](const auto& at) { return oracle(x, at, {}); }, to_doubles(data.weight),
                                            to_doubles(data.dy));
  EXPECT_LT(relative_error(data.gradients().weight, dw), 1e-5);
}

TEST(RmsNorm, HugeTinyAndZeroRowsStayFinite) {
  const Tensor x = testing::tensor_of({1e18f, -1e18f, 1e-30f, 1e-38f, 0, 0, 3e38f, 1}, {4, 2});
  const Tensor weight = testing::tensor_of({1, 1}, {2});
  const RmsNormResult result = rms_norm_forward(x, weight, kEps);
  const RmsNormGradients out{Tensor::empty_like(x), Tensor::empty_like(weight), {}};
  EXPECT_TRUE(testing::all_finite(result.y));
  EXPECT_EQ(to_doubles(result.y)[4], 0);
  EXPECT_NEAR(to_doubles(result.y)[0], 1, 1e-6);
  const Tensor ones = testing::tensor_of({1, 1, 1, 1, 1, 1, 1, 1}, {4, 2});
  rms_norm_backward(out, ones, x, weight, result.inverse_rms);
  EXPECT_TRUE(testing::all_finite(out.x));
  EXPECT_TRUE(testing::all_finite(out.weight));
}

TEST(RmsNorm, AppliesEps) {
  const Tensor x = testing::tensor_of({3, 4}, {1, 2});
  const Tensor weight = testing::tensor_of({1, 2}, {2});
  const auto y = to_doubles(rms_norm_forward(x, weight, 3.5f).y);
  EXPECT_NEAR(y[0], 3 / 4.0, 1e-6);
  EXPECT_NEAR(y[1], 8 / 4.0, 1e-6);
}

TEST(RmsNorm, BadArgumentsAreNamed) {
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  testing::expect_error(
      [&] {
        rms_norm_forward(zeros({2, 4}), zeros({3}), kEps);
      },
      {"rms_norm", "\"weight\"", "[3]", "[4]"});
  testing::expect_error(
      [&] {
        rms_norm_forward(zeros({2, 4}), zeros({4}), kEps, zeros({4, 2}));
      },
      {"rms_norm", "\"z\"", "[4, 2]", "[2, 4]"});
  testing::expect_error([&] { rms_norm_forward(zeros({2, 4}), zeros({4}), -1); }, {"rms_norm", "eps is -1"});
}

}  // namespace
}  // namespace furious
