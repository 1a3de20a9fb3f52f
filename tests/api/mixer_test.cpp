// The public mixer against the engine's double-precision oracle.
#include "furious/mixer.h"

#include <malloc.h>

#include <cstring>
#include <thread>

#include "api/convert.h"
#include "api/convert_mixer.h"
#include "base/parallel.h"
#include "ops/mixer/cost.h"
#include "ops/mixer/mixer_case.h"
#include "tensor/arena.h"

namespace furious {
namespace {

using namespace furious::testing;
using ops::external;
using ops::internal;

// A tensor of the caller: every dimension with gaps, the last one too where `inner` is not 1.
ops::Tensor with_gaps(const Shape& shape, DType dtype = DType::f32, int64_t inner = 1) {
  std::vector<int64_t> strides(shape.rank());
  int64_t next = inner;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = next;
    next = next * shape[i] + 3;
  }
  auto memory = std::make_shared<std::vector<double>>(next + 1);
  return ops::Tensor::view(memory->data(), {shape.begin(), shape.end()}, external(dtype), {}, strides, memory);
}

ops::MixerInputs public_inputs(const MixerInputs& in) {
  return {external(in.q), external(in.k), external(in.v), external(in.log_decay), external(in.initial_state), {}};
}

MixerRun internal(const ops::MixerResult& result, const ops::MixerGradients& gradients) {
  MixerRun run;
  run.result.out = internal(result.out);
  run.result.final_state = internal(result.final_state);
  run.gradients = {internal(gradients.q), internal(gradients.k), internal(gradients.v), internal(gradients.log_decay),
                   internal(gradients.initial_state)};
  return run;
}

MixerRun run_public(const MixerCase& c, const std::vector<int64_t>& cu_seqlens, ops::MixerOptions options,
                    const ops::MixerResult& into = {}, const ops::MixerGradients& gradients_into = {}) {
  ops::MixerInputs inputs = public_inputs(c.inputs);
  inputs.cu_seqlens = cu_seqlens;
  const ops::MixerSpec spec = external(c.spec);
  const ops::MixerResult result = ops::mixer_forward(spec, inputs, options, into);
  const ops::MixerGradients gradients = ops::mixer_backward(spec, inputs, result, external(c.out_gradient),
                                                            external(c.final_state_gradient), options, gradients_into);
  return internal(result, gradients);
}

TEST(PublicMixer, AgreesWithTheOracleInNewMemoryAndInThatOfTheCaller) {
  Random random(1);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = random_case(random, spec, {.longest = 50, .largest_dim = 16, .boundaries = false});
    SCOPED_TRACE(describe(c));
    const ops::MixerOptions options{.final_state = has_state(c)};
    const MixerRun expected = run_oracle(c), actual = run_public(c, {}, options);
    expect_close(actual, expected, 1e-4);

    const Shape rows{c.inputs.q.size(0), c.heads, c.inputs.q.size(1)};
    ops::MixerResult into{.out = with_gaps(actual.result.out.shape(), DType::f32, random.integer(1, 2))};
    if (spec.norm == Norm::sum) into.normalizer = with_gaps(rows);
    if (has_state(c)) into.final_state = with_gaps(actual.result.final_state.shape());
    ops::MixerGradients gradients{with_gaps(c.inputs.q.shape(), DType::f32, random.integer(1, 2)),
                                  with_gaps(c.inputs.k.shape()), with_gaps(c.inputs.v.shape())};
    if (spec.decay) gradients.log_decay = with_gaps(c.inputs.log_decay.shape());
    if (c.inputs.initial_state) gradients.initial_state = with_gaps(c.inputs.initial_state.shape());
    const MixerRun written = run_public(c, {}, options, into, gradients);
    EXPECT_EQ(written.result.out.raw(), into.out.raw());
    EXPECT_EQ(written.gradients.q.raw(), gradients.q.raw());
    expect_close(written, actual, 0);  // the same bits
  }
}

