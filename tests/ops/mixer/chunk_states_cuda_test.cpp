// The chunked form with states on tensor cores against the double-precision oracle, row by row: dimensions and their
// padding, shared heads, lengths around a chunk, documents, decays, initial and final states.
#ifdef FURIOUS_CUDA  // forcing kernels needs a build with CUDA
#include "cuda.h"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/mixer_case.h"

namespace furious {
namespace {

using namespace furious::testing;

struct Sizes {
  int64_t qk_dim, v_dim, length, chunk;
  int64_t batch = 1, q_heads = 1, k_heads = 1, v_heads = 1;
  bool boundaries = false, initial = false, final_gradient = false;
  double strongest_decay = 0.05;
};

std::vector<MixerSpec> state_specs() {
  std::vector<MixerSpec> specs;
  for (const Score score : {Score::linear, Score::squared})
    for (const Norm norm : {Norm::none, Norm::sum})
      for (const bool decay : {false, true}) specs.push_back({score, decay, norm});
  return specs;
}

MixerCase make_case(Random& random, const MixerSpec& spec, const Sizes& sizes) {
  MixerCase c;
  c.spec = spec;
  c.heads = std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads});
  // Under the sum norm, scores that cancel or vanish are ill-conditioned in any precision.
  const auto normal = [&](int64_t heads, int64_t dim, bool absolute) {
    const Tensor x = random.normal_tensor({sizes.batch, sizes.length, heads, dim});
    for (int64_t i = 0; absolute && i < x.elements(); ++i) x.data<float>()[i] = std::fabs(x.data<float>()[i]);
    return x;
  };
  const bool positive = spec.norm == Norm::sum;
  c.inputs.q = normal(sizes.q_heads, sizes.qk_dim, positive);
  c.inputs.k = normal(sizes.k_heads, sizes.qk_dim, positive);
  c.inputs.v = normal(sizes.v_heads, sizes.v_dim, false);
  c.out_gradient = normal(c.heads, sizes.v_dim, false);
  if (spec.decay)
    c.inputs.log_decay = random.uniform_tensor({sizes.batch, sizes.length, c.heads}, -sizes.strongest_decay, 0);
  if (sizes.boundaries) {
    std::vector<int32_t> starts{0};
    for (int64_t t = 1; t < sizes.batch * sizes.length; ++t)
      if (random.integer(0, 39) == 0) starts.push_back(static_cast<int32_t>(t));
    c.inputs.boundaries = int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
  }
  c = cast(c, DType::bf16);
  if (sizes.initial) {  // of actual tokens: its normalizer column is consistent with its features
    const MixerCase wide = cast(c, DType::f32);
    MixerInputs past = wide.inputs;
    past.boundaries = {};
    c.inputs.initial_state = mixer_forward(spec, past, {Form::reference, 0, true}).final_state;
  }
  if (sizes.final_gradient) {
    const int64_t rows = state_rows(spec, sizes.qk_dim);
    c.final_state_gradient = random.normal_tensor({sizes.batch, c.heads, rows, state_columns(spec, sizes.v_dim)},
                                                  1 / std::sqrt(static_cast<double>(rows)));
  }
  return c;
}

std::array<Tensor*, 7> tensors_of(MixerRun& run) {
  return {&run.result.out,          &run.result.final_state,     &run.gradients.q, &run.gradients.k, &run.gradients.v,
          &run.gradients.log_decay, &run.gradients.initial_state};
}
constexpr const char* kNames[] = {"out", "final state", "dq", "dk", "dv", "da", "d initial state"};

MixerRun run_on_gpu(const MixerCase& c, int64_t chunk) {
  MixerCase there = c;
  for (Tensor* x : {&there.inputs.q, &there.inputs.k, &there.inputs.v, &there.inputs.log_decay,
                    &there.inputs.initial_state, &there.out_gradient, &there.final_state_gradient})
    if (*x) *x = to_gpu(*x);
  const MixerOptions options{.form = Form::chunked, .chunk = chunk, .final_state = c.final_state_gradient.defined()};
  MixerRun run;
  run.result = mixer_forward(c.spec, there.inputs, options);
  run.gradients =
      mixer_backward(c.spec, there.inputs, run.result, there.out_gradient, there.final_state_gradient, options);
  for (int i = 0; i < 7; ++i)
    if (Tensor& x = *tensors_of(run)[i]; x) x = to_cpu(x);
  return run;
}

