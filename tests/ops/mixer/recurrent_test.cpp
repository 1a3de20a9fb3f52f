#include "ops/mixer/recurrent.h"

#include "base/parallel.h"
#include "ops/mixer/mixer_case.h"
#include "support.h"
#include "tensor/arena.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kTolerance = 1e-4;

MixerCache::Sizes sizes_of(const MixerInputs& in) {
  return {in.q.size(0), in.q.size(2), in.k.size(2), in.v.size(2), in.q.size(3), in.v.size(3)};
}

MixerCache cache_for(const MixerCase& c) {
  return MixerCache(c.spec, sizes_of(c.inputs));
}

// Token t of every sequence.
Tensor step(MixerCache& cache, const MixerInputs& in, int64_t t) {
  return cache.step(all_slots(cache.slots()), in.q.select(1, t), in.k.select(1, t), in.v.select(1, t),
                    in.log_decay ? to_dtype(in.log_decay.select(1, t), DType::f32) : Tensor());
}

// Some tokens of one sequence.
MixerInputs part_of(const MixerInputs& in, int64_t sequence, int64_t begin, int64_t count) {
  MixerInputs part = in;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
    if (part.*x) part.*x = (part.*x).slice(0, sequence, 1).slice(1, begin, count);
  return part;
}

// The next tokens of some slots, of which each reads its own sequence from where it is.
Tensor step_slots(MixerCache& cache, const std::vector<int32_t>& slots, const std::vector<MixerInputs>& sequences) {
  MixerInputs rows;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay}) {
    if (!(sequences[0].*x)) continue;
    Shape shape = (sequences[0].*x).select(1, 0).shape();
    shape[0] = static_cast<int64_t>(slots.size());
    rows.*x = Tensor::empty(shape, DType::f32);
    for (size_t i = 0; i < slots.size(); ++i)
      copy((rows.*x).slice(0, static_cast<int64_t>(i), 1),
           (sequences[static_cast<size_t>(slots[i])].*x).select(1, cache.tokens(slots[i])));
  }
  return cache.step(slot_rows(slots), rows.q, rows.k, rows.v, rows.log_decay);
}

CaseLimits plain(int64_t longest) {
  CaseLimits limits;
  limits.longest = longest;
  limits.largest_dim = 40;  // 820 features: several blocks of them, and several vectors of values
  limits.states = false;
  limits.boundaries = false;
  return limits;
}

TEST(Recurrent, TokenByTokenEqualsOnePass) {
  Random random(1);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = random_case(random, spec, plain(300));
    SCOPED_TRACE(describe(c));
    MixerCache cache = cache_for(c);
    const Tensor expected = mixer_forward(spec, cast(c, DType::f64).inputs, {Form::reference}).out;
    for (int64_t t = 0; t < c.inputs.q.size(1); ++t)
      ASSERT_LE(relative_error(step(cache, c.inputs, t), expected.select(1, t), 0.1), kTolerance) << "token " << t;
    for (int64_t slot = 0; slot < cache.slots(); ++slot) EXPECT_EQ(cache.tokens(slot), c.inputs.q.size(1));
  }
}

TEST(Recurrent, ContinuesFromItsContentsBitForBit) {
  Random random(9);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = random_case(random, spec, plain(300));
    SCOPED_TRACE(describe(c));
    MixerCache cache = cache_for(c);
    for (int64_t t = 0; t < c.inputs.q.size(1); ++t) {
      MixerCache again = cache_for(c);
      for (int64_t slot = 0; slot < cache.slots(); ++slot) again.restore(slot, cache.contents(slot));
      ASSERT_TRUE(same_bits(step(cache, c.inputs, t), step(again, c.inputs, t))) << "token " << t;
      for (int64_t slot = 0; slot < cache.slots(); ++slot) ASSERT_EQ(again.tokens(slot), cache.tokens(slot));
    }
  }
}

