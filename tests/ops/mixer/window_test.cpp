// Attention to a sliding window: the oracle against softmax over the tokens of each window alone, every form and kernel
// against the oracle, and caches that keep the window only.
#include "cuda.h"
#include "ops/mixer/gpu_case.h"
#include "ops/mixer/mixer_case.h"
#include "ops/mixer/recurrent.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kTolerance = 1e-4;

MixerSpec windowed(int64_t window) {
  MixerSpec spec = mixer_spec("softmax");
  spec.window = window;
  return spec;
}

CaseLimits of_length(int64_t shortest, int64_t longest, bool boundaries = false) {
  CaseLimits limits;
  limits.shortest = shortest;
  limits.longest = longest;
  limits.boundaries = boundaries;
  return limits;
}

MixerInputs tokens_of(const MixerInputs& in, int64_t begin, int64_t count) {
  MixerInputs part;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v})
    part.*x = (in.*x).slice(1, begin, count);
  return part;
}

// Each row by itself: the last one of plain softmax over the tokens of its window.
MixerRun rows_alone(const MixerCase& c) {
  const MixerCase exact = cast(c, DType::f64);
  const MixerSpec plain = mixer_spec("softmax");
  const int64_t batch = c.inputs.q.size(0), length = c.inputs.q.size(1);
  MixerRun all;
  all.result.out = Tensor::zeros({batch, length, c.heads, c.inputs.v.size(3)}, DType::f64);
  all.gradients = {Tensor::zeros(c.inputs.q.shape(), DType::f64),
                   Tensor::zeros(c.inputs.k.shape(), DType::f64),
                   Tensor::zeros(c.inputs.v.shape(), DType::f64),
                   {},
                   {}};
  for (int64_t t = 0; t < length; ++t) {
    const int64_t begin = std::max<int64_t>(0, t + 1 - c.spec.window), count = t + 1 - begin;
    const MixerInputs in = tokens_of(exact.inputs, begin, count);
    const MixerResult result = mixer_forward(plain, in, {Form::reference});
    copy(all.result.out.select(1, t), result.out.select(1, count - 1));
    const Tensor g = Tensor::zeros({batch, count, c.heads, c.inputs.v.size(3)}, DType::f64);
    copy(g.select(1, count - 1), exact.out_gradient.select(1, t));
    const MixerGradients own = mixer_backward(plain, in, result, g, {}, {Form::reference});
    for (Tensor MixerGradients::*x : {&MixerGradients::q, &MixerGradients::k, &MixerGradients::v})
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 0; i < count; ++i) {
          const Tensor to = (all.gradients.*x).select(0, b).select(0, begin + i),
                       from = (own.*x).select(0, b).select(0, i);
          for (int64_t n = 0; n < to.elements(); ++n) to.data<double>()[n] += from.data<double>()[n];
        }
  }
  return all;
}

TEST(MixerWindow, TheOracleIsSoftmaxOverEachWindow) {
  Random random(1);
  for (const int64_t window : {1, 2, 5, 40}) {
    const MixerCase c = random_case(random, windowed(window), of_length(8, 30));
    SCOPED_TRACE(describe(c));
    expect_close(run_oracle(c), rows_alone(c), 1e-10);
  }
}

// Tiles of 64 keys, blocks of 192 and strips of 6 rows: windows that begin and end inside of them, and documents.
TEST(MixerWindow, FormsAgreeWithOracle) {
  Random random(2);
  for (const int64_t window : {1, 3, 6, 50, 64, 100, 191, 193, 1000}) {
    for (const bool boundaries : {false, true}) {
      const MixerCase c = random_case(random, windowed(window), of_length(1, window < 100 ? 150 : 420, boundaries));
      SCOPED_TRACE(describe(c));
      const MixerRun actual = run(c, {});
      EXPECT_EQ(actual.result.form, Form::parallel);
      expect_close(actual, run_oracle(c), kTolerance);
    }
  }
}

