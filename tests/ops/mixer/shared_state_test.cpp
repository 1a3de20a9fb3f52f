// Heads that share keys, values and decays share a state: the results are those of a state for each head.
#include <numeric>

#include "cuda.h"
#include "ops/mixer/mixer_case.h"
#include "ops/mixer/recurrent.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kTolerance = 1e-4;

// A decay for each of so many heads.
Tensor for_each_head(const Tensor& decay, int64_t heads) {
  const int64_t own = decay.size(2);
  const Tensor all = Tensor::empty({decay.size(0), decay.size(1), heads}, decay.dtype(), decay.device());
  for (int64_t i = 0; i < heads / own; ++i) copy(all.split_dim(2, own, heads / own).select(3, i), decay);
  return all;
}

// Heads of q, k, v and decays.
struct Grouping {
  int64_t q, k, v, decay;
  int64_t heads() const { return std::max({q, k, v}); }
  int64_t states() const { return std::lcm(std::lcm(k, v), decay); }
};

// Of 12 heads, 6 read a state together on a GPU.
const std::vector<Grouping> kGroupings{{6, 2, 2, 2}, {4, 1, 1, 1}, {6, 2, 1, 3}, {6, 1, 2, 2},
                                       {4, 2, 2, 4}, {2, 1, 4, 2}, {12, 1, 1, 1}};

struct Shared {
  MixerSpec spec;
  Grouping grouping;
  MixerInputs inputs, per_head;  // the same with a decay for each head
  MixerCache::Sizes sizes, sizes_per_head;

  Shared(Random& random, const MixerSpec& of, const Grouping& group, int64_t length, int64_t qk_dim = 8,
         int64_t v_dim = 12)
      : spec(of), grouping(group) {
    constexpr int64_t kSlots = 2;
    inputs.q = random.normal_tensor({kSlots, length, group.q, qk_dim});
    inputs.k = random.normal_tensor({kSlots, length, group.k, qk_dim});
    inputs.v = random.normal_tensor({kSlots, length, group.v, v_dim});
    if (spec.norm == Norm::sum)  // scores that cancel are ill-conditioned
      for (const Tensor& x : {inputs.q, inputs.k})
        for (int64_t i = 0; i < x.elements(); ++i) x.data<float>()[i] = std::fabs(x.data<float>()[i]);
    inputs.log_decay = random.uniform_tensor({kSlots, length, group.decay}, -0.3, 0);
    per_head = inputs;
    per_head.log_decay = for_each_head(inputs.log_decay, group.heads());
    sizes = {kSlots, group.q, group.k, group.v, qk_dim, v_dim, group.decay};
    sizes_per_head = sizes;
    sizes_per_head.decay_heads = 0;
  }
};

Tensor step(MixerCache& cache, const MixerInputs& in, int64_t t) {
  const Tensor decay = Tensor::empty({in.q.size(0), in.log_decay.size(2)}, DType::f32, in.q.device());
  copy(decay, in.log_decay.select(1, t));
  return cache.step(all_slots(cache.slots(), in.q.device()), in.q.select(1, t), in.k.select(1, t), in.v.select(1, t),
                    decay);
}

MixerInputs part_of(const MixerInputs& in, int64_t sequence, int64_t begin, int64_t count) {
  MixerInputs part = in;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
    part.*x = (part.*x).slice(0, sequence, 1).slice(1, begin, count);
  return part;
}

std::vector<MixerSpec> specs() {
  return {mixer_spec("2mamba"), mixer_spec("mamba2"), {Score::power, true, Norm::none, 0, 3}};
}