TEST(PublicMixer, AcceptsEveryDtypeOfTheCpu) {
  Random random(2);
  for (const auto& [dtype, form, tolerance] : {std::tuple{DType::bf16, ops::Form::chunked, 2e-2},
                                               {DType::f16, ops::Form::parallel, 3e-3},
                                               {DType::f64, ops::Form::reference, 1e-12}}) {
    const MixerCase c = random_case(random, mixer_spec("2mamba"), {.largest_dim = 16, .boundaries = false});
    const MixerCase own = cast(c, dtype);
    const MixerRun actual = run_public(own, {}, {.form = form, .final_state = true});
    EXPECT_EQ(actual.result.out.dtype(), dtype);
    expect_close(actual, run_oracle(cast(own, DType::f32)), tolerance);
  }
}

// The oracle for packed sequences: each by itself.
MixerRun run_sequences(const MixerCase& c, const std::vector<int64_t>& starts) {
  const MixerCase whole = cast(c, DType::f64);
  MixerRun all;
  all.result.out = Tensor::empty(whole.out_gradient.shape(), DType::f64);
  if (whole.final_state_gradient) all.result.final_state = Tensor::empty_like(whole.final_state_gradient);
  const auto like = [](const Tensor& x) { return x ? Tensor::empty_like(x) : x; };
  all.gradients = {like(whole.inputs.q), like(whole.inputs.k), like(whole.inputs.v), like(whole.inputs.log_decay),
                   like(whole.inputs.initial_state)};
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    const auto tokens = [&](const Tensor& x) { return x ? x.slice(1, starts[i], starts[i + 1] - starts[i]) : x; };
    const auto state = [&](const Tensor& x) { return x ? x.slice(0, static_cast<int64_t>(i), 1) : x; };
    MixerCase one = whole;
    one.inputs = {tokens(whole.inputs.q),
                  tokens(whole.inputs.k),
                  tokens(whole.inputs.v),
                  tokens(whole.inputs.log_decay),
                  {},
                  state(whole.inputs.initial_state)};
    one.out_gradient = tokens(whole.out_gradient);
    one.final_state_gradient = state(whole.final_state_gradient);
    const MixerRun part = run(one, {Form::reference});
    const auto put = [](const Tensor& to, const Tensor& from) {
      if (to) copy(to, from);
    };
    put(tokens(all.result.out), part.result.out);
    put(state(all.result.final_state), part.result.final_state);
    put(tokens(all.gradients.q), part.gradients.q);
    put(tokens(all.gradients.k), part.gradients.k);
    put(tokens(all.gradients.v), part.gradients.v);
    put(tokens(all.gradients.log_decay), part.gradients.log_decay);
    put(state(all.gradients.initial_state), part.gradients.initial_state);
  }
  return all;
}

TEST(PublicMixer, PackedSequencesWithAndWithoutStates) {
  Random random(3);
  for (const std::vector<int64_t>& starts :
       {std::vector<int64_t>{0, 40}, {0, 13, 26, 39}, {0, 1, 2, 9, 16, 40, 41}, {0, 20, 27}}) {
    for (const MixerSpec& spec : all_specs()) {
      MixerCase c = random_case(random, spec,
                                {.shortest = starts.back(),
                                 .longest = starts.back(),
                                 .largest_dim = 12,
                                 .states = false,
                                 .boundaries = false});
      const auto first_row = [](Tensor& x) {
        if (x) x = x.slice(0, 0, 1);
      };
      for (Tensor* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.inputs.log_decay, &c.out_gradient}) first_row(*x);
      const int64_t rows = state_rows(spec, c.inputs.q.size(3)), columns = state_columns(spec, c.inputs.v.size(3));
      const auto sequences = static_cast<int64_t>(starts.size()) - 1;
      for (const bool states : {false, true}) {
        if (states && rows == 0) continue;
        SCOPED_TRACE(describe(c) + (states ? ", states" : ""));
        c.inputs.initial_state = c.final_state_gradient = {};
        if (states) {
          c.inputs.initial_state = random.uniform_tensor({sequences, c.heads, rows, columns}, 0.5, 1);
          c.final_state_gradient = random.normal_tensor({sequences, c.heads, rows, columns}, 0.1);
        }
        const MixerRun expected = run_sequences(c, starts);
        MixerRun actual = run_public(c, starts, {.final_state = states});
        if (!states) actual.result.final_state = expected.result.final_state;
        expect_close(actual, expected, 1e-4);
      }
    }
  }
}