TEST(MixerWindow, QueriesOfTheLastTokensOnly) {
  Random random(3);
  for (const int64_t window : {1, 9, 70, 300}) {
    const MixerCase c = random_case(random, windowed(window), of_length(195, 260));
    const int64_t length = c.inputs.q.size(1);
    const Tensor all = mixer_forward(c.spec, cast(c, DType::f64).inputs, {Form::reference}).out;
    for (const int64_t first : {int64_t{1}, length / 2, length - 1}) {
      MixerInputs rest = c.inputs;
      rest.first_query = first;
      rest.q = c.inputs.q.slice(1, first, length - first);
      EXPECT_LE(worst_row(mixer_forward(c.spec, rest).out, all.slice(1, first, length - first), 0.1), kTolerance)
          << describe(c) << ", from " << first;
    }
  }
}

TEST(MixerWindow, IsRefusedWhereItIsNotComputed) {
  for (MixerSpec spec : {mixer_spec("2mamba"), mixer_spec("fox"), mixer_spec("linear"),
                         MixerSpec{Score::exponential, false, Norm::none}}) {
    spec.window = 4;
    expect_error([&] { MixerCache(spec, {1, 1, 1, 1, 8, 8}); }, {"\"window\" is 4", "exponential"});
  }
  expect_error([] { MixerCache(windowed(-1), {1, 1, 1, 1, 8, 8}); }, {"\"window\" is -1"});
}

MixerCache::Sizes sizes_of(const MixerInputs& in) {
  return {in.q.size(0), in.q.size(2), in.k.size(2), in.v.size(2), in.q.size(3), in.v.size(3)};
}

Tensor step(MixerCache& cache, const MixerInputs& in, int64_t t) {
  return cache.step(all_slots(cache.slots(), in.q.device()), in.q.select(1, t), in.k.select(1, t), in.v.select(1, t));
}

MixerInputs of_sequence(const MixerInputs& in, int64_t sequence, int64_t begin, int64_t count) {
  MixerInputs part = tokens_of(in, begin, count);
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v})
    part.*x = (part.*x).slice(0, sequence, 1);
  return part;
}

// Bytes of the pages that a window of so many tokens can need.
int64_t most_bytes(const MixerCache::Sizes& sizes, int64_t window, int64_t number) {
  const int64_t pages = (window + CachePage::kTokens - 1 + CachePage::kTokens - 1) / CachePage::kTokens;
  return pages * CachePage::kTokens * (sizes.k_heads * sizes.qk_dim + sizes.v_heads * sizes.v_dim) * number;
}

TEST(MixerWindow, CachesKeepTheWindowOnly) {
  Random random(4);
  for (const int64_t window : {1, 2, 31, 32, 33, 70, 500}) {
    const MixerCase c = random_case(random, windowed(window), of_length(260, 300));
    SCOPED_TRACE(describe(c));
    const int64_t length = c.inputs.q.size(1);
    const MixerCache::Sizes sizes = sizes_of(c.inputs);
    const Tensor expected = mixer_forward(c.spec, cast(c, DType::f64).inputs, {Form::reference}).out;
    MixerCache cache(c.spec, sizes), chunks(c.spec, sizes);
    for (int64_t t = 0; t < length; ++t) {
      if (t % 37 == 0) {
        MixerCache again(c.spec, sizes);
        for (int64_t slot = 0; slot < sizes.slots; ++slot) again.restore(slot, cache.contents(slot));
        if (sizes.slots > 1) again.copy(0, 1), again.copy(1, 0), again.restore(1, cache.contents(1));
        ASSERT_TRUE(same_bits(step(again, c.inputs, t), step(cache, c.inputs, t))) << "token " << t;
      } else {
        const Tensor y = step(cache, c.inputs, t);
        ASSERT_LE(worst_row(y, expected.select(1, t), 0.1), kTolerance) << "token " << t;
      }
      for (int64_t slot = 0; slot < sizes.slots; ++slot) {
        ASSERT_EQ(cache.tokens(slot), t + 1);
        ASSERT_LE(cache.bytes(slot), most_bytes(sizes, window, 4));
      }
    }
    for (int64_t slot = 0; slot < sizes.slots; ++slot)
      for (int64_t t = 0, count; t < length; t += count) {
        count = std::min(random.integer(1, 90), length - t);
        ASSERT_LE(worst_row(chunks.prefill(slot, of_sequence(c.inputs, slot, t, count)),
                            expected.slice(0, slot, 1).slice(1, t, count), 0.1),
                  kTolerance)
            << "from token " << t;
        ASSERT_LE(chunks.bytes(slot), most_bytes(sizes, window, 4));
      }
  }
}