void compare(const MixerCase& c, int64_t chunk, std::string_view kernel = "chunk states") {
  const cuda::KernelScope scope(kernel);
  SCOPED_TRACE(fmt::format("{}{}, chunk {}", describe(c), c.final_state_gradient ? ", final state" : "", chunk));
  MixerRun actual = run_on_gpu(c, chunk), expected = run_oracle(c);
  EXPECT_EQ(actual.result.form, Form::chunked);
  if (chunk < c.inputs.q.size(1) || c.inputs.initial_state || c.final_state_gradient) {
    EXPECT_EQ(actual.result.kernel, "chunk states");
  }
  // Under the sum norm gradients are differences that may cancel, to nothing for a document of one token: what came in
  // sets the scale.
  double scale = 0;
  for (const double g : to_doubles(c.out_gradient)) scale += g * g;
  scale = c.spec.norm == Norm::sum ? std::sqrt(scale) : 1e-6;
  for (int i = 0; i < 7; ++i) {
    const Tensor &a = *tensors_of(actual)[i], &e = *tensors_of(expected)[i];
    if (i == 1 && !c.final_state_gradient) continue;
    ASSERT_EQ(a.defined(), e.defined()) << kNames[i];
    if (!a) continue;
    const RelativeError error = relative_error(a, e, i < 2 ? 1e-30 : scale);
    EXPECT_LE(error.all, i == 5 ? 3e-2 : 1.5e-2) << kNames[i];
    EXPECT_LE(error.worst, i == 5 ? 0.1 : 3e-2) << kNames[i];
  }
}

TEST(ChunkStatesCuda, EveryDimension) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  const std::vector<std::pair<int64_t, int64_t>> dims{{8, 8},   {24, 40}, {40, 24},  {32, 32},  {72, 96},
                                                      {96, 72}, {96, 96}, {128, 64}, {48, 128}, {128, 128}};
  const std::vector<MixerSpec> specs = state_specs();
  for (size_t i = 0; i < specs.size(); ++i)
    for (size_t j = (i + i / 2) % 2; j < dims.size(); j += 2) {
      Sizes sizes{.qk_dim = dims[j].first, .v_dim = dims[j].second, .length = 150, .chunk = 64};
      sizes.boundaries = random.coin();
      sizes.initial = random.coin();
      sizes.final_gradient = random.coin();
      (random.coin() ? sizes.q_heads : sizes.v_heads) = 2;
      sizes.strongest_decay = random.pick<double>({0.01, 0.5, 20});
      compare(make_case(random, specs[i], sizes), sizes.chunk);
    }
}

// Values in slices, and states with more rows than a block has.
TEST(ChunkStatesCuda, WideHeads) {
  SKIP_WITHOUT_GPU();
  Random random(8);
  const std::vector<std::pair<int64_t, int64_t>> dims{{160, 160}, {192, 136}, {256, 256}, {40, 256}, {256, 40}};
  const std::vector<MixerSpec> specs = state_specs();
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto& [qk_dim, v_dim] = dims[i % dims.size()];
    Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 130, .chunk = 48};
    sizes.boundaries = random.coin();
    sizes.initial = random.coin();
    sizes.final_gradient = random.coin();
    (random.coin() ? sizes.q_heads : sizes.v_heads) = 2;
    compare(make_case(random, specs[i], sizes), sizes.chunk);
  }
  // The kernels of the parallel form on Hopper add to what states give.
  for (const auto& [name, dim] : std::vector<std::pair<const char*, int64_t>>{{"2mamba", 160}, {"mamba2", 256}})
    compare(make_case(random, mixer_spec(name), {.qk_dim = dim, .v_dim = dim, .length = 600, .chunk = 256}), 256);
}

TEST(ChunkStatesCuda, LengthsAroundAChunk) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const MixerSpec& spec : state_specs())
    for (const int64_t chunk : {100, 64})
      for (const int64_t length : {int64_t{1}, chunk - 1, chunk, chunk + 1, 4 * chunk + 7}) {
        Sizes sizes{.qk_dim = 32, .v_dim = 24, .length = length, .chunk = chunk, .batch = 2, .v_heads = 2};
        sizes.boundaries = random.coin();
        sizes.initial = sizes.final_gradient = random.coin();
        compare(make_case(random, spec, sizes), chunk);
      }
}

