#include "cuda.h"
#include "ops/mixer/mixer_case.h"
#include "ops/mixer/recurrent.h"
#include "ops/random.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

// The same tokens on both sides; the CPU has them in f32 as the GPU's dtype has rounded them.
struct Tokens {
  MixerSpec spec;
  MixerCache::Sizes sizes;
  MixerInputs cpu, gpu;

  Tokens(Random& random, const MixerSpec& with, const MixerCache::Sizes& of, int64_t length, DType dtype)
      : spec(with), sizes(of) {
    // Under the sum norm, scores that cancel (linear) or vanish (squared) are ill-conditioned in any precision.
    const bool non_negative = spec.score != Score::exponential && spec.norm == Norm::sum;
    const auto fill_part = [&](Tensor MixerInputs::*part, int64_t heads, int64_t dim, bool positive) {
      // A view into something wider, whose rows need not begin at multiples of 16 bytes.
      const int64_t before = random.pick<int64_t>({0, 3, 8}), after = random.pick<int64_t>({0, 1, 8});
      const Tensor wide = random.normal_tensor({of.batch, length, before + heads * dim + after});
      for (int64_t i = 0; positive && i < wide.elements(); ++i)
        wide.data<float>()[i] = std::fabs(wide.data<float>()[i]);
      const auto view = [&](const Tensor& x) { return x.slice(2, before, heads * dim).split_dim(2, heads, dim); };
      const Tensor rounded = to_dtype(wide, dtype);
      cpu.*part = view(to_dtype(rounded, DType::f32));
      gpu.*part = view(to_gpu(rounded));
    };
    fill_part(&MixerInputs::q, of.q_heads, of.qk_dim, non_negative);
    fill_part(&MixerInputs::k, of.k_heads, of.qk_dim, non_negative);
    fill_part(&MixerInputs::v, of.v_heads, of.v_dim, false);
    if (spec.decay) set_decay(random.uniform_tensor({of.batch, length, heads()}, -0.2, spec.signed_decay ? 0.2 : 0));
  }

  int64_t heads() const { return std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads}); }
  void set_decay(const Tensor& decay) {
    cpu.log_decay = decay;
    gpu.log_decay = to_gpu(decay);
  }
  MixerCache cpu_cache() const { return MixerCache(spec, sizes); }
  MixerCache gpu_cache() const { return MixerCache(spec, sizes, kGpu); }
};

Tensor step(MixerCache& cache, const MixerInputs& in, int64_t t) {
  return cache.step(in.q.select(1, t), in.k.select(1, t), in.v.select(1, t),
                    in.log_decay ? to_dtype(in.log_decay.select(1, t), DType::f32) : Tensor());
}

MixerInputs part_of(const MixerInputs& in, int64_t begin, int64_t count) {
  MixerInputs part = in;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
    if (part.*x) part.*x = (part.*x).slice(1, begin, count);
  return part;
}

// Tokens [begin, end) one by one on both sides.
void expect_same_steps(MixerCache& cpu, MixerCache& gpu, const Tokens& tokens, int64_t begin, int64_t end) {
  std::vector<Tensor> outs;
  for (int64_t t = begin; t < end; ++t) outs.push_back(step(gpu, tokens.gpu, t));
  for (int64_t t = begin; t < end; ++t)
    ASSERT_LE(relative_error(to_cpu(outs[t - begin]), step(cpu, tokens.cpu, t), 0.1), tolerance(tokens.gpu.q.dtype()))
        << "token " << t;
  EXPECT_EQ(cpu.tokens(), gpu.tokens());
}

std::string describe(const MixerSpec& spec, const MixerCache::Sizes& sizes, DType dtype) {
  return fmt::format("{}; batch {}, heads {} {} {}, dims {} {}, {}", to_string(spec), sizes.batch, sizes.q_heads,
                     sizes.k_heads, sizes.v_heads, sizes.qk_dim, sizes.v_dim, name_of(dtype));
}

const std::vector<MixerCache::Sizes> kSizes{
    {1, 2, 2, 2, 16, 16}, {3, 4, 2, 1, 16, 24}, {2, 1, 1, 3, 13, 9}, {2, 2, 2, 2, 8, 40}};

TEST(RecurrentCuda, TokenByTokenEqualsTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const MixerSpec& spec : every_spec()) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      MixerCache::Sizes sizes = random.pick(kSizes);
      if (MixerCache(spec, sizes).first_fold() > 1500) sizes = kSizes.back();  // a large state folds late
      SCOPED_TRACE(describe(spec, sizes, dtype));
      const int64_t length = MixerCache(spec, sizes).first_fold() + 64 + 9;
      const Tokens tokens(random, spec, sizes, length, dtype);
      MixerCache cpu = tokens.cpu_cache(), gpu = tokens.gpu_cache();
      expect_same_steps(cpu, gpu, tokens, 0, length);
      if (!has_state(spec, sizes.qk_dim)) continue;
      EXPECT_LE(relative_error(to_cpu(gpu.state()), cpu.state(), 0.1), 1e-4);
    }
  }
}