TEST(PublicMixer, StepByStepIsTheForwardPass) {
  Random random(4);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c =
        random_case(random, spec,
                    {.longest = 20, .largest_dim = 12, .states = false, .final_gradient = false, .boundaries = false});
    if (!has_state(c)) continue;
    SCOPED_TRACE(describe(c));
    const ops::MixerResult whole =
        ops::mixer_forward(external(spec), public_inputs(c.inputs), {.form = ops::Form::chunked, .final_state = true});
    const int64_t batch = c.inputs.q.size(0), length = c.inputs.q.size(1);
    const ops::Tensor state = random.coin() ? with_gaps(internal(whole.final_state).shape())
                                            : ops::Tensor::zeros(whole.final_state.shape(), ops::DType::f32);
    const Tensor out = Tensor::empty({batch, length, c.heads, c.inputs.v.size(3)}, DType::f32);
    for (int64_t t = 0; t < length; ++t) {
      const auto token = [&](const Tensor& x) { return external(x ? x.select(1, t) : x); };
      const bool given = random.coin();
      const ops::Tensor step = ops::mixer_step(external(spec), token(c.inputs.q), token(c.inputs.k), token(c.inputs.v),
                                               token(c.inputs.log_decay), state, given ? token(out) : ops::Tensor());
      if (!given) copy(out.select(1, t), internal(step));
    }
    EXPECT_LE(relative_error(out, internal(whole.out), 0.1), 1e-4);
    EXPECT_LE(relative_error(internal(state), internal(whole.final_state), 0.1), 1e-4);
  }
}

TEST(PublicMixer, CacheContinuesLikeTheForwardPass) {
  Random random(6);
  bool folded = false, grew = false;
  for (const MixerSpec& spec : every_spec()) {
    if (spec.degree > 2) continue;  // larger states fold later
    const MixerCase c = random_case(
        random, spec,
        {.shortest = 170, .longest = 190, .dim = 8, .states = false, .final_gradient = false, .boundaries = false});
    SCOPED_TRACE(describe(c));
    const int64_t batch = c.inputs.q.size(0), length = c.inputs.q.size(1), read = random.integer(1, 120);
    MixerInputs inputs = c.inputs;  // queries and keys of the cache have the same heads
    if (c.heads % inputs.k.size(2) != 0 || inputs.v.size(2) % inputs.k.size(2) != 0) inputs.k = inputs.k.slice(2, 0, 1);
    inputs.q = inputs.k;
    const int64_t heads = std::max(inputs.v.size(2), inputs.k.size(2));
    if (inputs.log_decay) inputs.log_decay = inputs.log_decay.slice(2, 0, heads);
    ops::MixerCache cache(
        external(spec),
        {.batch = batch, .heads = inputs.v.size(2), .qk_heads = inputs.k.size(2), .qk_dim = 8, .v_dim = 8});
    const ops::MixerResult whole = ops::mixer_forward(external(spec), public_inputs(inputs));
    const Tensor out = Tensor::empty({batch, length, heads, 8}, DType::f32);
    const auto first = [&](const Tensor& x) { return x ? x.slice(1, 0, read) : x; };
    cache.prefill(public_inputs({first(inputs.q), first(inputs.k), first(inputs.v), first(inputs.log_decay), {}, {}}),
                  external(first(out)));
    int64_t bytes = cache.bytes();
    for (int64_t t = read; t < length; ++t) {
      const auto token = [&](const Tensor& x) { return external(x ? x.select(1, t) : x); };
      const bool given = random.coin();
      const ops::Tensor step = cache.step(token(inputs.q), token(inputs.k), token(inputs.v), token(inputs.log_decay),
                                          given ? token(out) : ops::Tensor());
      if (!given) copy(out.select(1, t), internal(step));
      grew = grew || cache.bytes() > bytes;
      folded = folded || cache.bytes() < bytes;
      bytes = cache.bytes();
    }
    EXPECT_EQ(cache.tokens(), length);
    EXPECT_LE(relative_error(out, internal(whole.out), 0.1), 1e-4);
    if (!has_state(spec, 8)) {
      expect_error([&] { (void)cache.state(); }, {"mixer_cache", "no state"});
    } else {
      const ops::MixerResult end = ops::mixer_forward(external(spec), public_inputs(inputs), {.final_state = true});
      EXPECT_LE(relative_error(internal(cache.state()), internal(end.final_state), 0.1), 1e-4);
    }
    cache.clear();
    EXPECT_EQ(cache.tokens(), 0);
  }
  EXPECT_TRUE(grew);    // as a KV cache does
  EXPECT_TRUE(folded);  // into a state
}

