// Queries of the last tokens only: the rows of a call with all queries.
#include "cuda.h"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/mixer_case.h"
#include "ops/mixer/recurrent.h"

namespace furious {
namespace {

using namespace furious::testing;

CaseLimits plain(int64_t shortest, int64_t longest, int64_t dim = 0) {
  CaseLimits limits;
  limits.shortest = shortest;
  limits.longest = longest;
  limits.dim = dim;
  limits.states = limits.boundaries = limits.final_gradient = false;
  limits.strongest_decay = 0.3;
  return limits;
}

MixerInputs from_query(const MixerInputs& in, int64_t first) {
  MixerInputs rest = in;
  rest.first_query = first;
  rest.q = in.q.slice(1, first, in.q.size(1) - first);
  return rest;
}

Tensor on_cpu(const Tensor& x) {
  return x && !x.device().is_cpu() ? to_cpu(x) : x;
}

// Rows of the queries from `first` on, against those rows of a result for all queries.
void expect_rows(const MixerResult& actual, const MixerResult& all, int64_t first, double tolerance) {
  const int64_t count = all.out.size(1) - first;
  EXPECT_LE(relative_error(on_cpu(actual.out), on_cpu(all.out).slice(1, first, count)), tolerance) << "out";
  ASSERT_EQ(actual.normalizer.defined(), all.normalizer.defined());
  ASSERT_EQ(actual.maximum.defined(), all.maximum.defined());
  if (actual.maximum) {
    // n is relative to exp(maximum), and a kernel may use another maximum than the oracle.
    const std::vector<double> n = to_doubles(on_cpu(actual.normalizer)), m = to_doubles(on_cpu(actual.maximum)),
                              all_n = to_doubles(on_cpu(all.normalizer).slice(2, first, count)),
                              all_m = to_doubles(on_cpu(all.maximum).slice(2, first, count));
    ASSERT_EQ(n.size(), all_n.size());
    for (size_t i = 0; i < n.size(); ++i)
      ASSERT_NEAR(m[i] + std::log(n[i]), all_m[i] + std::log(all_n[i]), 10 * tolerance) << i;
  } else if (actual.normalizer) {
    EXPECT_LE(relative_error(on_cpu(actual.normalizer), on_cpu(all.normalizer).slice(2, first, count)), tolerance);
  }
}

// Blocks of 192 queries, tiles of 64 keys, strips of 6 rows: begins and ends in the middle of all of them.
TEST(MixerFirstQuery, RowsAreThoseOfTheOracle) {
  Random random(1);
  for (const MixerSpec& spec : every_spec()) {
    for (const MixerCase& c : {random_case(random, spec, plain(1, 40)), random_case(random, spec, plain(195, 260))}) {
      const MixerInputs exact = cast(c, DType::f64).inputs;
      const MixerResult all = mixer_forward(spec, exact, {Form::reference});
      const int64_t length = c.inputs.q.size(1);
      for (const int64_t first : {int64_t{0}, length / 2, length - 1, random.integer(0, length - 1)}) {
        SCOPED_TRACE(fmt::format("{}, from query {}", describe(c), first));
        const MixerResult oracle = mixer_forward(spec, from_query(exact, first), {Form::reference});
        EXPECT_TRUE(same_bits(oracle.out, to_dtype(all.out.slice(1, first, length - first), DType::f64)));
        const MixerResult result = mixer_forward(spec, from_query(c.inputs, first), {Form::parallel});
        EXPECT_EQ(result.form, Form::parallel);
        EXPECT_EQ(result.kernel, "cpu");
        expect_rows(result, all, first, 1e-4);
      }
    }
  }
}

// The CPU packs 512 keys at a time.
TEST(MixerFirstQuery, KeysInSections) {
  Random random(4);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = random_case(random, spec, plain(1023, 1100, 8));
    const MixerInputs exact = cast(c, DType::f64).inputs;
    const int64_t length = c.inputs.q.size(1), first = length - random.integer(1, 70);
    SCOPED_TRACE(fmt::format("{}, from query {}", describe(c), first));
    const MixerResult oracle = mixer_forward(spec, from_query(exact, first), {Form::reference});
    const MixerResult result = mixer_forward(spec, from_query(c.inputs, first), {Form::parallel});
    EXPECT_LE(relative_error(result.out, oracle.out), 1e-4);
  }
}

TEST(MixerFirstQuery, AutomaticIsParallelEvenWhereAllQueriesWouldBeChunked) {
  Random random(2);
  const MixerSpec spec = mixer_spec("mamba2");
  const MixerCase c = random_case(random, spec, plain(3000, 3000, 8));
  EXPECT_EQ(mixer_forward(spec, c.inputs).form, Form::chunked);
  EXPECT_EQ(mixer_forward(spec, from_query(c.inputs, 2900)).form, Form::parallel);
}

TEST(MixerFirstQuery, WhatItDoesNotGoWith) {
  Random random(3);
  const MixerSpec spec = mixer_spec("2mamba");
  const MixerCase c = random_case(random, spec, plain(20, 20));
  MixerInputs in = from_query(c.inputs, 5);
  expect_error([&] { mixer_forward(spec, in, {Form::chunked}); }, {"mixer_forward", "first_query", "is 5", "parallel"});
  expect_error([&] { mixer_forward(spec, in, {.final_state = true}); }, {"first_query", "final state"});
  const MixerResult result = mixer_forward(spec, in);
  expect_error([&] { mixer_backward(spec, in, result, c.out_gradient); }, {"mixer_backward", "first_query", "forward"});
  in.boundaries = int_tensor_of({3}, {1});
  expect_error([&] { mixer_forward(spec, in); }, {"first_query", "boundaries"});
  in.boundaries = {};
  in.first_query = 4;  // does not fit the queries
  expect_error([&] { mixer_forward(spec, in); }, {"\"k\""});
  in.first_query = -1;
  expect_error([&] { mixer_forward(spec, in); }, {"first_query", "is -1"});
}

// A cache without state reads a chunk with the queries of the chunk alone.
void expect_chunk_has_its_own_queries(Device device, DType dtype) {
  Random random(4);
  for (const char* name : {"softmax", "2mamba-e"}) {
    const MixerSpec spec = mixer_spec(name);
    const int64_t length = 333, first = 150;
    const auto part = [&](int64_t heads) {
      const Tensor x = to_dtype(random.normal_tensor({1, length, heads, 64}), dtype);
      return device.is_cpu() ? x : to_gpu(x);
    };
    MixerInputs all{part(4), part(2), part(4), {}, {}, {}};
    if (spec.decay) {
      const Tensor decay = random.uniform_tensor({1, length, 4}, -0.2, 0);
      all.log_decay = device.is_cpu() ? decay : to_gpu(decay);
    }
    MixerCache cache(spec, {1, 4, 2, 4, 64, 64}, device);
    const auto cut = [&](int64_t begin, int64_t count) {
      const auto of = [&](const Tensor& x) { return x ? x.slice(1, begin, count) : x; };
      return MixerInputs{of(all.q), of(all.k), of(all.v), of(all.log_decay), {}, {}};
    };
    cache.prefill(0, cut(0, first));
    const Tensor out = cache.prefill(0, cut(first, length - first));
    const MixerResult expected = mixer_forward(spec, from_query(all, first));
    if (!device.is_cpu()) {
      EXPECT_TRUE(expected.kernel == "hopper" || expected.kernel == "tensor cores") << expected.kernel;
    }
    EXPECT_TRUE(same_bits(on_cpu(out), on_cpu(expected.out))) << name;
    EXPECT_LE(relative_error(on_cpu(out), on_cpu(mixer_forward(spec, all).out).slice(1, first, length - first)),
              tolerance(dtype));
  }
}

TEST(MixerFirstQuery, PrefillOfAKeyValueCache) {
  expect_chunk_has_its_own_queries({}, DType::f32);
}

TEST(MixerFirstQueryCuda, PrefillOfAKeyValueCache) {
  SKIP_WITHOUT_GPU();
  expect_chunk_has_its_own_queries(kGpu, DType::bf16);
}

MixerInputs on_gpu(MixerInputs in) {
  for (Tensor* x : {&in.q, &in.k, &in.v, &in.log_decay})
    if (*x) *x = to_gpu(*x);
  return in;
}

#ifdef FURIOUS_CUDA  // the choice of kernels, which a build without CUDA does not have
TEST(MixerFirstQueryCuda, EverySetOfKernelsHasTheRowsOfTheOracle) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (const MixerSpec& spec : all_specs()) {
    if (spec.score == Score::exponential && spec.norm == Norm::none) continue;  // not on the fast kernels
    for (const int64_t dim : {64, 128}) {
      const MixerCase c = cast(random_case(random, spec, plain(200, 330, dim)), DType::bf16);
      const int64_t length = c.inputs.q.size(1);
      const MixerResult all = mixer_forward(spec, cast(c, DType::f64).inputs, {Form::reference});
      const MixerInputs there = on_gpu(c.inputs);
      const bool hopper = mixer_forward(spec, there, {.form = Form::parallel}).kernel == "hopper";
      for (const char* kernel : {"hopper", "tensor cores", "tiles", "simple"}) {
        if (kernel == std::string_view("hopper") && !hopper) continue;
        const cuda::KernelScope scope(kernel);
        for (const int64_t first : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{129}, length - 1,
                                    random.integer(0, length - 1)}) {
          SCOPED_TRACE(fmt::format("{}; {}, from query {}", describe(c), kernel, first));
          const MixerResult result = mixer_forward(spec, from_query(there, first), {.form = Form::parallel});
          EXPECT_EQ(result.kernel, kernel);
          EXPECT_EQ(result.form, Form::parallel);
          expect_rows(result, all, first, tolerance(DType::bf16));
        }
      }
    }
  }
}
#endif

