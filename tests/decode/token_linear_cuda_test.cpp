#include "decode/token_linear.h"

#include <cmath>

#include "cuda.h"
#ifdef FURIOUS_CUDA
#include "gpu/device.h"
#endif
#include "ops/elementwise.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;
using Kind = TokenPart::Kind;

// Numbers as the GPU has them, and in double precision.
struct Numbers {
  Tensor gpu;
  std::vector<double> exact;

  Numbers() = default;
  Numbers(const Tensor& x, DType dtype)
      : gpu(to_gpu(to_dtype(x, dtype))), exact(to_doubles(to_cpu(to_dtype(gpu, DType::f32)))) {}
};

double activated(double x, Activation f) {
  if (f == Activation::relu) return std::max(x, 0.0);
  return f == Activation::silu ? x / (1 + std::exp(-x)) : x;
}
double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
}

// One input and one part, and the expected results in double precision.
struct Case {
  int64_t rows, in, out, window = 0;
  Numbers x, gate, norm, weight, second, bias, conv_weight, conv_state, a_log, residual;
  TokenPart part;
  std::vector<int32_t> slots;

  Case(Random& random, Kind kind)
      : rows(random.pick<int64_t>({1, 2, 7, 8})),
        in(8 * random.pick<int64_t>({3, 16, 33, 128, 257})),
        out(random.pick<int64_t>({1, 24, 77, 500})),
        x(random.normal_tensor({rows, in}, 2), DType::bf16) {
    part.kind = kind;
    if (random.coin()) gate = {random.normal_tensor({rows, in}), DType::bf16};
    if (random.coin()) norm = {random.normal_tensor({in}), DType::f32};
    weight = {matrix(random), DType::bf16};
    if (kind == Kind::swiglu) second = {matrix(random), DType::bf16};
    if (kind != Kind::swiglu && kind != Kind::add && random.coin()) bias = {random.normal_tensor({out}), DType::f32};
    if (kind == Kind::add) residual = {random.normal_tensor({rows, out}), DType::bf16};
    if (kind == Kind::softplus) {
      part.sign = random.pick<float>({1, -1, -2});
      if (random.coin()) a_log = {random.normal_tensor({out}), DType::f32};
    }
    if (kind == Kind::value) set_value(random);
    // In descending order, without two of the slots, which must not change.
    for (int64_t row = 0; row < rows; ++row) slots.push_back(static_cast<int32_t>(rows - row));
    bind();
  }

  Tensor matrix(Random& random) const {
    return random.normal_tensor({out, in}, 1 / std::sqrt(static_cast<double>(in)));
  }
  void set_value(Random& random) {
    part.after_conv = random.pick<Activation>({Activation::none, Activation::silu});
    part.qk_activation = random.pick<Activation>({Activation::none, Activation::relu, Activation::silu});
    part.qk_width = out / 2;
    window = random.pick<int64_t>({0, 2, 3, 4});
    if (window == 0) return;
    conv_weight = {random.normal_tensor({out, window}), DType::f32};
    conv_state = {random.normal_tensor({rows + 2, window - 1, out}), DType::f32};
  }
  void bind() {
    part.weight = weight.gpu;
    part.second = second.gpu;
    part.bias = bias.gpu;
    part.conv_weight = conv_weight.gpu;
    part.conv_state = conv_state.gpu;
    part.slots = to_gpu(int_tensor_of(slots, {rows}));
    part.a_log = a_log.gpu;
    const bool f32 = part.kind == Kind::softplus || (part.kind == Kind::value && out % 2 == 1);
    part.out = residual.gpu ? residual.gpu : Tensor::empty({rows, out}, f32 ? DType::f32 : DType::bf16, kGpu);
    if (a_log.gpu) part.decay = Tensor::empty({rows, out}, DType::f32, kGpu);
  }
  TokenInput input() const { return {x.gpu, gate.gpu, norm.gpu, 1e-5f}; }

  double product(const Numbers& matrix_of, int64_t row, int64_t column) const {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < in; ++i) {
      double u = x.exact[row * in + i];
      if (gate.gpu) u *= activated(gate.exact[row * in + i], Activation::silu);
      squares += u * u;
      if (norm.gpu) u *= norm.exact[i];
      sum += u * matrix_of.exact[column * in + i];
    }
    return norm.gpu ? sum / std::sqrt(squares / static_cast<double>(in) + 1e-5) : sum;
  }
  double expected(int64_t row, int64_t column) const {
    double y = product(weight, row, column);
    if (part.kind == Kind::add) return y + residual.exact[row * out + column];
    if (part.kind == Kind::swiglu) return activated(y, Activation::silu) * product(second, row, column);
    if (part.kind == Kind::value && window > 0) {
      y *= conv_weight.exact[column * window + window - 1];
      for (int64_t back = 1; back < window; ++back)
        y += conv_weight.exact[column * window + window - 1 - back] *
             conv_state.exact[(slots[row] * (window - 1) + window - 1 - back) * out + column];
    }
    if (bias.gpu) y += bias.exact[column];
    if (part.kind == Kind::softplus) return static_cast<double>(part.sign) * softplus(y);
    y = activated(y, part.after_conv);
    return column < part.qk_width ? activated(y, part.qk_activation) : y;
  }
};