TEST(SharedState, DecaysOfGroupsEqualDecaysOfEachHead) {
  Random random(1);
  for (const MixerSpec& spec : {mixer_spec("2mamba"), mixer_spec("mamba2"), mixer_spec("fox")}) {
    for (const Grouping& grouping : kGroupings) {
      const Shared c(random, spec, grouping, 50);
      const int64_t heads = grouping.heads(), own = grouping.decay;
      for (const Form form : {Form::reference, Form::parallel, Form::chunked}) {
        if (form == Form::chunked && spec.score == Score::exponential) continue;
        const MixerOptions options{form, 16};
        const MixerResult shared = mixer_forward(spec, c.inputs, options);
        const MixerResult each = mixer_forward(spec, c.per_head, options);
        EXPECT_TRUE(same_bits(shared.out, each.out));
        const Tensor g = random.normal_tensor(shared.out.shape());
        const MixerGradients d = mixer_backward(spec, c.inputs, shared, g, {}, options);
        const MixerGradients d_each = mixer_backward(spec, c.per_head, each, g, {}, options);
        EXPECT_TRUE(same_bits(d.q, d_each.q) && same_bits(d.k, d_each.k) && same_bits(d.v, d_each.v));
        ASSERT_EQ(d.log_decay.shape(), c.inputs.log_decay.shape());
        const std::vector<double> sum = to_doubles(d.log_decay), all = to_doubles(d_each.log_decay);
        for (size_t i = 0; i < sum.size(); ++i) {
          const auto group = static_cast<size_t>(heads / own);
          double expected = 0, size = 1e-3;
          for (size_t h = 0; h < group; ++h) expected += all[i * group + h], size += std::fabs(all[i * group + h]);
          ASSERT_NEAR(sum[i], expected, 1e-5 * size);
        }
      }
    }
  }
  // In double precision, too.
  const Shared c(random, mixer_spec("2mamba"), {6, 2, 2, 2}, 40);
  MixerInputs exact = c.inputs;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
    exact.*x = to_dtype(exact.*x, DType::f64);
  const Tensor g = random.normal_tensor({2, 40, 6, 12});
  const auto gradient = [&](const MixerInputs& in, Form form) {
    const MixerResult result = mixer_forward(c.spec, in, {form});
    return mixer_backward(c.spec, in, result, to_dtype(g, in.q.dtype()), {}, {form}).log_decay;
  };
  EXPECT_LE(relative_error(gradient(c.inputs, Form::parallel), gradient(exact, Form::reference)), kTolerance);
  MixerInputs odd = Shared(random, mixer_spec("2mamba"), {6, 2, 2, 2}, 5).inputs;
  odd.log_decay = random.uniform_tensor({2, 5, 4}, -1, 0);
  expect_error([&] { mixer_forward(mixer_spec("2mamba"), odd); }, {"log_decay", "4 heads", "divisor"});
}

TEST(SharedState, CachesEqualThoseWithAStateForEachHead) {
  Random random(2);
  for (const MixerSpec& spec : specs()) {
    for (const Grouping& grouping : kGroupings) {
      const MixerCache::Sizes sizes{2, grouping.q, grouping.k, grouping.v, 8, 12, grouping.decay};
      const int64_t length = MixerCache(spec, sizes).first_fold() + 90;
      const Shared c(random, spec, grouping, length);
      SCOPED_TRACE(fmt::format("{}; heads {} {} {}, decays {}", to_string(spec), grouping.q, grouping.k, grouping.v,
                               grouping.decay));
      const Tensor expected = mixer_forward(spec, c.per_head, {Form::parallel}).out;
      MixerCache cache(spec, c.sizes), chunks(spec, c.sizes);
      EXPECT_EQ(cache.shape().state_heads, grouping.states());
      EXPECT_EQ(MixerCache(spec, c.sizes_per_head).shape().state_heads, grouping.heads());
      for (int64_t t = 0; t < length; ++t) {
        const bool again_here = t % 61 == 0;
        MixerCache again(spec, c.sizes);
        for (int64_t slot = 0; again_here && slot < 2; ++slot) again.restore(slot, cache.contents(slot));
        const Tensor y = step(cache, c.inputs, t);
        if (again_here) {
          ASSERT_TRUE(same_bits(step(again, c.inputs, t), y)) << "token " << t;
        }
        ASSERT_LE(worst_row(y, expected.select(1, t), 0.1), kTolerance) << "token " << t;
      }
      EXPECT_TRUE(cache.has_folded(0));
      for (int64_t slot = 0; slot < 2; ++slot) {
        const Tensor state =
            mixer_forward(spec, part_of(c.per_head, slot, 0, length), {.final_state = true}).final_state;
        EXPECT_LE(relative_error(cache.state(slot), state), kTolerance);
        for (int64_t t = 0, count; t < length; t += count) {
          count = std::min(random.integer(1, length), length - t);
          ASSERT_LE(worst_row(chunks.prefill(slot, part_of(c.inputs, slot, t, count)),
                              expected.slice(0, slot, 1).slice(1, t, count), 0.1),
                    kTolerance)
              << "from token " << t;
        }
        EXPECT_LE(relative_error(chunks.state(slot), state), kTolerance);
      }
    }
  }
}

// 40 heads of queries, 8 of keys, values and decays: a fifth of the memory.
TEST(SharedState, TakesTheMemoryOfItsStates) {
  const MixerSpec spec = mixer_spec("2mamba");
  MixerCache cache(spec, {3, 10, 2, 2, 16, 16, 2}), each(spec, {3, 10, 2, 2, 16, 16});
  const Tensor q = Tensor::zeros({1, 10, 16}, DType::f32), k = Tensor::zeros({1, 2, 16}, DType::f32);
  const auto fill = [&](MixerCache& to, int64_t decays) {
    const Tensor a = Tensor::zeros({1, decays}, DType::f32);
    for (int64_t t = 0; t <= to.first_fold(); ++t) to.step(slot_rows({0}), q, k, k, a);
    EXPECT_TRUE(to.has_folded(0));
    to.copy(0, 2);
    EXPECT_LE(to.bytes(2), to.bytes(0));  // pages that hold tokens alone
    return to.contents(0).state.bytes();
  };
  const size_t shared = fill(cache, 2), apart = fill(each, 10);
  EXPECT_EQ(shared, size_t{4} * 2 * (16 * 17 / 2) * 17);
  EXPECT_EQ(apart, 5 * shared);
  EXPECT_LT(cache.first_fold(), each.first_fold());
  const int64_t page = 32 * (2 * 2 * 16 + 2) * 4, pages = (cache.window() + 31) / 32;
  EXPECT_LE(cache.bytes(0), static_cast<int64_t>(shared) * 3 / 2 + pages * page + 4096);
  expect_error([&] { each.restore(1, cache.contents(0)); }, {"mixer_cache", "state"});
}