// As if many tokens had been read: large heads take long to their first fold.
MixerContents some_contents(Random& random, const Tokens& tokens, DType dtype) {
  const MixerSpec& spec = tokens.spec;
  const MixerCache::Sizes& sizes = tokens.sizes;
  const MixerCache empty(spec, sizes);
  const bool folded = has_state(spec, sizes.qk_dim),
             positive = spec.score != Score::exponential && spec.norm == Norm::sum;
  MixerContents contents;
  contents.pending = folded ? empty.window() - 5 : 700;
  contents.tokens = contents.pending + (folded ? 5000 : 0);
  const int64_t pages = ((folded ? empty.window() : contents.pending) + CachePage::kTokens - 1) / CachePage::kTokens;
  const auto some = [&](const Shape& shape, DType as) {
    const Tensor drawn = Tensor::empty(shape, DType::f32);
    fill_normal(drawn, 0, 1, static_cast<uint64_t>(random.integer(0, 1 << 30)), 0);
    const Tensor x = to_dtype(to_dtype(drawn, as), DType::f32);
    for (int64_t i = 0; positive && i < x.elements(); ++i) x.data<float>()[i] = std::fabs(x.data<float>()[i]);
    return x;
  };
  contents.k = some({sizes.batch, pages, sizes.k_heads, CachePage::kTokens, sizes.qk_dim}, dtype);
  contents.v = some({sizes.batch, pages, sizes.v_heads, CachePage::kTokens, sizes.v_dim}, dtype);
  if (spec.decay)
    contents.log_decay = random.uniform_tensor({sizes.batch, pages, tokens.heads(), CachePage::kTokens}, -0.2, 0);
  if (folded)
    contents.state = some(
        {sizes.batch, tokens.heads(), state_rows(spec, sizes.qk_dim), state_columns(spec, sizes.v_dim)}, DType::f32);
  return contents;
}

TEST(RecurrentCuda, LargeHeadsAgreeWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const std::vector<MixerCache::Sizes> large{
      {2, 2, 2, 2, 64, 64}, {1, 4, 1, 4, 64, 64}, {1, 2, 2, 2, 128, 128}, {1, 1, 1, 1, 64, 256}};
  size_t next = 0;
  for (const MixerSpec& spec : every_spec()) {
    for (DType dtype : {DType::f32, DType::bf16, DType::bf16}) {
      const MixerCache::Sizes& sizes = large[next++ % large.size()];
      SCOPED_TRACE(describe(spec, sizes, dtype));
      constexpr int64_t kTokens = 9;  // a fold among them
      const Tokens tokens(random, spec, sizes, kTokens, dtype);
      const MixerContents contents = some_contents(random, tokens, dtype);
      MixerCache cpu(spec, sizes, contents), gpu(spec, sizes, contents, kGpu);
      expect_same_steps(cpu, gpu, tokens, 0, kTokens);
    }
  }
}

TEST(RecurrentCuda, ContinuesAfterPrefill) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const MixerSpec& spec : every_spec()) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      const int64_t dim = random.pick<int64_t>({16, 64});
      const MixerCache::Sizes sizes{2, 2, 1, 2, dim, dim};
      SCOPED_TRACE(describe(spec, sizes, dtype));
      const int64_t first = random.integer(1, 300), second = random.integer(1, 40), length = first + second + 40;
      const Tokens tokens(random, spec, sizes, length, dtype);
      MixerCache cpu = tokens.cpu_cache(), gpu = tokens.gpu_cache();
      for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, first}, {first, second}}) {
        const Tensor expected = cpu.prefill(part_of(tokens.cpu, begin, count));
        const Tensor actual = gpu.prefill(part_of(tokens.gpu, begin, count));
        ASSERT_LE(relative_error(to_cpu(actual), expected, 0.1), tolerance(dtype));
      }
      expect_same_steps(cpu, gpu, tokens, first + second, length);
    }
  }
}