TEST(PublicMixer, BadCaches) {
  const ops::MixerSizes sizes{.batch = 2, .heads = 2, .qk_dim = 8, .v_dim = 8};
  const auto zeros = [](const std::vector<int64_t>& shape) { return ops::Tensor::zeros(shape, ops::DType::f32); };
  const ops::Tensor q = zeros({2, 1, 8}), v = zeros({2, 2, 8}), a = zeros({2, 2});
  ops::MixerCache cache({}, sizes);
  expect_error([&] { cache.step({}, q, v, a); }, {"mixer_cache", "\"q\"", "missing"});
  expect_error([&] { cache.step(q, q, {}, a); }, {"mixer_cache", "\"v\"", "missing"});
  expect_error([&] { cache.step(q, q, v); }, {"mixer_cache", "log_decay"});
  expect_error([&] { cache.step(q, v, v, a); }, {"mixer_cache", "\"k\"", "[2, 2, 8]"});
  expect_error([&] { cache.step(q, q, v, a, zeros({2, 2, 9})); }, {"mixer_cache", "\"out\"", "[2, 2, 9]"});
  expect_error([&] { cache.prefill({}); }, {"mixer_cache", "\"q\"", "missing"});
  expect_error(
      [&] {
        cache.prefill({zeros({1, 3, 1, 8}), zeros({1, 3, 1, 8}), zeros({1, 3, 2, 8}), zeros({1, 3, 2})});
      },
      {"mixer_cache", "[1, 3, 1, 8]", "[2, 3, 1, 8]"});
  const ops::Tensor decay = zeros({2, 3, 2});
  decay.data<float>()[11] = 1;  // of the second sequence
  expect_error(
      [&] {
        cache.prefill({zeros({2, 3, 1, 8}), zeros({2, 3, 1, 8}), zeros({2, 3, 2, 8}), decay});
      },
      {"mixer_cache", "log_decay"});
  EXPECT_EQ(cache.tokens(), 0);
  cache.step(q, q, v, a);
  EXPECT_EQ(cache.tokens(), 1);
  const ops::MixerCache moved = std::move(cache);
  EXPECT_EQ(moved.tokens(), 1);
  expect_error([&] { (void)cache.tokens(); }, {"mixer_cache", "moved"});  // NOLINT(bugprone-use-after-move)
  expect_error([&] { cache.step(q, q, v, a); }, {"mixer_cache", "moved"});
  expect_error([&] { const ops::MixerCache bad({}, {.batch = 0, .qk_dim = 8, .v_dim = 8}); }, {"batch of 0"});
  expect_error([&] { const ops::MixerCache bad({}, {.qk_dim = 7, .v_dim = 8}); }, {"mixer_cache", "7"});
  expect_error([&] { const ops::MixerCache bad({.degree = 5}, sizes); }, {"degree"});
}