TEST(Recurrent, RefusesContentsOfAnotherCache) {
  const MixerSpec spec{Score::squared, true, Norm::sum};
  const MixerCache::Sizes sizes{2, 3, 3, 3, 8, 8};
  MixerCache cache(spec, sizes);
  const Tensor x = Tensor::zeros({2, 3, 8}, DType::f32), decay = Tensor::zeros({2, 3}, DType::f32);
  for (int64_t t = 0; t <= cache.first_fold(); ++t) cache.step(all_slots(2), x, x, x, decay);
  const auto refused = [&](auto&& change, const std::string& part) {
    MixerContents contents = cache.contents(1);
    change(contents);
    expect_error([&] { cache.restore(1, contents); }, {"mixer_cache", part});
  };
  ASSERT_TRUE(cache.contents(1).state);
  refused([](MixerContents& c) { c.pending = -1; }, "-1 tokens");
  refused([&](MixerContents& c) { c.pending = cache.window() + 1; }, "in the window");
  refused([](MixerContents& c) { c.tokens = 0; }, "of 0 in the window");
  refused([](MixerContents& c) { c.state = {}; }, "in the window");
  refused([](MixerContents& c) { c.state = c.k; }, "state");
  refused([](MixerContents& c) { c.k = {}; }, "k");
  refused([](MixerContents& c) { c.v = c.v.slice(1, 0, 1); }, "v");
  refused([](MixerContents& c) { c.log_decay = {}; }, "log_decay");
  const MixerContents contents = cache.contents(1);
  EXPECT_EQ(contents.tokens, cache.first_fold() + 1);  // the refused calls have changed nothing
  EXPECT_TRUE(same_bits(contents.state, cache.contents(0).state));
  MixerCache without_decay({Score::squared, false, Norm::sum}, sizes);
  MixerCache without_state({Score::exponential, true, Norm::sum}, sizes);
  expect_error([&] { without_decay.restore(0, contents); }, {"decay"});
  expect_error([&] { without_state.restore(0, contents); }, {"exponential"});
  expect_error([&] { cache.restore(2, contents); }, {"mixer_cache", "slot 2", "0 to 1"});
}

TEST(Recurrent, ContinuesAfterPrefill) {
  Random random(2);
  for (const MixerSpec& spec : every_spec()) {
    for (int i = 0; i < 4; ++i) {
      CaseLimits limits = plain(300);
      limits.shortest = 3;
      const MixerCase c = random_case(random, spec, limits);
      SCOPED_TRACE(describe(c));
      const int64_t length = c.inputs.q.size(1);
      const Tensor expected = mixer_forward(spec, c.inputs, {Form::parallel}).out;
      MixerCache cache = cache_for(c);
      const auto prefill = [&](int64_t begin, int64_t count) {
        for (int64_t slot = 0; slot < cache.slots(); ++slot)
          EXPECT_LE(relative_error(cache.prefill(slot, part_of(c.inputs, slot, begin, count)),
                                   expected.slice(0, slot, 1).slice(1, begin, count), 0.1),
                    kTolerance);
      };
      const int64_t first = random.integer(1, length - 2);
      const int64_t second = random.integer(1, length - 1 - first);
      prefill(0, first);
      prefill(first, second);
      for (int64_t t = first + second; t < length; ++t)
        ASSERT_LE(relative_error(step(cache, c.inputs, t), expected.select(1, t), 0.1), kTolerance) << "token " << t;
    }
  }
}

// Chunks of the first window read the tokens before them as they are: nothing is folded for them.
TEST(Recurrent, ChunksBeforeTheFirstFoldFoldNothing) {
  Random random(22);
  for (const MixerSpec& spec : every_spec()) {
    CaseLimits limits = plain(60);
    limits.shortest = 40;
    const MixerCase c = random_case(random, spec, limits);
    SCOPED_TRACE(describe(c));
    MixerCache cache = cache_for(c);
    const int64_t length = cache.first_fold() > 0 ? std::min(cache.first_fold() - 1, c.inputs.q.size(1)) : 40;
    for (int64_t begin = 0; begin < length; begin += 15) {
      const int64_t count = std::min<int64_t>(15, length - begin);
      const Tensor out = cache.prefill(0, part_of(c.inputs, 0, begin, count));
      if (begin == 0) continue;
      MixerInputs all = part_of(c.inputs, 0, 0, begin + count);
      all.q = all.q.slice(1, begin, count);
      all.first_query = begin;
      EXPECT_EQ(relative_error(out, mixer_forward(spec, all).out, 0.1), 0) << begin;
    }
    EXPECT_FALSE(cache.has_folded(0));
  }
}

