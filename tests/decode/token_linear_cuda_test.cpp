#include "cuda.h"
#include "decode/token_linear.h"
#include "ops/random.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

// The same numbers on both sides: f32 on the CPU, as bf16 has rounded them.
struct Pair {
  Tensor cpu, gpu;

  static Pair rounded(const Tensor& x) {
    const Tensor narrow = to_dtype(x, DType::bf16);
    return {to_dtype(narrow, DType::f32), to_gpu(narrow)};
  }
  static Pair exact(const Tensor& x) { return {to_dtype(x, DType::f32), to_gpu(x)}; }
};

constexpr auto kPrecision = MatmulPrecision::f32;  // of the CPU; bf16 factors are multiplied as they are

// Numbers are of the order of one; of a single one that happens to be small nothing more is asked.
void expect_close(const Tensor& gpu, const Tensor& cpu, std::string_view what) {
  ASSERT_EQ(gpu.defined(), cpu.defined()) << what;
  if (!cpu) return;
  const double floor = std::sqrt(static_cast<double>(cpu.elements()));
  EXPECT_LE(relative_error(to_cpu(to_dtype(gpu, DType::f32)), cpu, floor), 1e-2) << what;
}

struct Case {
  int64_t batch, in, out;
  Pair x, gate, norm;
  TokenInput cpu, gpu;

  explicit Case(Random& random)
      : batch(random.pick<int64_t>({1, 2, 7, 8, 9})),
        in(8 * random.pick<int64_t>({3, 16, 33, 128, 257, 600})),
        out(random.pick<int64_t>({1, 24, 77, 500})),
        x(Pair::rounded(random.normal_tensor({batch, in}, 2))) {
    if (random.coin()) gate = Pair::rounded(random.normal_tensor({batch, in}));
    if (random.coin()) norm = Pair::exact(random.normal_tensor({in}));
    cpu = {x.cpu, gate.cpu, norm.cpu, 1e-5f};
    gpu = {x.gpu, gate.gpu, norm.gpu, 1e-5f};
  }
  Pair weight(Random& random, int64_t rows) const {
    const Tensor drawn = Tensor::empty({rows, in}, DType::f32);  // many numbers: by the faster generator
    fill_normal(drawn, 0, 1 / std::sqrt(static_cast<float>(in)), static_cast<uint64_t>(random.integer(0, 1 << 30)), 0);
    return Pair::rounded(drawn);
  }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "batch " << c.batch << ", " << c.in << " to " << c.out << (c.gate.cpu ? ", gate" : "")
             << (c.norm.cpu ? ", norm" : "");
}

TEST(TokenLinearCuda, AgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (int i = 0; i < 40; ++i) {
    const Case c(random);
    SCOPED_TRACE(::testing::Message() << c);
    const Pair weight = c.weight(random, c.out), up = c.weight(random, c.out);
    expect_close(token_logits(c.gpu, weight.gpu), token_logits(c.cpu, weight.cpu), "logits");
    expect_close(token_swiglu(c.gpu, weight.gpu, up.gpu, kPrecision),
                 token_swiglu(c.cpu, weight.cpu, up.cpu, kPrecision), "swiglu");
    const Pair to = Pair::rounded(random.normal_tensor({c.batch, c.out}));
    token_add(to.gpu, c.gpu, weight.gpu, kPrecision);
    token_add(to.cpu, c.cpu, weight.cpu, kPrecision);
    expect_close(to.gpu, to.cpu, "add");
  }
}