// The mask of a cache grows past the largest exponent, and falls again.
TEST(RecurrentCuda, SignedDecayPastSaturation) {
  SKIP_WITHOUT_GPU();
  Random random(7);
  for (const MixerSpec& spec : further_specs()) {
    if (!spec.signed_decay) continue;
    const MixerCache::Sizes& sizes = random.pick(kSizes);
    SCOPED_TRACE(describe(spec, sizes, DType::f32));
    Tokens tokens(random, spec, sizes, 120, DType::f32);
    const Tensor decay = random.uniform_tensor({sizes.batch, 120, tokens.heads()}, 0, 4);
    const Tensor later = decay.slice(1, 40, 80);
    copy(later, random.uniform_tensor(later.shape(), -4, 0));
    tokens.set_decay(decay);
    MixerCache cpu = tokens.cpu_cache(), gpu = tokens.gpu_cache();
    for (int64_t t = 0; t < 120; ++t)
      ASSERT_LE(worst_row(to_cpu(step(gpu, tokens.gpu, t)), step(cpu, tokens.cpu, t), 0.1), 1e-4) << "token " << t;
    EXPECT_FALSE(gpu.has_folded());
  }
}

TEST(RecurrentCuda, ContentsPassBetweenDevicesToTheBit) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const MixerSpec& spec : every_spec()) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      const MixerCache::Sizes sizes{2, 4, 2, 4, 16, 16};
      SCOPED_TRACE(describe(spec, sizes, dtype));
      const int64_t length = MixerCache(spec, sizes).first_fold() + 100;
      const Tokens tokens(random, spec, sizes, length, dtype);
      MixerCache gpu = tokens.gpu_cache();
      for (int64_t t = 0; t < length; ++t) {
        if (t % 23 == 0) {
          const MixerContents contents = gpu.contents();
          const MixerContents back = MixerCache(spec, sizes, contents).contents();
          for (Tensor MixerContents::*x :
               {&MixerContents::k, &MixerContents::v, &MixerContents::log_decay, &MixerContents::state}) {
            ASSERT_EQ((contents.*x).defined(), (back.*x).defined());
            if (!(contents.*x)) continue;
            ASSERT_TRUE(same_bits(contents.*x, back.*x)) << "token " << t;
          }
          MixerCache again(spec, sizes, contents, kGpu), beside(spec, sizes, gpu.contents(kGpu), kGpu);
          const Tensor expected = to_cpu(step(gpu, tokens.gpu, t));
          ASSERT_TRUE(same_bits(to_cpu(step(again, tokens.gpu, t)), expected)) << "token " << t;
          ASSERT_TRUE(same_bits(to_cpu(step(beside, tokens.gpu, t)), expected)) << "token " << t;
        } else {
          step(gpu, tokens.gpu, t);
        }
      }
    }
  }
}

TEST(RecurrentCuda, StrongDecayAndZeroesStayFinite) {
  SKIP_WITHOUT_GPU();
  for (const MixerSpec& spec : all_specs()) {
    for (float size : {0.0f, 1e4f, 1e-20f}) {
      const MixerCache::Sizes sizes{1, 2, 2, 2, 8, 8};
      MixerCache cpu(spec, sizes), gpu(spec, sizes, kGpu);
      const Tensor x = Tensor::empty({1, 2, 8}, DType::f32), a = Tensor::empty({1, 2}, DType::f32);
      fill(x, size);
      fill(a, -50);
      const Tensor there = to_gpu(x), decay = to_gpu(a);
      for (int t = 0; t < 200; ++t) {
        const Tensor actual = to_cpu(gpu.step(there, there, there, spec.decay ? decay : Tensor()));
        const Tensor expected = cpu.step(x, x, x, spec.decay ? a : Tensor());
        ASSERT_TRUE(all_finite(actual)) << to_string(spec) << ", token " << t;
        ASSERT_LE(relative_error(actual, expected), 1e-4) << to_string(spec) << ", token " << t;
      }
    }
  }
}

TEST(RecurrentCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (const char* name : {"2mamba", "softmax"}) {
    const MixerSpec spec = mixer_spec(name);
    const MixerCache::Sizes sizes{2, 4, 4, 4, 32, 32};
    const Tokens tokens(random, spec, sizes, MixerCache(spec, sizes).first_fold() + 300, DType::bf16);
    MixerCache first = tokens.gpu_cache(), second = tokens.gpu_cache();
    for (int64_t t = 0; t < tokens.gpu.q.size(1); ++t)
      ASSERT_TRUE(same_bits(to_cpu(step(first, tokens.gpu, t)), to_cpu(step(second, tokens.gpu, t)))) << "token " << t;
  }
}

TEST(RecurrentCuda, BadInput) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  const Tensor x = random.normal_tensor({1, 2, 8}), there = to_gpu(x);
  MixerCache cache(mixer_spec("softmax"), {1, 2, 2, 2, 8, 8}, kGpu);
  expect_error([&] { cache.step(x, x, x); }, {"mixer_cache.step", "\"q\"", "cpu", "cuda"});
  expect_error([&] { cache.step(there, to_gpu(x, DType::bf16), there); }, {"\"k\"", "bf16", "f32"});
  EXPECT_EQ(cache.tokens(), 0);
}

}  // namespace
}  // namespace furious