// The mask of a cache grows past the largest exponent, and falls again.
TEST(Recurrent, GrowthPastSaturation) {
  Random random(10);
  for (const MixerSpec& spec : further_specs()) {
    if (!spec.signed_decay) continue;
    CaseLimits limits = plain(80);
    limits.shortest = 60;
    limits.largest_dim = 12;
    const MixerCase c = random_case(random, spec, limits);
    SCOPED_TRACE(describe(c));
    const int64_t length = c.inputs.q.size(1);
    for (int64_t t = 0; t < length; ++t) {
      const Tensor a = c.inputs.log_decay.slice(1, t, 1);
      copy(a, random.uniform_tensor(a.shape(), t < 40 ? 0 : -8, t < 40 ? 8 : 0));
    }
    const Tensor expected = mixer_forward(spec, cast(c, DType::f64).inputs, {Form::reference}).out;
    MixerCache cache = cache_for(c);
    for (int64_t t = 0; t < length; ++t)
      ASSERT_LE(worst_row(step(cache, c.inputs, t), expected.select(1, t), 0.1), kTolerance) << "token " << t;
    EXPECT_FALSE(cache.has_folded(0));
    EXPECT_EQ(cache.first_fold(), 0);
  }
}

TEST(Recurrent, StateIsTheStateOfTheForwardPass) {
  Random random(3);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = random_case(random, spec, plain(200));
    MixerCache cache = cache_for(c);
    if (!has_state(c)) {
      expect_error([&] { cache.state(0); }, {"mixer_cache.state", to_string(spec)});
      continue;
    }
    for (int64_t t = 0; t < c.inputs.q.size(1); ++t) step(cache, c.inputs, t);
    const Tensor expected = mixer_forward(spec, c.inputs, {Form::parallel, 0, true}).final_state;
    for (int64_t slot = 0; slot < cache.slots(); ++slot)
      EXPECT_LE(relative_error(cache.state(slot), expected.slice(0, slot, 1), 0.1), kTolerance);
  }
}

TEST(Recurrent, UsesNoMoreMemoryThanAKeyValueCacheOrTheState) {
  Random random(4);
  for (const char* name : {"2mamba", "mamba2", "2mamba-e"}) {
    const MixerSpec spec = mixer_spec(name);
    const MixerCache::Sizes sizes{1, 2, 2, 2, 16, 16};
    MixerCache cache(spec, sizes);
    MixerSpec never_folds = spec;
    never_folds.score = Score::exponential;
    MixerCache key_value(never_folds, sizes);
    const Tensor x = random.normal_tensor({1, 2, 16});
    const Tensor a = random.uniform_tensor({1, 2}, -1, 0);
    const int64_t page = 32 * 2 * (16 + 16 + 1) * 4;
    const int64_t state = 4 * 2 * state_rows(spec, 16) * state_columns(spec, 16);
    for (int t = 0; t < 400; ++t) {
      cache.step(slot_rows({0}), x, x, x, a);
      key_value.step(slot_rows({0}), x, x, x, a);
      ASSERT_LE(cache.bytes(), key_value.bytes()) << name << ", token " << t;
      if (has_state(spec, 16) && t > cache.first_fold()) {
        // Two windows of tokens at most, and the padding of the packed state.
        ASSERT_LE(cache.bytes(), state + state / 2 + 2 * page + 8 * 256 * 4) << name << ", token " << t;
      }
    }
    EXPECT_EQ(key_value.bytes(), (400 + 31) / 32 * page);
  }
}

TEST(Recurrent, StaysAKeyValueCacheWhenPrefilledInChunks) {
  Random random(6);
  const MixerSpec spec = mixer_spec("2mamba");
  MixerCache cache(spec, {1, 4, 4, 4, 64, 64});
  const auto piece = [&] {
    return MixerInputs{random.normal_tensor({1, 8, 4, 64}),
                       random.normal_tensor({1, 8, 4, 64}),
                       random.normal_tensor({1, 8, 4, 64}),
                       random.uniform_tensor({1, 8, 4}, -1, 0),
                       {},
                       {}};
  };
  cache.prefill(0, piece());
  const int64_t page = cache.bytes();
  for (int i = 0; i < 3; ++i) cache.prefill(0, piece());
  EXPECT_EQ(cache.bytes(), page);  // 32 tokens
  cache.state(0);
  EXPECT_EQ(cache.bytes(), page);
}