TEST(SharedStateCuda, CachesEqualTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const MixerSpec& spec : specs()) {
    for (const Grouping& grouping : kGroupings) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const MixerCache::Sizes sizes{2, grouping.q, grouping.k, grouping.v, 8, 16, grouping.decay};
        const int64_t length = MixerCache(spec, sizes).first_fold() + 150;
        const Shared c(random, spec, grouping, length, 8, 16);
        SCOPED_TRACE(fmt::format("{}; heads {} {} {}, decays {}, {}", to_string(spec), grouping.q, grouping.k,
                                 grouping.v, grouping.decay, name_of(dtype)));
        MixerInputs here = c.inputs, there;
        for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v}) {
          there.*x = to_gpu(to_dtype(here.*x, dtype));
          here.*x = to_dtype(to_dtype(here.*x, dtype), DType::f32);
        }
        there.log_decay = to_gpu(here.log_decay);
        MixerCache cpu(spec, c.sizes), gpu(spec, c.sizes, kGpu);
        const int64_t first = random.integer(1, length / 2);
        for (int64_t slot = 0; slot < 2; ++slot)
          ASSERT_LE(worst_row(to_cpu(gpu.prefill(slot, part_of(there, slot, 0, first))),
                              cpu.prefill(slot, part_of(here, slot, 0, first)), 0.1),
                    3 * tolerance(dtype));
        for (int64_t t = first; t < length; ++t)
          ASSERT_LE(worst_row(to_cpu(step(gpu, there, t)), step(cpu, here, t), 0.1), 3 * tolerance(dtype))
              << "token " << t;
        EXPECT_TRUE(gpu.has_folded(0));
        MixerCache again(spec, c.sizes, kGpu);
        for (int64_t slot = 0; slot < 2; ++slot) {
          EXPECT_LE(relative_error(to_cpu(gpu.state(slot)), cpu.state(slot)), tolerance(dtype));
          again.restore(slot, gpu.contents(slot));
        }
        EXPECT_TRUE(same_bits(to_cpu(step(again, there, 0)), to_cpu(step(gpu, there, 0))));
      }
    }
  }
}

// Heads of published models, after more tokens than are worth reading here: the contents are made up.
TEST(SharedStateCuda, LargeHeadsAgreeWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const auto& [grouping, dim] : {std::pair<Grouping, int64_t>{{10, 2, 2, 2}, 128}, {{12, 1, 1, 1}, 64}}) {
    for (const MixerSpec& spec : {mixer_spec("2mamba"), mixer_spec("mamba2")}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(fmt::format("{}; heads {}, {} states of {}, {}", to_string(spec), grouping.q, grouping.states(),
                                 dim, name_of(dtype)));
        constexpr int64_t kTokens = 9;  // a fold among them
        const Shared c(random, spec, grouping, kTokens, dim, dim);
        MixerInputs here = c.inputs, there;
        const auto rounded = [&](const Tensor& x) { return to_dtype(to_dtype(x, dtype), DType::f32); };
        for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v}) {
          here.*x = rounded(here.*x);
          there.*x = to_gpu(to_dtype(here.*x, dtype));
        }
        there.log_decay = to_gpu(here.log_decay);
        MixerCache cpu(spec, c.sizes), gpu(spec, c.sizes, kGpu);
        const int64_t states = cpu.shape().state_heads, pages = (cpu.window() + 31) / 32;
        for (int64_t slot = 0; slot < 2; ++slot) {
          const auto positive = [&](const Shape& shape) {
            const Tensor x = random.normal_tensor(shape);
            for (int64_t i = 0; i < x.elements(); ++i) x.data<float>()[i] = std::fabs(x.data<float>()[i]);
            return x;
          };
          MixerContents contents;
          contents.pending = cpu.window() - 5;
          contents.tokens = contents.pending + 9000;
          contents.k = rounded(positive({1, pages, grouping.k, 32, dim}));
          contents.v = rounded(random.normal_tensor({1, pages, grouping.v, 32, dim}));
          contents.log_decay = random.uniform_tensor({1, pages, grouping.decay, 32}, -0.2, 0);
          contents.state = positive({1, states, state_rows(spec, dim), state_columns(spec, dim)});
          cpu.restore(slot, contents);
          gpu.restore(slot, contents);
        }
        for (int64_t t = 0; t < kTokens; ++t)
          ASSERT_LE(worst_row(to_cpu(step(gpu, there, t)), step(cpu, here, t), 0.1), 3 * tolerance(dtype))
              << "token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace furious
