#include "ops/nn/swiglu.h"

#include "strided.h"

namespace furious {
namespace {

using testing::dense;
using testing::relative_error;
using testing::same_bits;
using testing::to_doubles;

std::vector<double> oracle(const std::vector<double>& gate, const std::vector<double>& up) {
  std::vector<double> y;
  for (size_t i = 0; i < gate.size(); ++i) y.push_back(gate[i] / (1 + std::exp(-gate[i])) * up[i]);
  return y;
}

TEST(Swiglu, ValueAndGradientsMatchTheOracleOnHalvesOfOneTensor) {
  testing::Random random(1);
  for (int round = 0; round < 25; ++round) {
    const int64_t rows = random.integer(1, 6);
    const int64_t hidden = random.integer(1, 40);
    const Tensor fused = random.normal_tensor({rows, 2 * hidden}, 3);
    const Tensor gate = fused.slice(-1, 0, hidden), up = fused.slice(-1, hidden, hidden);
    const Tensor dy = random.normal_tensor({rows, hidden});
    const auto g = to_doubles(gate), u = to_doubles(up);
    EXPECT_LT(relative_error(swiglu_forward(gate, up), oracle(g, u)), 1e-6);
    const Tensor d = Tensor::empty_like(fused);
    const SwigluGradients out{d.slice(-1, 0, hidden), d.slice(-1, hidden, hidden)};
    swiglu_backward(out, dy, gate, up);
    const auto dgate = testing::numeric_gradient([&](const auto& at) { return oracle(at, u); }, g, to_doubles(dy));
    const auto dup = testing::numeric_gradient([&](const auto& at) { return oracle(g, at); }, u, to_doubles(dy));
    EXPECT_LT(relative_error(out.gate, dgate), 3e-6);
    EXPECT_LT(relative_error(out.up, dup), 3e-6);
  }
}

TEST(Swiglu, FusedAndSeparateGiveTheSameBits) {
  testing::Random random(2);
  const Variable fused(random.normal_tensor({2, 3, 14}), true);
  const Variable gate(dense(fused.value().slice(-1, 0, 7)), true);
  const Variable up(dense(fused.value().slice(-1, 7, 7)), true);
  const Tensor dy = random.normal_tensor({2, 3, 7});
  Tape tape;
  const Variable y = swiglu(tape, fused);
  tape.backward(y, dy);
  const Variable y_separate = swiglu(tape, gate, up);
  tape.backward(y_separate, dy);
  EXPECT_TRUE(same_bits(y.value(), y_separate.value()));
  EXPECT_TRUE(same_bits(dense(fused.gradient().slice(-1, 0, 7)), gate.gradient()));
  EXPECT_TRUE(same_bits(dense(fused.gradient().slice(-1, 7, 7)), up.gradient()));

  const SwigluGradients expected{Tensor::empty_like(dy), Tensor::empty_like(dy)};
  swiglu_backward(expected, dy, gate.value(), up.value());
  EXPECT_TRUE(same_bits(gate.gradient(), expected.gate));
  EXPECT_TRUE(same_bits(up.gradient(), expected.up));
}

TEST(Swiglu, GateAndUpMayBeOneVariable) {
  const Variable x(testing::tensor_of({1.5f}, {1}), true);
  Tape tape;
  tape.backward(swiglu(tape, x, x));
  const auto square = [](const std::vector<double>& at) { return oracle(at, at); };
  EXPECT_LT(relative_error(x.gradient(), testing::numeric_gradient(square, {1.5}, {1})), 1e-6);
}

TEST(Swiglu, StaysFiniteAtTheTails) {
  const Tensor gate = testing::tensor_of({-1e30f, -200, 200, 1e30f}, {4});
  const Tensor up = testing::tensor_of({1e5f, 1e5f, 1e5f, 1e5f}, {4});
  EXPECT_EQ(to_doubles(swiglu_forward(gate, up))[0], 0);
  const SwigluGradients out{Tensor::empty_like(gate), Tensor::empty_like(gate)};
  swiglu_backward(out, up, gate, up);
  EXPECT_TRUE(testing::all_finite(out.gate));
  EXPECT_TRUE(testing::all_finite(out.up));
}

TEST(Swiglu, BadArgumentsAreNamed) {
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  testing::expect_error(
      [&] {
        swiglu_forward(zeros({2, 4}), zeros({2, 3}));
      },
      {"swiglu", "\"up\"", "[2, 3]", "[2, 4]"});
  testing::expect_error([&] { swiglu(Tape::off(), Variable(zeros({2, 5}))); }, {"swiglu", "[2, 5]", "even"});
}

}  // namespace
}  // namespace furious
