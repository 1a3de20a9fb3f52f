// The parallel form on tensor cores (mma.sync, and on Hopper wgmma with padded dimensions) against the double-precision
// oracle, row by row: every dimension, score, norm and decay, documents, shared heads, queries of the last tokens only,
// and what states add.
#ifdef FURIOUS_CUDA  // forcing kernels needs a build with CUDA
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/gpu_case.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr const char* kKernel = "tensor cores";
constexpr double kTolerance = 3e-2;  // of one row, in bf16
const MixerOptions kParallel{.form = Form::parallel};

void compare(const MixerCase& c, const MixerOptions& options, const MixerRun& oracle, const char* kernel) {
  SCOPED_TRACE(fmt::format("{}; {}", describe(c), kernel));
  const cuda::KernelScope scope(kernel);  // backward, other kernels would be an error
  const MixerRun actual = run_on_gpu(c, options);
  EXPECT_EQ(actual.result.kernel, options.form == Form::parallel ? kernel : kernel_of_states(c.spec));
  EXPECT_EQ(actual.result.form, options.form);
  expect_within(errors_of(c, actual, oracle), kTolerance);
  if (oracle.result.normalizer) {
    EXPECT_LE(relative_error(actual.result.normalizer, oracle.result.normalizer).worst, kTolerance);
  }
  if (oracle.result.maximum) {
    EXPECT_LE(relative_error(actual.result.maximum, oracle.result.maximum).worst, kTolerance);
  }
  if (c.inputs.initial_state) {
    EXPECT_LE(relative_error(actual.gradients.initial_state, oracle.gradients.initial_state).worst, kTolerance);
  }
}

// Against the oracle, also with the kernels for Hopper where they compute the call.
void compare(const MixerCase& c, const MixerOptions& options = kParallel) {
  const MixerRun oracle = run_oracle_without_state(c);
  MixerInputs there = on_gpu(c).inputs;
  there.initial_state = {};
  compare(c, options, oracle, kKernel);
  if (mixer_forward(c.spec, there, kParallel).kernel == "hopper") compare(c, options, oracle, "hopper");
}

TEST(ParallelCuda, EveryDimension) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  std::vector<std::pair<int64_t, int64_t>> dims{{128, 64}, {64, 128}, {256, 16}, {16, 256}, {32, 200},
                                                {192, 96}, {96, 160}, {80, 48},  {21, 13},  {100, 75}};
  for (const int64_t dim : {8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 200, 256})
    dims.emplace_back(dim, dim);
  for (const char* name : {"2mamba", "2mamba-e"})
    for (const auto& [qk_dim, v_dim] : dims)
      for (const int64_t length : {1, 65, 140}) {
        const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = length, .boundaries = random.coin()};
        compare(make_case(random, mixer_spec(name), sizes, DType::bf16));
      }
}

TEST(ParallelCuda, EverySpec) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const std::vector<std::pair<int64_t, int64_t>> dims{{64, 64}, {32, 32}, {96, 96}, {128, 64}, {24, 200}, {256, 256}};
  const std::vector<int64_t> lengths{1, 63, 130, 300};
  size_t i = 0;
  for (const MixerSpec& spec : gpu_specs())
    for (const bool boundaries : {false, true}) {
      Sizes sizes{dims[i % 6].first, dims[i % 6].second, lengths[i / 2 % 4]};
      ++i;
      sizes.boundaries = boundaries;
      (random.coin() ? sizes.q_heads : sizes.v_heads) = 2;
      // Strong ones saturate where they have a sign, and erase tiles where they have none.
      sizes.strongest_decay = random.pick<double>({0.02, 0.5, 8});
      compare(make_case(random, spec, sizes, DType::bf16));
    }
}

TEST(ParallelCuda, ManyTilesAndSharedHeads) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const char* name : {"2mamba", "2mamba-e", "mamba2", "2mamba-4"})
    for (const double strongest : {0.01, 2.0})
      for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{{32, 32}, {64, 128}, {160, 80}}) {
        const Sizes sizes{.qk_dim = qk_dim,
                          .v_dim = v_dim,
                          .length = 330,
                          .q_heads = 2,
                          .boundaries = random.coin(),
                          .strongest_decay = strongest};
        compare(make_case(random, mixer_spec(name), sizes, DType::bf16));
      }
  const Sizes groups{.qk_dim = 40, .v_dim = 72, .length = 100, .batch = 2, .q_heads = 4, .k_heads = 2, .v_heads = 1};
  compare(make_case(random, mixer_spec("2mamba"), groups, DType::bf16));
}

TEST(ParallelCuda, QueriesOfTheLastTokens) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  const cuda::KernelScope scope(kKernel);
  for (const char* name : {"2mamba", "2mamba-e", "2mamba-series-2"})
    for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{{32, 96}, {128, 64}, {200, 256}}) {
      const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 290, .v_heads = 2};
      const MixerCase c = make_case(random, mixer_spec(name), sizes, DType::bf16), there = on_gpu(c);
      const Tensor all = mixer_forward(c.spec, cast(c, DType::f64).inputs, {Form::reference}).out;
      for (const int64_t first : {1, 63, 128, 200, 289}) {
        SCOPED_TRACE(fmt::format("{}, from query {}", describe(c), first));
        MixerInputs rest = there.inputs;
        rest.first_query = first;
        rest.q = rest.q.slice(1, first, sizes.length - first);
        const MixerResult result = mixer_forward(c.spec, rest, kParallel);
        EXPECT_EQ(result.kernel, kKernel);
        EXPECT_LE(relative_error(to_cpu(result.out), all.slice(1, first, sizes.length - first)).worst, kTolerance);
      }
    }
}

