#include <map>
#include <memory>

#include "cuda.h"
#include "ops/mixer/mixer_case.h"
#include "ops/mixer/recurrent.h"
#include "ops/random.h"
#include "support.h"
#include "tensor/graph.h"

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
      const Tensor wide = random.normal_tensor({of.slots, length, before + heads * dim + after});
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
    if (spec.decay) set_decay(random.uniform_tensor({of.slots, length, heads()}, -0.2, spec.signed_decay ? 0.2 : 0));
  }

  int64_t heads() const { return std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads}); }
  void set_decay(const Tensor& decay) {
    cpu.log_decay = decay;
    gpu.log_decay = to_gpu(decay);
  }
  MixerCache cpu_cache() const { return MixerCache(spec, sizes); }
  MixerCache gpu_cache() const { return MixerCache(spec, sizes, kGpu); }
};

// Token t of every sequence.
Tensor step(MixerCache& cache, const MixerInputs& in, int64_t t) {
  return cache.step(all_slots(cache.slots(), in.q.device()), in.q.select(1, t), in.k.select(1, t), in.v.select(1, t),
                    in.log_decay ? to_dtype(in.log_decay.select(1, t), DType::f32) : Tensor());
}

// Some tokens of one sequence.
MixerInputs part_of(const MixerInputs& in, int64_t sequence, int64_t begin, int64_t count) {
  MixerInputs part = in;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
    if (part.*x) part.*x = (part.*x).slice(0, sequence, 1).slice(1, begin, count);
  return part;
}

// Tokens [begin, end) one by one on both sides.
void expect_same_steps(MixerCache& cpu, MixerCache& gpu, const Tokens& tokens, int64_t begin, int64_t end) {
  std::vector<Tensor> outs;
  for (int64_t t = begin; t < end; ++t) outs.push_back(step(gpu, tokens.gpu, t));
  for (int64_t t = begin; t < end; ++t)
    ASSERT_LE(relative_error(to_cpu(outs[t - begin]), step(cpu, tokens.cpu, t), 0.1), tolerance(tokens.gpu.q.dtype()))
        << "token " << t;
  for (int64_t slot = 0; slot < cpu.slots(); ++slot) EXPECT_EQ(cpu.tokens(slot), gpu.tokens(slot));
}

std::string describe(const MixerSpec& spec, const MixerCache::Sizes& sizes, DType dtype) {
  return fmt::format("{}; {} slots, heads {} {} {}, dims {} {}, {}", to_string(spec), sizes.slots, sizes.q_heads,
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
      for (int64_t slot = 0; slot < cpu.slots(); ++slot)
        EXPECT_LE(relative_error(to_cpu(gpu.state(slot)), cpu.state(slot), 0.1), 1e-4);
    }
  }
}

// Simulates many tokens: large heads fold for the first time only after thousands.
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
  contents.k = some({1, pages, sizes.k_heads, CachePage::kTokens, sizes.qk_dim}, dtype);
  contents.v = some({1, pages, sizes.v_heads, CachePage::kTokens, sizes.v_dim}, dtype);
  if (spec.decay) contents.log_decay = random.uniform_tensor({1, pages, tokens.heads(), CachePage::kTokens}, -0.2, 0);
  if (folded)
    contents.state = some(
        {1, empty.shape().state_heads, state_rows(spec, sizes.qk_dim), state_columns(spec, sizes.v_dim)}, DType::f32);
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
      MixerCache cpu = tokens.cpu_cache(), gpu = tokens.gpu_cache();
      for (int64_t slot = 0; slot < sizes.slots; ++slot) {
        const MixerContents contents = some_contents(random, tokens, dtype);
        cpu.restore(slot, contents);
        gpu.restore(slot, contents);
      }
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
      for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, first}, {first, second}})
        for (int64_t slot = 0; slot < sizes.slots; ++slot) {
          const Tensor expected = cpu.prefill(slot, part_of(tokens.cpu, slot, begin, count));
          const Tensor actual = gpu.prefill(slot, part_of(tokens.gpu, slot, begin, count));
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
    const Tensor decay = random.uniform_tensor({sizes.slots, 120, tokens.heads()}, 0, 4);
    const Tensor later = decay.slice(1, 40, 80);
    copy(later, random.uniform_tensor(later.shape(), -4, 0));
    tokens.set_decay(decay);
    MixerCache cpu = tokens.cpu_cache(), gpu = tokens.gpu_cache();
    for (int64_t t = 0; t < 120; ++t)
      ASSERT_LE(worst_row(to_cpu(step(gpu, tokens.gpu, t)), step(cpu, tokens.cpu, t), 0.1), 1e-4) << "token " << t;
    EXPECT_FALSE(gpu.has_folded(0));
  }
}