// Other dimensions, scores and f32.
TEST(MixerFirstQueryCuda, AnyShape) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  for (const MixerSpec& spec : every_spec()) {
    for (const int64_t dim : {24, 21}) {
      const MixerCase c = random_case(random, spec, plain(2, 150, dim));
      const MixerResult all = mixer_forward(spec, cast(c, DType::f64).inputs, {Form::reference});
      const int64_t length = c.inputs.q.size(1), first = random.integer(0, length - 1);
      SCOPED_TRACE(fmt::format("{}, from query {}", describe(c), first));
      const MixerResult result = mixer_forward(spec, from_query(on_gpu(c.inputs), first), {.form = Form::parallel});
      EXPECT_EQ(result.kernel, "tiles");
      expect_rows(result, all, first, tolerance(DType::f32));
    }
  }
}

// Many blocks of queries and many tiles before them.
TEST(MixerFirstQueryCuda, LongPast) {
  SKIP_WITHOUT_GPU();
  Random random(7);
  for (const char* name : {"softmax", "2mamba-e", "2mamba"}) {
    const MixerSpec spec = mixer_spec(name);
    const MixerCase c = cast(random_case(random, spec, plain(5000, 5000, 64)), DType::bf16);
    const MixerInputs there = on_gpu(c.inputs);
    const MixerResult all = mixer_forward(spec, on_gpu(cast(c, DType::f32).inputs), {.form = Form::parallel});
    const MixerResult result = mixer_forward(spec, from_query(there, 4097), {.form = Form::parallel});
    EXPECT_NE(result.kernel, "simple");
    expect_rows(result, all, 4097, tolerance(DType::bf16));
  }
}

}  // namespace
}  // namespace furious