struct Small {
  ops::MixerInputs inputs;
  ops::MixerResult result;
  ops::Tensor gradient = ops::Tensor::zeros({2, 5, 2, 8}, ops::DType::f32);

  Small() {
    const auto zeros = [](const std::vector<int64_t>& shape) { return ops::Tensor::zeros(shape, ops::DType::f32); };
    inputs = {zeros({2, 5, 1, 8}), zeros({2, 5, 1, 8}), zeros({2, 5, 2, 8}), zeros({2, 5, 2})};
    result = ops::mixer_forward({}, inputs, {.final_state = true});
  }
};

ops::Tensor zeros(const std::vector<int64_t>& shape, ops::DType dtype = ops::DType::f32) {
  return ops::Tensor::zeros(shape, dtype);
}

void refuse_forward(const std::function<void(ops::MixerSpec&, ops::MixerInputs&, ops::MixerOptions&)>& change,
                    const std::vector<std::string>& words) {
  Small small;
  ops::MixerSpec spec;
  ops::MixerOptions options;
  change(spec, small.inputs, options);
  expect_error([&] { ops::mixer_forward(spec, small.inputs, options); }, words);
  expect_error([&] { ops::mixer_backward(spec, small.inputs, small.result, small.gradient, {}, options); },
               {"mixer_backward"});
}

TEST(PublicMixer, BadInputs) {
  using Spec = ops::MixerSpec&;
  using In = ops::MixerInputs&;
  using Options = ops::MixerOptions&;
  refuse_forward([](Spec, In in, Options) { in.q = {}; }, {"mixer_forward", "\"q\"", "missing"});
  refuse_forward([](Spec, In in, Options) { const ops::Tensor gone = std::move(in.v); }, {"\"v\"", "missing"});
  refuse_forward([](Spec, In in, Options) { in.log_decay = {}; }, {"log_decay", "missing"});
  refuse_forward([](Spec spec, In, Options) { spec.decay = false; }, {"log_decay", "no decay"});
  refuse_forward([](Spec, In in, Options) { in.q = zeros({2, 5, 8}); }, {"\"q\"", "rank 3"});
  refuse_forward([](Spec, In in, Options) { in.q = zeros({2, 5, 1, 8}, ops::DType::i32); }, {"\"q\"", "i32", "f32"});
  refuse_forward([](Spec, In in, Options) { in.k = zeros({2, 5, 1, 8}, ops::DType::bf16); }, {"\"k\"", "bf16", "f32"});
  refuse_forward([](Spec, In in, Options) { in.k = zeros({2, 6, 1, 8}); }, {"\"k\"", "[2, 6, 1, 8]"});
  refuse_forward([](Spec, In in, Options) { in.v = zeros({2, 5, 2, 7}); }, {"\"v\"", "dimension 7"});
  refuse_forward([](Spec, In in, Options) { in.q = zeros({2, 5, 3, 8}); }, {"heads"});
  refuse_forward([](Spec, In in, Options) { in.q = with_gaps({2, 5, 1, 8}, DType::f32, 2); }, {"\"q\"", "stride 2"});
  refuse_forward([](Spec, In in, Options) { in.log_decay = zeros({2, 5, 3}); }, {"log_decay", "[2, 5, 3]"});
  refuse_forward([](Spec, In in, Options) { in.log_decay.data<float>()[3] = 1; }, {"log_decay", "at most 0"});
  refuse_forward(
      [](Spec, In in, Options) {
        in.initial_state = zeros({1, 2, 36, 9});
      },
      {"initial_state", "[1, 2, 36, 9]", "[2, 2, 36, 9]"});
  refuse_forward([](Spec, In in, Options) { in.cu_seqlens = {0, 5}; }, {"cu_seqlens", "batch of 2"});
  refuse_forward([](Spec spec, In, Options) { spec.scale = -1; }, {"scale"});
  refuse_forward([](Spec spec, In, Options) { spec.degree = 2; }, {"degree"});
  refuse_forward([](Spec spec, In, Options) { spec.score = static_cast<ops::Score>(9); }, {"score", "9"});
  refuse_forward([](Spec, In, Options options) { options.form = static_cast<ops::Form>(9); }, {"form", "9"});
  refuse_forward([](Spec, In, Options options) { options.chunk = -1; }, {"chunk", "-1"});
  refuse_forward([](Spec, In, Options options) { options.precision = ops::Precision::bf16; }, {"precision", "CPU"});
  const Small small;
  expect_error([&] { ops::mixer_forward({.score = ops::Score::exponential}, small.inputs, {.final_state = true}); },
               {"final_state", "no state"});
  expect_error([] { ops::mixer_spec("2mamab"); }, {"2mamab", "2mamba"});
  expect_error([] { ops::score_from_name("square"); }, {"square", "squared"});
  expect_error([] { ops::norm_from_name("max"); }, {"max", "sum"});
  expect_error([] { ops::form_from_name("chunk"); }, {"chunk", "chunked"});
  expect_error([] { ops::precision_from_name("tf23"); }, {"tf23", "tf32"});
  expect_error([] { (void)ops::state_rows({}, 1000); }, {"1000"});
}