TEST(RecurrentCuda, ContentsMoveBetweenDevicesBitForBit) {
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
          const MixerContents contents = gpu.contents(1);
          MixerCache cpu = tokens.cpu_cache();
          cpu.restore(1, contents);
          const MixerContents back = cpu.contents(1);
          for (Tensor MixerContents::*x :
               {&MixerContents::k, &MixerContents::v, &MixerContents::log_decay, &MixerContents::state}) {
            ASSERT_EQ((contents.*x).defined(), (back.*x).defined());
            if (!(contents.*x)) continue;
            ASSERT_TRUE(same_bits(contents.*x, back.*x)) << "token " << t;
          }
          MixerCache again = tokens.gpu_cache(), beside = tokens.gpu_cache();
          for (int64_t slot = 0; slot < sizes.slots; ++slot) {
            again.restore(slot, gpu.contents(slot));
            beside.restore(slot, gpu.contents(slot, kGpu));
          }
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

// One row for each of these slots: its next token.
MixerInputs next_tokens(const MixerCache& cache, const MixerInputs& in, const std::vector<int32_t>& slots) {
  MixerInputs rows;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay}) {
    if (!(in.*x)) continue;
    Shape shape = (in.*x).select(1, 0).shape();
    shape[0] = static_cast<int64_t>(slots.size());
    rows.*x = Tensor::empty(shape, (in.*x).dtype(), (in.*x).device());
    for (size_t i = 0; i < slots.size(); ++i)
      copy((rows.*x).select(0, static_cast<int64_t>(i)), (in.*x).select(0, slots[i]).select(0, cache.tokens(slots[i])));
  }
  return rows;
}

// Slots of different lengths, stepped together in changing subsets and orders.
TEST(RecurrentCuda, SlotsOfDifferentLengthsEqualTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(8);
  for (const MixerSpec& spec : every_spec()) {
    const DType dtype = random.pick<DType>({DType::f32, DType::bf16});
    const MixerCache::Sizes sizes{4, 2, 1, 2, 8, random.pick<int64_t>({8, 16})};
    SCOPED_TRACE(describe(spec, sizes, dtype));
    const int64_t fold = MixerCache(spec, sizes).first_fold(), length = fold + 200;
    const Tokens tokens(random, spec, sizes, length, dtype);
    MixerCache cpu = tokens.cpu_cache(), gpu = tokens.gpu_cache();
    const auto prefill = [&](int64_t slot, int64_t count) {
      cpu.prefill(slot, part_of(tokens.cpu, slot, cpu.tokens(slot), count));
      gpu.prefill(slot, part_of(tokens.gpu, slot, gpu.tokens(slot), count));
    };
    if (fold > 0) prefill(0, fold - 1);  // folds in the first steps
    prefill(1, fold + 100);              // one with a state, or a long window
    prefill(2, 30);
    std::vector<std::vector<int32_t>> subsets;
    std::vector<Tensor> outs;
    for (int i = 0; i < 70; ++i) {
      std::vector<int32_t> slots;
      for (int32_t slot = 0; slot < 4; ++slot)
        if (i < 5 || random.integer(0, 3) > 0)
          slots.insert(slots.begin() + random.integer(0, static_cast<int64_t>(slots.size())), slot);
      if (slots.empty()) continue;
      const MixerInputs in = next_tokens(gpu, tokens.gpu, slots);
      outs.push_back(gpu.step(slot_rows(slots, kGpu), in.q, in.k, in.v, in.log_decay));
      subsets.push_back(slots);
    }
    for (size_t i = 0; i < subsets.size(); ++i) {
      const MixerInputs in = next_tokens(cpu, tokens.cpu, subsets[i]);
      const Tensor expected = cpu.step(slot_rows(subsets[i]), in.q, in.k, in.v, in.log_decay);
      for (int64_t row = 0; row < expected.size(0); ++row)
        ASSERT_LE(relative_error(to_cpu(outs[i].slice(0, row, 1)), expected.slice(0, row, 1), 0.1), tolerance(dtype))
            << "step " << i << ", slot " << subsets[i][row];
    }
    const Tensor positions = to_cpu(gpu.positions());
    for (int64_t slot = 0; slot < 4; ++slot) {
      EXPECT_EQ(gpu.tokens(slot), cpu.tokens(slot));
      EXPECT_EQ(positions.data<int32_t>()[slot], cpu.tokens(slot));
      EXPECT_EQ(gpu.has_folded(slot), cpu.has_folded(slot));
    }
  }
}