// Inside chunks, with what the states before them add.
TEST(ParallelCuda, InsideChunks) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (const MixerSpec& spec : {mixer_spec("2mamba"), mixer_spec("mamba2"), mixer_spec("linear"),
                                MixerSpec{Score::squared, true, Norm::none}, mixer_spec("2mamba-series-2")})
    for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{{24, 40}, {64, 64}, {32, 128}}) {
      MixerCase c = make_case(random, spec, {.qk_dim = qk_dim, .v_dim = v_dim, .length = 150}, DType::bf16);
      c.inputs.initial_state = mixer_forward(spec, c.inputs, {Form::reference, 0, true}).final_state;
      compare(c, {.form = Form::chunked, .chunk = random.pick<int64_t>({48, 64})});
    }
}

// Rows that cannot be read or written 16 bytes at a time hold the same numbers.
TEST(ParallelCuda, RowsOfAnyAlignment) {
  SKIP_WITHOUT_GPU();
  Random random(9);
  for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{{40, 72}, {21, 13}, {192, 64}}) {
    const MixerCase c = on_gpu(make_case(random, mixer_spec("2mamba"),
                                         {.qk_dim = qk_dim, .v_dim = v_dim, .length = 100, .q_heads = 2}, DType::bf16));
    {
      const cuda::KernelScope scope(kKernel);
      expect_same_bits_in_wider_rows(c, kParallel, kKernel);
    }
    if (cuda::on_hopper(kGpu) && qk_dim % 8 == 0) expect_same_bits_in_unaligned_results(c, kParallel, "hopper");
  }
}

TEST(ParallelCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  const cuda::KernelScope scope(kKernel);
  for (const MixerSpec& spec : gpu_specs())
    for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{{64, 96}, {200, 128}}) {
      const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 300, .v_heads = 2};
      const MixerCase c = make_case(random, spec, sizes, DType::bf16);
      const MixerRun a = run_on_gpu(c, kParallel), b = run_on_gpu(c, kParallel);
      expect_same_bits(a, b);
    }
}

// On Hopper a query sums what many blocks of keys add while others run, in an order that must not depend on them (heads
// of more than 128 are summed by one block). Some blocks are erased by decay, or lie in other documents.
TEST(ParallelCuda, ManyBlocksOfKeysInAFixedOrder) {
  SKIP_WITHOUT_GPU();
  if (!cuda::on_hopper(kGpu)) GTEST_SKIP() << "kernels for Hopper";
  Random random(10);
  const std::vector<std::pair<MixerSpec, double>> specs{{{Score::linear, true, Norm::none}, 0.001},
                                                        {{Score::squared, true, Norm::sum}, 0.001},
                                                        {{Score::squared, true, Norm::none}, 0.2},
                                                        {{Score::exponential, false, Norm::sum}, 0},
                                                        {{Score::exponential, true, Norm::sum}, 0.2}};
  for (const auto& [spec, strongest] : specs)
    for (const int64_t dim : {64, 128, 192})
      for (const bool documents : {false, true}) {
        const int64_t length = 4000 + random.integer(0, 400);
        MixerCase c = make_case(
            random, spec,
            {.qk_dim = dim, .v_dim = dim, .length = length, .batch = 2, .q_heads = 4, .strongest_decay = strongest},
            DType::bf16);
        if (documents) c.inputs.boundaries = int_tensor_of({0, 130, 1500, 1501, 5000, 7000}, {6});
        SCOPED_TRACE(describe(c));
        const MixerCase there = on_gpu(c);
        const auto run_with = [&](const char* kernel) {
          const cuda::KernelScope scope(kernel);
          return run_there(there, kParallel, kParallel);
        };
        const MixerRun first = run_with("hopper");
        EXPECT_EQ(first.result.kernel, "hopper");
        for (int i = 0; i < 4; ++i) expect_same_bits(run_with("hopper"), first);
        expect_within(errors_of(c, first, run_with(kKernel)), kTolerance);
      }
}

TEST(ParallelCuda, IsTheChoiceForEveryDimension) {
  SKIP_WITHOUT_GPU();
  Random random(7);
  for (const int64_t dim : {13, 32, 96, 200, 256}) {
    const Sizes sizes{.qk_dim = dim, .v_dim = dim, .length = 100};
    const MixerCase there = on_gpu(make_case(random, mixer_spec("2mamba"), sizes, DType::bf16));
    const bool hopper = cuda::on_hopper(kGpu) && dim % 8 == 0;
    EXPECT_EQ(mixer_forward(there.spec, there.inputs).kernel, hopper ? "hopper" : kKernel);
  }
}

TEST(ParallelCuda, ZeroKeysGiveZerosNotNaN) {
  SKIP_WITHOUT_GPU();
  Random random(8);
  const cuda::KernelScope scope(kKernel);
  for (const MixerSpec& spec : gpu_specs()) {
    MixerCase c = make_case(random, spec, {.qk_dim = 32, .v_dim = 96, .length = 70}, DType::bf16);
    SCOPED_TRACE(describe(c));
    fill(c.inputs.k, 0);
    const MixerRun run = run_on_gpu(c, kParallel);
    const bool vanishes = spec.score != Score::exponential && spec.score != Score::series && spec.norm == Norm::sum;
    for (const Tensor& x : {run.result.out, run.gradients.q, run.gradients.k, run.gradients.v}) {
      EXPECT_TRUE(all_finite(x));
      // f(0) = 0: all normalizers are, and nothing has a gradient.
      for (const double value : to_doubles(x)) ASSERT_TRUE(!vanishes || value == 0.0);
    }
  }
}

}  // namespace
}  // namespace furious
#endif