// More than a block's tokens in a chunk, and the kernels of the parallel form inside; also those of older devices.
TEST(ChunkStatesCuda, LongChunks) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const char* name : {"2mamba", "mamba2"})
    for (const int64_t dim : {64, 96, 128}) {
      const Sizes sizes{.qk_dim = dim,
                        .v_dim = dim,
                        .length = 900,
                        .chunk = dim == 96 ? 400 : 512,
                        .boundaries = dim == 96,
                        .strongest_decay = 0.01};
      const MixerCase c = make_case(random, mixer_spec(name), sizes);
      compare(c, sizes.chunk);
      if (dim != 96) compare(c, sizes.chunk, "tensor cores");
    }
}

// Enough blocks that each walks through all chunks of its rows, or through a segment of them.
TEST(ChunkStatesCuda, ManyHeads) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const Norm norm : {Norm::none, Norm::sum})
    for (const bool states : {false, true}) {
      Sizes sizes{.qk_dim = 120, .v_dim = 128, .length = 150, .chunk = 48, .k_heads = 4, .v_heads = 2};
      sizes.initial = sizes.final_gradient = states;
      sizes.boundaries = !states;
      compare(make_case(random, {Score::squared, true, norm}, sizes), sizes.chunk);
      sizes.qk_dim = sizes.v_dim = 16;
      sizes.batch = states ? 30 : 140;
      sizes.q_heads = sizes.k_heads = sizes.v_heads = 16;
      sizes.length = 50;
      sizes.chunk = 24;
      compare(make_case(random, {Score::linear, true, norm}, sizes), sizes.chunk);
    }
}

// Decays and documents that erase whole tiles of tokens and states.
TEST(ChunkStatesCuda, StrongDecay) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (const char* name : {"2mamba", "mamba2"})
    for (const double strongest : {2.0, 100.0}) {
      const Sizes sizes{.qk_dim = 40,
                        .v_dim = 40,
                        .length = 700,
                        .chunk = 300,
                        .boundaries = true,
                        .initial = true,
                        .final_gradient = true,
                        .strongest_decay = strongest};
      compare(make_case(random, mixer_spec(name), sizes), sizes.chunk);
    }
}

TEST(ChunkStatesCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  for (const MixerSpec& spec : state_specs()) {
    const Sizes sizes{.qk_dim = 72,
                      .v_dim = 40,
                      .length = 500,
                      .chunk = 128,
                      .v_heads = 3,
                      .boundaries = true,
                      .initial = true,
                      .final_gradient = true};
    const MixerCase c = make_case(random, spec, sizes);
    const cuda::KernelScope scope("chunk states");
    MixerRun a = run_on_gpu(c, 128), b = run_on_gpu(c, 128);
    EXPECT_EQ(a.result.kernel, "chunk states");
    for (int i = 0; i < 7; ++i)
      if (const Tensor& x = *tensors_of(a)[i]; x) {
        const Tensor y = *tensors_of(b)[i];
        EXPECT_TRUE(same_bits(x, y)) << kNames[i];
      }
  }
}

// Other dimensions have φ in memory, and what is forced to.
TEST(ChunkStatesCuda, WhatIsNotSupportedRunsThroughMemory) {
  SKIP_WITHOUT_GPU();
  Random random(7);
  const auto kernel_of = [&](const MixerSpec& spec, int64_t qk_dim, int64_t v_dim) {
    const MixerCase c = make_case(random, spec, {.qk_dim = qk_dim, .v_dim = v_dim, .length = 60, .chunk = 32});
    return run_on_gpu(c, 32).result.kernel;
  };
  EXPECT_EQ(kernel_of(mixer_spec("2mamba"), 32, 32), "chunk states");
  EXPECT_EQ(kernel_of(mixer_spec("2mamba"), 256, 40), "chunk states");  // on every device
  EXPECT_EQ(kernel_of(mixer_spec("mamba2s"), 256, 256), "chunk states");
  EXPECT_EQ(kernel_of(mixer_spec("2mamba-3"), 16, 32), "tensor cores");
  EXPECT_EQ(kernel_of(mixer_spec("2mamba"), 20, 32), "tensor cores");
  EXPECT_EQ(kernel_of(mixer_spec("mamba2"), 132, 32), "tensor cores");
  {
    const cuda::KernelScope scope("tiles");
    EXPECT_EQ(kernel_of(mixer_spec("2mamba"), 32, 32), "tiles");
  }
  const cuda::KernelScope scope("chunk states");
  expect_error([&] { kernel_of(mixer_spec("2mamba"), 20, 32); }, {"mixer_forward", "chunk states"});
}

}  // namespace
}  // namespace furious
#endif