// A step captured for some slots runs on others through the same table, while its recording key is unchanged.
TEST(RecurrentCuda, CapturedStepsRunOnOtherSlots) {
  SKIP_WITHOUT_GPU();
  Random random(9);
  for (const char* name : {"2mamba", "softmax"}) {
    const MixerSpec spec = mixer_spec(name);
    const MixerCache::Sizes sizes{5, 2, 2, 2, 8, 8};
    const int64_t length = MixerCache(spec, sizes).first_fold() + 400;
    const Tokens tokens(random, spec, sizes, length, DType::bf16);
    MixerCache plain = tokens.gpu_cache(), recorded = tokens.gpu_cache();
    const std::vector<int32_t> some{4, 0, 2};
    SlotRows rows = slot_rows(some, kGpu);
    MixerInputs in = next_tokens(plain, tokens.gpu, some);
    struct Recorded {
      std::unique_ptr<Graph> graph;
      Tensor out;
    };
    std::map<std::vector<int64_t>, Recorded> steps;
    int runs = 0;
    for (int i = 0; i < length; ++i) {
      std::vector<int32_t> slots{0, 1, 2, 3, 4};
      while (slots.size() > 3) slots.erase(slots.begin() + random.integer(0, static_cast<int64_t>(slots.size()) - 1));
      if (i % 50 == 49) {
        plain.copy(slots[0], slots[1]);
        recorded.copy(slots[0], slots[1]);
      }
      if (i % 90 == 89) {
        plain.clear(slots[2]);
        recorded.clear(slots[2]);
      }
      const MixerInputs now = next_tokens(plain, tokens.gpu, slots);
      const Tensor expected = plain.step(slot_rows(slots, kGpu), now.q, now.k, now.v, now.log_decay);
      rows.slots = slots;
      recorded.prepare(rows, DType::bf16);
      copy(rows.table, slot_rows(slots, kGpu).table);
      for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
        if (in.*x) copy(in.*x, now.*x);
      Recorded& step = steps[recorded.recording(rows)];
      if (step.graph) {
        recorded.advance(rows);
        ++runs;
      } else {
        step.graph =
            std::make_unique<Graph>(kGpu, [&] { step.out = recorded.step(rows, in.q, in.k, in.v, in.log_decay); });
      }
      step.graph->run();
      ASSERT_TRUE(same_bits(to_cpu(step.out), to_cpu(expected))) << name << ", step " << i;
    }
    EXPECT_GT(runs, 10 * static_cast<int>(steps.size()));
  }
}

TEST(RecurrentCuda, CopiesContinueLikeTheOriginalBitForBit) {
  SKIP_WITHOUT_GPU();
  Random random(10);
  for (const char* name : {"2mamba", "softmax"}) {
    const MixerSpec spec = mixer_spec(name);
    const MixerCache::Sizes sizes{3, 2, 1, 2, 16, 16};
    const int64_t fold = MixerCache(spec, sizes).first_fold();
    const Tokens tokens(random, spec, sizes, fold + 200, DType::bf16);
    for (int64_t at : {int64_t{0}, int64_t{45}, fold + 100}) {
      MixerCache cache = tokens.gpu_cache();
      cache.prefill(2, part_of(tokens.gpu, 1, 0, 70));
      if (at > 0) cache.prefill(0, part_of(tokens.gpu, 0, 0, at));
      cache.copy(0, 2);
      for (int64_t t = at; t < at + 90; ++t) {
        // Row 0 twice: the copy reads what the original reads.
        MixerInputs in = next_tokens(cache, tokens.gpu, {0, 2});
        for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
          if (in.*x) copy((in.*x).select(0, 1), (in.*x).select(0, 0));
        const Tensor y = to_cpu(cache.step(slot_rows({0, 2}, kGpu), in.q, in.k, in.v, in.log_decay));
        ASSERT_TRUE(same_bits(y.slice(0, 0, 1), y.slice(0, 1, 1))) << name << ", token " << t;
      }
      EXPECT_GT(cache.bytes(0), 0);
      cache.clear(0);
      EXPECT_EQ(cache.bytes(0), 0);
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
        const Tensor actual =
            to_cpu(gpu.step(slot_rows({0}, kGpu), there, there, there, spec.decay ? decay : Tensor()));
        const Tensor expected = cpu.step(slot_rows({0}), x, x, x, spec.decay ? a : Tensor());
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
  const SlotRows first = slot_rows({0}, kGpu);
  expect_error([&] { cache.step(slot_rows({0}), there, there, there); }, {"mixer_cache.step", "\"rows\"", "cpu"});
  expect_error([&] { cache.step(first, x, x, x); }, {"mixer_cache.step", "\"q\"", "cpu", "cuda"});
  expect_error([&] { cache.step(first, there, to_gpu(x, DType::bf16), there); }, {"\"k\"", "bf16", "f32"});
  EXPECT_EQ(cache.tokens(0), 0);
}

}  // namespace
}  // namespace furious