TEST(PublicMixer, BadPackedSequences) {
  for (const auto& [starts, words] : std::vector<std::pair<std::vector<int64_t>, std::vector<std::string>>>{
           {{0}, {"cu_seqlens", "1 numbers"}},
           {{0, 4}, {"cu_seqlens", "length 5"}},
           {{1, 5}, {"cu_seqlens", "from 0"}},
           {{0, 3, 3, 5}, {"cu_seqlens", "3 at position 2"}},
           {{0, 4, 3, 5}, {"cu_seqlens", "3 at position 2"}},
           {{0, 2, 5}, {"initial_state", "[1, 1, 36, 9]", "[2, 1, 36, 9]"}}}) {
    const ops::MixerInputs inputs{zeros({1, 5, 1, 8}), zeros({1, 5, 1, 8}),  zeros({1, 5, 1, 8}),
                                  zeros({1, 5, 1}),    zeros({1, 1, 36, 9}), starts};
    expect_error([&] { ops::mixer_forward({}, inputs); }, words);
  }
}

TEST(PublicMixer, BadResultsAndGradients) {
  const Small small;
  const auto into = [&](const ops::MixerResult& memory, const std::vector<std::string>& words) {
    expect_error([&] { ops::mixer_forward({}, small.inputs, {.final_state = true}, memory); }, words);
  };
  into({.out = zeros({2, 5, 1, 8})}, {"into.out", "[2, 5, 1, 8]"});
  into({.out = zeros({2, 5, 2, 8}, ops::DType::f64)}, {"into.out", "f64"});
  into({.normalizer = zeros({2, 5, 2})}, {"into.normalizer", "[2, 2, 5]"});
  into({.final_state = zeros({2, 2, 36, 8})}, {"into.final_state", "[2, 2, 36, 9]"});
  std::vector<float> memory(100);
  into({.out = ops::Tensor::view(memory.data(), {2, 5, 2, 8}, ops::DType::f32, {}, {0, 16, 8, 1})},
       {"into.out", "stride 0 in dimension 0"});
  const auto backward = [&](const ops::MixerResult& result, const ops::Tensor& gradient, const ops::Tensor& state,
                            const ops::MixerGradients& gradients, const std::vector<std::string>& words) {
    expect_error([&] { ops::mixer_backward({}, small.inputs, result, gradient, state, {}, gradients); }, words);
  };
  ops::MixerResult result = small.result;
  backward({}, small.gradient, {}, {}, {"result.out", "missing"});
  result.normalizer = {};
  backward(result, small.gradient, {}, {}, {"result.normalizer", "missing"});
  result = small.result;
  result.final_state = {};
  backward(result, small.gradient, zeros({2, 2, 36, 9}), {}, {"result.final_state", "missing"});
  backward(small.result, {}, {}, {}, {"out_gradient", "missing"});
  backward(small.result, zeros({2, 5, 2, 9}), {}, {}, {"out_gradient", "[2, 5, 2, 9]"});
  backward(small.result, small.gradient, {}, {.q = zeros({2, 5, 2, 8})}, {"into.q", "[2, 5, 2, 8]"});
  backward(small.result, small.gradient, {}, {.log_decay = zeros({2, 5, 2}, ops::DType::f64)}, {"into.log_decay"});
}