TEST(MixerWindow, RefusesContentsThatLackTokensOfTheWindow) {
  MixerCache cache(windowed(40), {1, 1, 1, 1, 8, 8});
  const Tensor x = Tensor::zeros({1, 1, 8}, DType::f32);
  for (int t = 0; t < 100; ++t) cache.step(slot_rows({0}), x, x, x);
  MixerContents contents = cache.contents(0);
  EXPECT_EQ(contents.tokens, 100);
  EXPECT_LT(contents.pending, 40 + 32);
  EXPECT_GE(contents.pending, 39);
  contents.pending = 38;
  expect_error([&] { cache.restore(0, contents); }, {"38 tokens of 100"});
}

// Kernels of Hopper, other tensor cores, tiles of f32, and the simple ones.
TEST(MixerWindowCuda, EveryKernelAgreesWithOracle) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (const auto& [dim, dtype] : {std::pair<int64_t, DType>{64, DType::bf16},
                                   {128, DType::bf16},
                                   {48, DType::bf16},
                                   {64, DType::f32},
                                   {21, DType::f32},
                                   {20, DType::bf16},
                                   {160, DType::bf16}}) {
    for (const int64_t window : {1, 5, 64, 100, 129, 1000}) {
      for (const bool boundaries : {false, true}) {
        const Sizes sizes{dim, dim, random.integer(130, 330), 1, 2, 1, 1, boundaries};
        const MixerCase c = make_case(random, windowed(window), sizes, dtype);
        const MixerRun actual = run_on_gpu(c, {});
        SCOPED_TRACE(fmt::format("{}, {}, {}", describe(c), name_of(dtype), actual.result.kernel));
        expect_within(errors_of(c, actual, run_oracle_without_state(c)), dtype == DType::bf16 ? 2e-2 : 1e-4);
      }
    }
  }
}

TEST(MixerWindowCuda, CachesEqualTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t window : {1, 31, 32, 33, 64, 100, 500}) {
      MixerCase c = make_case(random, windowed(window), {64, 64, 420, 2, 4, 2, 2}, dtype);
      SCOPED_TRACE(fmt::format("{}, {}", describe(c), name_of(dtype)));
      const MixerInputs there = on_gpu(c).inputs, here = cast(c, DType::f32).inputs;
      const MixerCache::Sizes sizes = sizes_of(here);
      MixerCache cpu(c.spec, sizes), gpu(c.spec, sizes, kGpu);
      const int64_t first = random.integer(1, 150), second = random.integer(2, 60);
      for (const auto& [begin, count] : {std::pair{int64_t{0}, first}, {first, second}})
        for (int64_t slot = 0; slot < 2; ++slot)
          ASSERT_LE(worst_row(to_cpu(gpu.prefill(slot, of_sequence(there, slot, begin, count))),
                              cpu.prefill(slot, of_sequence(here, slot, begin, count)), 0.1),
                    2 * tolerance(dtype));
      for (int64_t t = first + second; t < 420; ++t) {
        ASSERT_LE(worst_row(to_cpu(step(gpu, there, t)), step(cpu, here, t), 0.1), 2 * tolerance(dtype))
            << "token " << t;
        ASSERT_LE(gpu.bytes(0), most_bytes(sizes, window, dtype == DType::bf16 ? 2 : 4));
      }
      MixerCache again(c.spec, sizes, kGpu);
      for (int64_t slot = 0; slot < 2; ++slot) again.restore(slot, gpu.contents(slot));
      EXPECT_TRUE(same_bits(to_cpu(step(again, there, 3)), to_cpu(step(gpu, there, 3))));
    }
  }
}

}  // namespace
}  // namespace furious