TEST(Recurrent, StrongDecayAndZeroesStayFinite) {
  for (const MixerSpec& spec : every_spec()) {
    // Powers of 1e4 leave the range of f32.
    for (float size : {0.0f, spec.degree > 0 ? 1e2f : 1e4f, 1e-20f}) {
      MixerCache cache(spec, {1, 1, 1, 1, 8, 8});
      Tensor x = Tensor::empty({1, 1, 8}, DType::f32);
      fill(x, size);
      Tensor a = Tensor::empty({1, 1}, DType::f32);
      fill(a, -50);
      for (int t = 0; t < 200; ++t)
        ASSERT_TRUE(all_finite(cache.step(slot_rows({0}), x, x, x, spec.decay ? a : Tensor())))
            << to_string(spec) << ", token " << t;
    }
  }
}

// Slots of different lengths, stepped together in subsets and orders that change, equal each sequence alone: to the
// bit, and to rounding in double precision.
TEST(Recurrent, SlotsDoNotDependOnEachOther) {
  Random random(11);
  for (const MixerSpec& spec : every_spec()) {
    constexpr int32_t kSlots = 3;
    const int64_t dim = 8, v_dim = random.integer(8, 12), heads = 1;
    const MixerCache::Sizes sizes{kSlots, 2 * heads, heads, 2 * heads, dim, v_dim};
    MixerCache together(spec, sizes);
    std::vector<MixerInputs> sequences;
    std::vector<Tensor> expected, alone;
    std::vector<int64_t> lengths;
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      // Two fold, at different times; the third ends before they do.
      const int64_t length = slot == 2 ? random.integer(1, 60) : together.first_fold() + (slot == 0 ? 90 : 20);
      CaseLimits limits = plain(length);
      limits.shortest = length;
      MixerCase c = random_case(random, spec, limits);
      c.inputs.q = random.normal_tensor({1, length, sizes.q_heads, dim});
      c.inputs.k = random.normal_tensor({1, length, sizes.k_heads, dim});
      c.inputs.v = random.normal_tensor({1, length, sizes.v_heads, v_dim});
      if (spec.norm == Norm::sum && spec.score != Score::exponential)  // else scores that cancel are ill-conditioned
        for (const Tensor& x : {c.inputs.q, c.inputs.k})
          for (int64_t i = 0; i < x.elements(); ++i) x.data<float>()[i] = std::fabs(x.data<float>()[i]);
      if (spec.decay) c.inputs.log_decay = random.uniform_tensor({1, length, 2 * heads}, -0.5, 0);
      sequences.push_back(c.inputs);
      lengths.push_back(length);
      expected.push_back(mixer_forward(spec, cast(c, DType::f64).inputs, {Form::reference}).out);
      MixerCache cache(spec, {1, sizes.q_heads, sizes.k_heads, sizes.v_heads, dim, v_dim});
      alone.push_back(Tensor::empty({length, 2 * heads, v_dim}, DType::f32));
      for (int64_t t = 0; t < length; ++t) copy(alone.back().slice(0, t, 1), step(cache, c.inputs, t));
    }
    SCOPED_TRACE(to_string(spec));
    bool mixed = false;  // a slot with a state stepped beside one without
    for (int64_t t = 0; t < 40; ++t)
      ASSERT_TRUE(same_bits(step_slots(together, {0}, sequences), alone[0].slice(0, t, 1))) << "token " << t;
    for (;;) {
      std::vector<int32_t> rows;
      for (int32_t slot = 0; slot < kSlots; ++slot)
        if (together.tokens(slot) < lengths[slot] && random.integer(0, 5) > 0)
          rows.insert(rows.begin() + random.integer(0, static_cast<int64_t>(rows.size())), slot);
      bool done = true;
      for (int32_t slot = 0; slot < kSlots; ++slot) done = done && together.tokens(slot) == lengths[slot];
      if (done) break;
      if (rows.empty()) continue;
      const Tensor y = step_slots(together, rows, sequences);
      const auto stepped = [&](int32_t slot) { return std::ranges::find(rows, slot) != rows.end(); };
      mixed = mixed || (stepped(0) && stepped(1) && together.has_folded(0) && !together.has_folded(1));
      for (size_t i = 0; i < rows.size(); ++i) {
        const int64_t t = together.tokens(rows[i]) - 1, row = static_cast<int64_t>(i);
        ASSERT_TRUE(same_bits(y.slice(0, row, 1), alone[rows[i]].slice(0, t, 1))) << "slot " << rows[i] << ", " << t;
        ASSERT_LE(worst_row(y.slice(0, row, 1), expected[rows[i]].select(1, t), 0.1), kTolerance)
            << "slot " << rows[i] << ", token " << t;
      }
    }
    if (together.first_fold() > 0) {
      EXPECT_TRUE(together.has_folded(0) && together.has_folded(1) && !together.has_folded(2));
      EXPECT_TRUE(mixed);
    }
  }
}