TEST(PublicMixer, BadSteps) {
  const ops::Tensor q = zeros({2, 1, 8}), v = zeros({2, 2, 8}), a = zeros({2, 2}), state = zeros({2, 2, 36, 9});
  expect_error([&] { ops::mixer_step({}, q, q, v, a, {}); }, {"mixer_step", "state", "missing"});
  expect_error([&] { ops::mixer_step({}, q, q, v, {}, state); }, {"mixer_step", "log_decay"});
  expect_error([&] { ops::mixer_step({}, q, q, v, a, zeros({2, 2, 36, 8})); }, {"state", "[2, 2, 36, 9]"});
  expect_error([&] { ops::mixer_step({}, q, q, v, a, zeros({2, 2, 36, 9}, ops::DType::bf16)); }, {"state", "bf16"});
  expect_error([&] { ops::mixer_step({}, zeros({2, 8}), q, v, a, state); }, {"\"q\"", "rank 2"});
  expect_error([&] { ops::mixer_step({}, q, q, v, a, state, zeros({2, 2, 9})); }, {"\"out\"", "[2, 1, 2, 9]"});
  expect_error([&] { ops::mixer_step({.score = ops::Score::exponential}, q, q, v, a, state); }, {"no state"});
}

TEST(PublicMixer, CostsAreThoseOfTheCall) {
  for (const ops::Score score : {ops::Score::linear, ops::Score::squared, ops::Score::exponential})
    for (const int64_t length : {40, 700, 5000}) {
      const ops::MixerSpec spec{.score = score, .decay = false};
      const ops::MixerSizes sizes{.length = length, .heads = 2, .qk_dim = 16, .v_dim = 8};
      const ops::MixerOptions options{.final_state = score != ops::Score::exponential && length < 100};
      const ops::MixerCost cost = ops::mixer_cost(spec, sizes, options);
      const ops::MixerResult result = ops::mixer_forward(
          spec, {zeros({1, length, 1, 16}), zeros({1, length, 1, 16}), zeros({1, length, 2, 8})}, options);
      EXPECT_EQ(cost.form, result.form);
      int64_t bytes = 0;
      for (const ops::Tensor& x : {result.out, result.normalizer, result.maximum, result.final_state})
        if (x) bytes += x.bytes();
      EXPECT_EQ(cost.output_bytes, bytes);
      if (options.final_state) {
        EXPECT_EQ(cost.state_bytes, result.final_state.bytes());
      }
      if (score == ops::Score::exponential) {
        EXPECT_EQ(cost.state_bytes, 0);
      }
      if (cost.form == ops::Form::parallel) {
        EXPECT_EQ(cost.chunk, length);
        EXPECT_EQ(cost.forward_flops, static_cast<double>(length) * static_cast<double>(length + 1) * 2 * (16 + 8));
      } else {
        EXPECT_LT(cost.forward_flops, static_cast<double>(length) * static_cast<double>(length + 1) * 2 * (16 + 8));
      }
      EXPECT_GT(cost.backward_flops, 2 * cost.forward_flops);
    }
  const ops::MixerSizes packed{.length = 40, .qk_dim = 8, .v_dim = 8, .cu_seqlens = {0, 10, 40}};
  const ops::MixerCost cost = ops::mixer_cost({}, packed, {.form = ops::Form::parallel, .final_state = true});
  EXPECT_EQ(cost.forward_flops, (10 * 11 + 30 * 31) / 2 * 4 * 8);
  EXPECT_EQ(cost.state_bytes, 2 * 36 * 9 * 4);
  expect_error([] { ops::mixer_cost({}, {.length = 0, .qk_dim = 8, .v_dim = 8}); }, {"mixer_cost"});
  expect_error([] { ops::mixer_cost({}, {.length = 8, .qk_dim = 7, .v_dim = 8}); }, {"mixer_cost", "dimension 7"});
  expect_error(
      [] {
        ops::mixer_cost({.score = ops::Score::exponential}, {.length = 8, .qk_dim = 8, .v_dim = 8},
                        {.final_state = true});
      },
      {"mixer_cost", "no state"});
}

