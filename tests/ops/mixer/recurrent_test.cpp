#include "ops/mixer/recurrent.h"

#include "ops/mixer/mixer_case.h"
#include "support.h"

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

Tensor step(MixerCache& cache, const MixerInputs& in, int64_t t) {
  return cache.step(in.q.select(1, t), in.k.select(1, t), in.v.select(1, t),
                    in.log_decay ? to_dtype(in.log_decay.select(1, t), DType::f32) : Tensor());
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
    EXPECT_EQ(cache.tokens(), c.inputs.q.size(1));
  }
}

TEST(Recurrent, GoesOnFromItsContentsToTheBit) {
  Random random(9);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = random_case(random, spec, plain(300));
    SCOPED_TRACE(describe(c));
    MixerCache cache = cache_for(c);
    for (int64_t t = 0; t < c.inputs.q.size(1); ++t) {
      MixerCache again(spec, sizes_of(c.inputs), cache.contents());
      ASSERT_TRUE(same_bits(step(cache, c.inputs, t), step(again, c.inputs, t))) << "token " << t;
      ASSERT_EQ(again.tokens(), cache.tokens());
    }
  }
}

TEST(Recurrent, RefusesContentsOfAnotherCache) {
  const MixerSpec spec{Score::squared, true, Norm::sum};
  const MixerCache::Sizes sizes{2, 3, 3, 3, 8, 8};
  MixerCache cache(spec, sizes);
  const Tensor x = Tensor::zeros({2, 3, 8}, DType::f32), decay = Tensor::zeros({2, 3}, DType::f32);
  for (int64_t t = 0; t <= cache.first_fold(); ++t) cache.step(x, x, x, decay);
  const auto refused = [&](auto&& change, const std::string& part) {
    MixerContents contents = cache.contents();
    change(contents);
    expect_error([&] { MixerCache(spec, sizes, contents); }, {"mixer_cache", part});
  };
  ASSERT_TRUE(cache.contents().state);
  refused([](MixerContents& c) { c.pending = -1; }, "-1 tokens");
  refused([&](MixerContents& c) { c.pending = cache.window() + 1; }, "in the window");
  refused([](MixerContents& c) { c.tokens = 0; }, "of 0 in the window");
  refused([](MixerContents& c) { c.state = {}; }, "in the window");
  refused([](MixerContents& c) { c.state = c.k; }, "state");
  refused([](MixerContents& c) { c.k = {}; }, "k");
  refused([](MixerContents& c) { c.v = c.v.slice(1, 0, 1); }, "v");
  refused([](MixerContents& c) { c.log_decay = {}; }, "log_decay");
  const MixerContents contents = cache.contents();
  expect_error([&] { MixerCache({Score::squared, false, Norm::sum}, sizes, contents); }, {"decay"});
  expect_error([&] { MixerCache({Score::exponential, true, Norm::sum}, sizes, contents); }, {"exponential"});
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
        MixerInputs part = c.inputs;
        for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
          if (part.*x) part.*x = (part.*x).slice(1, begin, count);
        EXPECT_LE(relative_error(cache.prefill(part), expected.slice(1, begin, count), 0.1), kTolerance);
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
    EXPECT_FALSE(cache.has_folded());
    EXPECT_EQ(cache.first_fold(), 0);
  }
}

TEST(Recurrent, StateIsTheStateOfTheForwardPass) {
  Random random(3);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = random_case(random, spec, plain(200));
    MixerCache cache = cache_for(c);
    if (!has_state(c)) {
      expect_error([&] { cache.state(); }, {"mixer_cache.state", to_string(spec)});
      continue;
    }
    for (int64_t t = 0; t < c.inputs.q.size(1); ++t) step(cache, c.inputs, t);
    const Tensor expected = mixer_forward(spec, c.inputs, {Form::parallel, 0, true}).final_state;
    EXPECT_LE(relative_error(cache.state(), expected, 0.1), kTolerance);
  }
}

TEST(Recurrent, NeverTakesMoreThanAKeyValueCacheNorThanTheState) {
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
      cache.step(x, x, x, a);
      key_value.step(x, x, x, a);
      ASSERT_LE(cache.bytes(), key_value.bytes()) << name << ", token " << t;
      if (has_state(spec, 16) && t > cache.first_fold()) {
        // Two windows of tokens at most, and the padding of the packed state.
        ASSERT_LE(cache.bytes(), state + state / 2 + 2 * page + 8 * 256 * 4) << name << ", token " << t;
      }
    }
    EXPECT_EQ(key_value.bytes(), (400 + 31) / 32 * page);
  }
}

TEST(Recurrent, ReadInPiecesStaysAKeyValueCache) {
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
  cache.prefill(piece());
  const int64_t page = cache.bytes();
  for (int i = 0; i < 3; ++i) cache.prefill(piece());
  EXPECT_EQ(cache.bytes(), page);  // 32 tokens
  cache.state();
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
        ASSERT_TRUE(all_finite(cache.step(x, x, x, spec.decay ? a : Tensor()))) << to_string(spec) << ", token " << t;
    }
  }
}

TEST(Recurrent, BadInput) {
  Random random(5);
  const Tensor x = random.normal_tensor({1, 2, 8});
  const Tensor a = random.uniform_tensor({1, 2}, -1, 0);
  MixerCache cache(mixer_spec("2mamba"), {1, 2, 2, 2, 8, 8});
  expect_error([&] { cache.step(x.slice(1, 0, 1), x, x, a); }, {"mixer_cache.step", "\"q\"", "[1, 1, 8]", "[1, 2, 8]"});
  expect_error([&] { cache.step(x, x, x); }, {"\"log_decay\"", "missing"});
  expect_error([&] { cache.step(x, x, x, random.uniform_tensor({1, 2}, 1, 2)); }, {"\"log_decay\"", "at most 0"});
  expect_error([] { MixerCache(mixer_spec("2mamba"), {1, 2, 2, 2, 4, 8}); }, {"4", "8 to 256"});
  expect_error([] { MixerCache(mixer_spec("2mamba"), {1, 4, 3, 4, 8, 8}); }, {"3 heads", "divisor of 4"});
  expect_error(
      [] {
        MixerCache({Score::power, true, Norm::sum, 0, 2}, {1, 2, 2, 2, 8, 8});
      },
      {"mixer_cache", "\"degree\"", "expected 3 to 4"});
  EXPECT_EQ(cache.tokens(), 0);
  MixerCache grows({Score::squared, true, Norm::sum, 0, 0, true}, {1, 2, 2, 2, 8, 8});
  ASSERT_NO_THROW(grows.step(x, x, x, random.uniform_tensor({1, 2}, 1, 2)));
  const float infinity = std::numeric_limits<float>::infinity();
  expect_error(
      [&] {
        grows.step(x, x, x, tensor_of({1, infinity}, {1, 2}));
      },
      {"\"log_decay\"", "inf", "finite values"});
  EXPECT_EQ(grows.tokens(), 1);
}

}  // namespace
}  // namespace furious