// A copied slot continues like the original bit for bit, and each is independent of the other's tokens.
TEST(Recurrent, CopiesContinueLikeTheOriginal) {
  Random random(12);
  for (const char* name : {"2mamba", "mamba2", "softmax"}) {
    const MixerSpec spec = mixer_spec(name);
    MixerCache cache(spec, {3, 2, 2, 2, 8, 8});
    const int64_t length = cache.first_fold() + 100;
    const auto sequence = [&] {
      MixerInputs in;
      for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v})
        in.*x = random.normal_tensor({1, length, 2, 8});
      if (spec.decay) in.log_decay = random.uniform_tensor({1, length, 2}, -1, 0);
      return in;
    };
    const MixerInputs text = sequence(), other = sequence();
    for (int64_t at : {int64_t{0}, int64_t{40}, length - 50}) {
      SCOPED_TRACE(fmt::format("{} after {} tokens", name, at));
      cache.clear(0);
      cache.prefill(2, part_of(other, 0, 0, 50));  // the target has tokens of its own
      for (int64_t t = 0; t < at; ++t) step_slots(cache, {0}, {text, text, text});
      cache.copy(0, 2);
      EXPECT_EQ(cache.tokens(2), at);
      EXPECT_EQ(cache.has_folded(2), cache.has_folded(0));
      for (int64_t t = at; t < at + 45; ++t) {
        const Tensor y = step_slots(cache, {0, 2}, {text, text, text});
        ASSERT_TRUE(same_bits(y.slice(0, 0, 1), y.slice(0, 1, 1))) << "token " << t;
      }
      // The original reads other tokens: the copy must not change.
      const MixerContents before = cache.contents(2);
      step_slots(cache, {0}, {other, text, text});
      EXPECT_TRUE(same_bits(cache.contents(2).k, before.k));
      cache.copy(2, 2);
      EXPECT_TRUE(same_bits(cache.contents(2).k, before.k));
    }
  }
}

TEST(Recurrent, ClearedSlotsAreEmptyAndFree) {
  Random random(13);
  for (const char* name : {"2mamba", "softmax"}) {
    const MixerSpec spec = mixer_spec(name);
    MixerCache cache(spec, {2, 2, 2, 2, 8, 8}), fresh(spec, {2, 2, 2, 2, 8, 8});
    EXPECT_EQ(cache.bytes(), 0);
    const int64_t length = cache.first_fold() + 70;
    MixerInputs in{random.normal_tensor({1, length, 2, 8}),
                   random.normal_tensor({1, length, 2, 8}),
                   random.normal_tensor({1, length, 2, 8}),
                   spec.decay ? random.uniform_tensor({1, length, 2}, -1, 0) : Tensor(),
                   {},
                   {}};
    for (int64_t t = 0; t < length; ++t) step_slots(cache, {1, 0}, {in, in});
    const int64_t both = cache.bytes();
    EXPECT_EQ(cache.bytes(0), both / 2);
    cache.clear(1);
    EXPECT_EQ(cache.bytes(1), 0);
    EXPECT_EQ(cache.bytes(), both / 2);
    EXPECT_EQ(cache.tokens(1), 0);
    EXPECT_EQ(cache.tokens(0), length);
    EXPECT_FALSE(cache.has_folded(1));
    for (int64_t t = 0; t < length; ++t)
      ASSERT_TRUE(same_bits(step_slots(cache, {1}, {in, in}), step_slots(fresh, {0}, {in, in}))) << "token " << t;
  }
}