// Numbers are of order one; the tolerance for a small one is absolute.
void expect_close(const Tensor& gpu, const std::vector<double>& expected, std::string_view what) {
  const double floor = std::sqrt(static_cast<double>(expected.size()));
  const Tensor reference = Tensor::empty(gpu.shape(), DType::f32);
  for (size_t i = 0; i < expected.size(); ++i) reference.data<float>()[i] = static_cast<float>(expected[i]);
  EXPECT_LE(relative_error(to_cpu(to_dtype(gpu, DType::f32)), reference, floor), 1e-2) << what;
}

TEST(TokenLinearCuda, AgreesWithTheOracle) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  int computed = 0;
  for (int i = 0; i < 80; ++i) {
    const Case c(random, static_cast<Kind>(i % 4));
    SCOPED_TRACE(::testing::Message() << "kind " << i % 4 << ", " << c.rows << " rows, " << c.in << " to " << c.out
                                      << ", window " << c.window << (c.gate.gpu ? ", gate" : "")
                                      << (c.norm.gpu ? ", norm" : ""));
    std::vector<double> expected, decay, state = c.conv_state.exact;
    for (int64_t row = 0; row < c.rows; ++row)
      for (int64_t column = 0; column < c.out; ++column) {
        expected.push_back(c.expected(row, column));
        if (c.a_log.gpu) decay.push_back(-std::exp(c.a_log.exact[column]) * expected.back());
        for (int64_t s = 0; s + 1 < c.window; ++s)
          state[(c.slots[row] * (c.window - 1) + s) * c.out + column] =
              s + 2 < c.window ? c.conv_state.exact[(c.slots[row] * (c.window - 1) + s + 1) * c.out + column]
                               : c.product(c.weight, row, column);
      }
    const bool fits = has_token_linear(c.input(), {&c.part, 1});
#ifdef FURIOUS_CUDA
    EXPECT_TRUE(fits || cuda::most_shared_memory() < 200 * 1024);
#endif
    ASSERT_EQ(token_linear(c.input(), {&c.part, 1}), fits);
    if (!fits) continue;
    ++computed;
    expect_close(c.part.out, expected, "result");
    if (c.a_log.gpu) expect_close(c.part.decay, decay, "decay");
    if (c.window > 0) expect_close(c.part.conv_state, state, "state of the convolution");
  }
  EXPECT_GE(computed, 60);
}

// Several parts in one call equal separate calls.
TEST(TokenLinearCuda, PartsOfOneCall) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  int computed = 0;
  for (int i = 0; i < 20; ++i) {
    const Case c(random, Kind::value);
    if (!has_token_linear(c.input(), {&c.part, 1})) continue;  // as above
    ++computed;
    std::vector<TokenPart> parts{c.part};
    std::vector<Tensor> alone;
    for (const Kind kind : {Kind::value, Kind::softplus, Kind::softplus}) {
      TokenPart part{.kind = kind};
      const int64_t out = random.integer(1, 40);
      part.weight = to_gpu(random.normal_tensor({out, c.in}, 1 / std::sqrt(static_cast<double>(c.in))), DType::bf16);
      part.out = Tensor::empty({c.rows, out}, kind == Kind::value ? DType::bf16 : DType::f32, kGpu);
      parts.push_back(part);
      ASSERT_TRUE(token_linear(c.input(), {&part, 1}));
      alone.push_back(to_dtype(part.out, DType::f32));
    }
    ASSERT_TRUE(token_linear(c.input(), parts));
    for (size_t p = 0; p < alone.size(); ++p)
      EXPECT_TRUE(same_bits(to_cpu(to_dtype(parts[p + 1].out, DType::f32)), to_cpu(alone[p]))) << i << ", part " << p;
  }
  EXPECT_GE(computed, 15);
}

TEST(TokenLinearCuda, ReturnsFalseForUnsupportedCalls) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  const auto runs = [&](int64_t rows, int64_t in, DType dtype) {
    const TokenPart part{.weight = to_gpu(random.normal_tensor({5, in}), dtype),
                         .out = Tensor::empty({rows, 5}, DType::f32, kGpu)};
    const TokenInput input{to_gpu(random.normal_tensor({rows, in}), dtype), {}, {}, 0};
    TokenPart without_output = part;  // asked before outputs are allocated
    without_output.out = {};
    const bool ran = token_linear(input, {&part, 1});
    EXPECT_EQ(has_token_linear(input, {&without_output, 1}), ran);
    return ran;
  };
  EXPECT_TRUE(runs(8, 24, DType::bf16));
  EXPECT_FALSE(runs(9, 24, DType::bf16));
  EXPECT_FALSE(runs(3, 7, DType::bf16));
  EXPECT_FALSE(runs(3, 24, DType::f32));
}

TEST(TokenLinear, HasNoKernelOnTheCpu) {
  const Tensor x = Tensor::zeros({1, 8}, DType::f32);
  const TokenPart part{.weight = x, .out = Tensor::zeros({1, 1}, DType::f32)};
  EXPECT_FALSE(has_token_linear({x, {}, {}, 0}, {&part, 1}));
  EXPECT_FALSE(token_linear({x, {}, {}, 0}, {&part, 1}));
}

}  // namespace
}  // namespace furious