TEST(PublicMixer, ScratchIsWhatACallTakes) {
  const ops::MixerSizes sizes{.length = 300, .heads = 3, .qk_dim = 16, .v_dim = 8};
  const ThreadLimit limit(1);
  const ops::MixerScratch scratch = ops::mixer_scratch({}, sizes, {.form = ops::Form::chunked, .chunk = 64});
  EXPECT_GT(scratch.backward_bytes, scratch.forward_bytes);
  const ops::MixerInputs inputs{zeros({1, 300, 1, 16}), zeros({1, 300, 1, 16}), zeros({1, 300, 3, 8}),
                                zeros({1, 300, 3})};
  const ops::MixerOptions options{.form = ops::Form::chunked, .chunk = 64};
  const ops::MixerResult result = ops::mixer_forward({}, inputs, options);
  Arena& arena = Arena::of({});
  arena.reset_peak();
  const size_t before = arena.usage().live;
  ops::mixer_forward({}, inputs, options, result);
  EXPECT_EQ(scratch.forward_bytes, static_cast<int64_t>(arena.usage().peak - before));
  EXPECT_EQ(arena.usage().live, before);
}

TEST(PublicMixer, ThousandCallsLeaveNothingBehind) {
  const auto calls = [](int count) {
    for (int i = 0; i < count; ++i) {
      const Small small;
      ops::mixer_backward({}, small.inputs, small.result, small.gradient);
      DLManagedTensor* const exported = small.result.out.to_dlpack();
      EXPECT_TRUE(ops::Tensor::from_dlpack(exported).defined());
      try {
        ops::mixer_forward({}, {small.inputs.q, small.inputs.k, {}, {}});
        ADD_FAILURE();
      } catch (const Error&) {
      }
    }
  };
  calls(10);
  const size_t live = Arena::of({}).usage().live;
  const size_t reserved = Arena::of({}).usage().reserved;
  const size_t heap = ::mallinfo2().uordblks;
  calls(1000);
  EXPECT_EQ(Arena::of({}).usage().live, live);
  EXPECT_EQ(Arena::of({}).usage().reserved, reserved);
  EXPECT_LT(::mallinfo2().uordblks, heap + 16000);  // less than 16 bytes in a call
}

TEST(PublicMixer, ThreadsComputeTheSameBits) {
  Random random(5);
  const MixerCase c = random_case(random, mixer_spec("2mamba"), {.shortest = 60, .boundaries = false});
  const MixerRun expected = run_public(c, {}, {.final_state = true});
  std::vector<MixerRun> runs(4);
  std::vector<std::thread> workers;
  for (MixerRun& own : runs) workers.emplace_back([&] { own = run_public(c, {}, {.final_state = true}); });
  for (std::thread& worker : workers) worker.join();
  for (const MixerRun& own : runs) expect_close(own, expected, 0);
}

}  // namespace
}  // namespace furious