// More keys than are packed at a time (512), also where a window has dropped pages.
TEST(Recurrent, LongChunkedPromptsAgreeWithTheParallelForm) {
  Random random(31);
  std::vector<MixerSpec> specs = every_spec();
  for (const int64_t window : {1, 33, 700}) {
    specs.push_back(mixer_spec("softmax"));
    specs.back().window = window;
  }
  for (const MixerSpec& spec : specs) {
    CaseLimits limits = plain(1300);
    limits.shortest = 1100;
    limits.dim = 8;
    const MixerCase c = random_case(random, spec, limits);
    if (has_state(c)) continue;  // folds before it is so long
    SCOPED_TRACE(describe(c));
    MixerCache cache = cache_for(c);
    const Tensor expected = mixer_forward(spec, c.inputs, {Form::parallel}).out;
    for (int64_t begin = 0, length = c.inputs.q.size(1); begin < length; begin += 217) {
      const int64_t count = std::min<int64_t>(217, length - begin);
      const Tensor out = cache.prefill(0, part_of(c.inputs, 0, begin, count));
      EXPECT_LE(relative_error(out, expected.slice(0, 0, 1).slice(1, begin, count), 0.1), kTolerance) << begin;
    }
  }
}

// A long prompt in chunks: what a chunk needs does not grow with the tokens before it.
TEST(Recurrent, ChunksOfAKvCacheTakeNoMemoryForTheTokensBefore) {
  constexpr int64_t kTokens = 4096, kChunk = 32, kHeads = 4, kDim = 64;
  for (const char* preset : {"softmax", "2mamba-e"}) {
    const MixerSpec spec = mixer_spec(preset);
    Arena arena(Device{});
    Random random(3);
    const Shape shape{1, kChunk, kHeads, kDim};
    MixerInputs chunk{
        random.normal_tensor(shape), random.normal_tensor(shape), random.normal_tensor(shape), {}, {}, {}};
    if (spec.decay) chunk.log_decay = Tensor::zeros({1, kChunk, kHeads}, DType::f32);
    const Arena::Scope scope(arena);  // of this thread
    const ThreadLimit one(1);
    MixerCache cache(spec, {1, kHeads, kHeads, kHeads, kDim, kDim});
    for (int64_t read = 0; read < kTokens; read += kChunk) cache.prefill(0, chunk);
    EXPECT_EQ(cache.tokens(0), kTokens);
    EXPECT_LT(arena.usage().peak, static_cast<size_t>(cache.bytes(0)) + (2 << 20)) << preset;
  }
}

// The key of a captured step: equal for any slots in one table while the longest window is in the same chunk
// and either none or some have a state.
TEST(Recurrent, RecordingChangesWithTheAddressesOfAStep) {
  MixerCache cache(mixer_spec("2mamba"), {3, 1, 1, 1, 8, 8});
  const Tensor x = Tensor::zeros({1, 1, 8}, DType::f32), a = Tensor::zeros({1, 1}, DType::f32);
  SlotRows rows = slot_rows({0, 1});
  const auto read = [&](int32_t slot, int64_t tokens) {
    for (int64_t t = 0; t < tokens; ++t) cache.step(slot_rows({slot}), x, x, x, a);
  };
  read(0, 10);
  const std::vector<int64_t> first = cache.recording(rows);
  rows.slots = {2, 0};
  EXPECT_EQ(cache.recording(rows), first);
  EXPECT_NE(cache.recording(slot_rows({0, 1})), first);  // another table
  read(2, 63);
  EXPECT_EQ(cache.recording(rows), first);
  read(2, 1);
  EXPECT_NE(cache.recording(rows), first);
  cache.clear(2);
  EXPECT_EQ(cache.recording(rows), first);
  read(2, cache.first_fold() + 1);
  ASSERT_TRUE(cache.has_folded(2));
  EXPECT_NE(cache.recording(rows), first);
  const Tensor positions = cache.positions();
  ASSERT_EQ(positions.size(0), 3);
  EXPECT_EQ(positions.data<int32_t>()[0], 10);
  EXPECT_EQ(positions.data<int32_t>()[1], 0);
  EXPECT_EQ(positions.data<int32_t>()[2], cache.first_fold() + 1);
}