TEST(TokenLinearCuda, WhatTheMixerTakesIn) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (int i = 0; i < 40; ++i) {
    const Case c(random);
    const int64_t window = random.pick<int64_t>({0, 2, 3, 4}), heads = random.integer(1, 17);
    SCOPED_TRACE(::testing::Message() << c << ", window " << window << ", heads " << heads);
    TokenMixing cpu, gpu;
    const auto set = [&](Tensor TokenMixing::*member, const Pair& pair) {
      cpu.*member = pair.cpu;
      gpu.*member = pair.gpu;
    };
    set(&TokenMixing::qkv, c.weight(random, c.out));
    Pair state;
    if (window > 0) {
      set(&TokenMixing::conv_weight, Pair::exact(random.normal_tensor({c.out, window})));
      if (random.coin()) set(&TokenMixing::conv_bias, Pair::exact(random.normal_tensor({c.out})));
      state = Pair::exact(random.normal_tensor({c.batch + 2, window - 1, c.out}));
      cpu.after_conv = random.pick<Activation>({Activation::none, Activation::silu});
    }
    if (random.coin()) {
      set(&TokenMixing::dt, c.weight(random, heads));
      if (random.coin()) set(&TokenMixing::dt_bias, Pair::exact(random.normal_tensor({heads})));
      if (random.coin()) set(&TokenMixing::a_log, Pair::exact(random.normal_tensor({heads})));
    }
    if (!cpu.a_log && random.coin()) {
      set(&TokenMixing::a_mask, c.weight(random, heads));
      if (random.coin()) set(&TokenMixing::a_mask_bias, Pair::exact(random.normal_tensor({heads})));
    }
    if (random.coin()) {
      set(&TokenMixing::z_gate, c.weight(random, 40));
      if (random.coin()) set(&TokenMixing::z_gate_bias, Pair::exact(random.normal_tensor({40})));
    }
    // Every second case with functions that only the plain operations know.
    cpu.decay.factor = random.pick<float>({-1, -2});
    if (i % 2 == 1) {
      cpu.time_step = {.f = random.pick<Activation>({Activation::softplus, Activation::sigmoid}), .limit = 0.5f};
      cpu.decay.f = random.pick<Activation>({Activation::softplus, Activation::silu, Activation::log_sigmoid});
      cpu.decay_times_dt = cpu.dt && cpu.a_mask && random.coin();
      cpu.original_factor = 2;
    }
    gpu.time_step = cpu.time_step;
    gpu.decay = cpu.decay;
    gpu.decay_times_dt = cpu.decay_times_dt;
    gpu.original_factor = cpu.original_factor;
    EXPECT_EQ(knows_functions(gpu), i % 2 == 0 || (!gpu.dt && (!gpu.a_mask || gpu.decay.f == Activation::softplus)));
    cpu.qk_activation = random.pick<Activation>({Activation::none, Activation::relu, Activation::silu});
    cpu.qk_width = c.out / 2;
    gpu.after_conv = cpu.after_conv;
    gpu.qk_activation = cpu.qk_activation;
    gpu.qk_width = cpu.qk_width;
    for (int token = 0; token < 2; ++token) {
      std::vector<int32_t> slots;  // from the last but one down: two stay as they are
      for (int64_t row = 0; row < c.batch; ++row) slots.push_back(static_cast<int32_t>(c.batch - row));
      const TokenMixed expected = token_mixing(c.cpu, cpu, state.cpu, slot_rows(slots), kPrecision);
      const TokenMixed actual = token_mixing(c.gpu, gpu, state.gpu, slot_rows(slots, kGpu), kPrecision);
      expect_close(actual.qkv, expected.qkv, "qkv");
      expect_close(actual.dt, expected.dt, "dt");
      expect_close(actual.log_decay, expected.log_decay, "log-decay");
      expect_close(actual.z, expected.z, "z");
      expect_close(state.gpu, state.cpu, "the convolution's state");
    }
  }
}

#ifdef FURIOUS_CUDA  // the choice of kernels, which a build without CUDA does not have
// The same rows in as many sequences as one kernel computes, and in one more, which are the plain operations.
TEST(TokenLinearCuda, OneKernelComputesWhatThePlainOperationsCompute) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  constexpr int64_t kIn = 264, kOut = 77;
  const auto fits = [](int64_t batch) {
    return cuda::token_linear_fits(kGpu, batch, kIn, TokenPart::Kind::value) &&
           cuda::token_linear_fits(kGpu, batch, kIn, TokenPart::Kind::swiglu) &&
           cuda::token_linear_fits(kGpu, batch, kIn, TokenPart::Kind::add);
  };
  int64_t most = 0;
  while (most < 1024 && fits(most + 1)) ++most;
  ASSERT_GE(most, 1);
  ASSERT_LT(most, 1024);
  const auto drawn = [&](const Shape& shape) {
    return to_gpu(random.normal_tensor(shape, 1 / std::sqrt(static_cast<double>(shape[1]))), DType::bf16);
  };
  const Tensor x = drawn({most + 1, kIn}), gate = drawn({most + 1, kIn}), to = drawn({most + 1, kOut});
  const Tensor norm = to_gpu(random.normal_tensor({kIn})), weight = drawn({kOut, kIn}), up = drawn({kOut, kIn});
  const TokenInput many{x, gate, norm, 1e-5f};
  const TokenInput few{to_dtype(x.slice(0, 0, most), DType::bf16), to_dtype(gate.slice(0, 0, most), DType::bf16), norm,
                       1e-5f};
  const Tensor some = to_dtype(to.slice(0, 0, most), DType::bf16);
  const auto expect_same = [&](const Tensor& one_kernel, const Tensor& plain, const char* what) {
    expect_close(one_kernel, to_cpu(to_dtype(plain.slice(0, 0, most), DType::f32)), what);
  };
  expect_same(token_logits(few, weight), token_logits(many, weight), "logits");
  expect_same(token_swiglu(few, weight, up, kPrecision), token_swiglu(many, weight, up, kPrecision), "swiglu");
  token_add(some, few, weight, kPrecision);
  token_add(to, many, weight, kPrecision);
  expect_same(some, to, "add");
}
#endif

// Too narrow for whole accesses, or f32: the plain operations.
TEST(TokenLinearCuda, AnyWidthAndDType) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const int64_t in : {7, 24}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Tensor x = random.normal_tensor({3, in}), weight = random.normal_tensor({5, in});
      const Tensor expected = token_logits({x, {}, {}, 0}, weight);
      const Tensor actual = token_logits({to_gpu(x, dtype), {}, {}, 0}, to_gpu(weight, dtype));
      EXPECT_LE(relative_error(to_cpu(actual), expected), dtype == DType::f32 ? 1e-5 : 1e-2);
    }
  }
}

}  // namespace
}  // namespace furious