TEST(Recurrent, BadSlots) {
  MixerCache cache(mixer_spec("softmax"), {3, 1, 1, 1, 8, 8});
  const Tensor x = Tensor::zeros({2, 1, 8}, DType::f32);
  expect_error([&] { cache.step(slot_rows({0, 3}), x, x, x); }, {"mixer_cache.step", "slot 3", "0 to 2"});
  expect_error([&] { cache.step(slot_rows({0, -1}), x, x, x); }, {"mixer_cache.step", "slot -1", "0 to 2"});
  expect_error([&] { cache.step(slot_rows({1, 1}), x, x, x); }, {"mixer_cache.step", "slot 1", "twice"});
  expect_error([&] { cache.step(slot_rows({1}), x, x, x); }, {"mixer_cache.step", "\"q\"", "[2, 1, 8]", "[1, 1, 8]"});
  expect_error([&] { cache.step({{0, 1}, slot_rows({0}).table}, x, x, x); }, {"mixer_cache.step", "\"rows\""});
  expect_error([&] { cache.prepare(slot_rows({2, 2}), DType::f32); }, {"mixer_cache.prepare", "twice"});
  expect_error([&] { cache.clear(3); }, {"mixer_cache", "slot 3"});
  expect_error([&] { cache.copy(0, -1); }, {"mixer_cache", "slot -1"});
  expect_error([&] { cache.prefill(5, {}); }, {"mixer_cache", "slot 5"});
  expect_error([] { MixerCache(mixer_spec("softmax"), {0, 1, 1, 1, 8, 8}); }, {"mixer_cache", "0 slots"});
  EXPECT_EQ(cache.step(slot_rows({}), x.slice(0, 0, 0), x.slice(0, 0, 0), x.slice(0, 0, 0)).size(0), 0);
  for (int64_t slot = 0; slot < 3; ++slot) EXPECT_EQ(cache.tokens(slot), 0);
}

TEST(Recurrent, BadInput) {
  Random random(5);
  const Tensor x = random.normal_tensor({1, 2, 8});
  const Tensor a = random.uniform_tensor({1, 2}, -1, 0);
  const SlotRows first = slot_rows({0});
  MixerCache cache(mixer_spec("2mamba"), {1, 2, 2, 2, 8, 8});
  expect_error([&] { cache.step(first, x.slice(1, 0, 1), x, x, a); },
               {"mixer_cache.step", "\"q\"", "[1, 1, 8]", "[1, 2, 8]"});
  expect_error([&] { cache.step(first, x, x, x); }, {"\"log_decay\"", "missing"});
  expect_error(
      [&] {
        cache.step(first, x, x, x, random.uniform_tensor({1, 2}, 1, 2));
      },
      {"\"log_decay\"", "at most 0"});
  expect_error([] { MixerCache(mixer_spec("2mamba"), {1, 2, 2, 2, 4, 8}); }, {"4", "8 to 256"});
  expect_error([] { MixerCache(mixer_spec("2mamba"), {1, 4, 3, 4, 8, 8}); }, {"3 heads", "divisor of 4"});
  expect_error(
      [] {
        MixerCache({Score::power, true, Norm::sum, 0, 2}, {1, 2, 2, 2, 8, 8});
      },
      {"mixer_cache", "\"degree\"", "expected 3 to 4"});
  EXPECT_EQ(cache.tokens(0), 0);
  MixerCache grows({Score::squared, true, Norm::sum, 0, 0, true}, {1, 2, 2, 2, 8, 8});
  ASSERT_NO_THROW(grows.step(first, x, x, x, random.uniform_tensor({1, 2}, 1, 2)));
  const float infinity = std::numeric_limits<float>::infinity();
  expect_error(
      [&] {
        grows.step(first, x, x, x, tensor_of({1, infinity}, {1, 2}));
      },
      {"\"log_decay\"", "inf", "finite values"});
  EXPECT_EQ(grows.tokens(0), 1);
}

}  // namespace
}  // namespace furious
