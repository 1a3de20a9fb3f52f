// The mixers on a GPU against the double-precision oracle, and the fast kernels against the simple ones.
#include "ops/mixer/gpu/mixer_cuda.h"

#include <algorithm>
#include <optional>

#include "base/warning.h"
#include "cuda.h"
#include "ops/mixer/mixer_case.h"
#include "ops/random.h"

namespace furious {
namespace {

using namespace furious::testing;

MixerCase on_gpu(const MixerCase& c) {
  MixerCase there = c;
  for (Tensor* x : {&there.inputs.q, &there.inputs.k, &there.inputs.v, &there.inputs.log_decay,
                    &there.inputs.initial_state, &there.out_gradient, &there.final_state_gradient})
    if (*x) *x = to_gpu(*x);
  return there;
}

MixerRun run_there(const MixerCase& there, const MixerOptions& options) {
  MixerOptions with_state = options;
  with_state.final_state = there.final_state_gradient.defined();
  MixerRun run;
  run.result = mixer_forward(there.spec, there.inputs, with_state);
  run.gradients =
      mixer_backward(there.spec, there.inputs, run.result, there.out_gradient, there.final_state_gradient, with_state);
  for (Tensor* x : {&run.result.out, &run.result.final_state, &run.gradients.q, &run.gradients.k, &run.gradients.v,
                    &run.gradients.log_decay, &run.gradients.initial_state})
    if (*x) *x = to_cpu(*x);
  return run;
}

MixerRun run_on_gpu(const MixerCase& c, const MixerOptions& options = {}) {
  return run_there(on_gpu(c), options);
}

MixerCase without_states(const MixerCase& c) {
  MixerCase out = c;
  out.inputs.initial_state = out.final_state_gradient = {};
  return out;
}

void expect_near(const MixerCase& c, const MixerRun& actual, const MixerRun& expected, double tolerance,
                 double decay_tolerance) {
  // Under the sum norm gradients are differences that may cancel, to nothing for a document of one token: what came in
  // sets the scale.
  double scale = 0;
  for (const double g : to_doubles(c.out_gradient)) scale += g * g;
  scale = std::sqrt(scale);
  const auto near = [&](const char* what, const Tensor& a, const Tensor& e, double least, double most) {
    ASSERT_EQ(a.defined(), e.defined()) << what;
    if (a) {
      EXPECT_LE(relative_error(a, e, least), most) << what;
    }
  };
  near("out", actual.result.out, expected.result.out, 1e-30, tolerance);
  if (c.final_state_gradient)
    near("final state", actual.result.final_state, expected.result.final_state, 1e-30, tolerance);
  near("dq", actual.gradients.q, expected.gradients.q, scale, tolerance);
  near("dk", actual.gradients.k, expected.gradients.k, scale, tolerance);
  near("dv", actual.gradients.v, expected.gradients.v, scale, tolerance);
  near("da", actual.gradients.log_decay, expected.gradients.log_decay, scale, decay_tolerance);
  near("d initial state", actual.gradients.initial_state, expected.gradients.initial_state, scale, tolerance);
}

void expect_near(const MixerCase& c, const MixerRun& actual, const MixerRun& expected, DType dtype) {
  const bool bf16 = dtype == DType::bf16;
  expect_near(c, actual, expected, tolerance(dtype), (bf16 ? 3 : 2) * tolerance(dtype));
}

// Against the oracle: the parallel form without states, and the chunked form with chunks of any length.
void compare_with_oracle(Random& random, const MixerCase& c, DType dtype) {
  SCOPED_TRACE(describe(c));
  const MixerCase rounded = cast(c, dtype), alone = without_states(rounded);
  const MixerRun parallel = run_on_gpu(alone, {.form = Form::parallel});
  EXPECT_EQ(parallel.result.form, Form::parallel);
  expect_near(alone, parallel, run_oracle(alone), dtype);
  if (!has_state(c)) return;
  const int64_t chunk = random.pick<int64_t>({0, 1, random.integer(2, 20), random.integer(2, 100)});
  SCOPED_TRACE(fmt::format("chunked by {}", chunk));
  const MixerRun chunked = run_on_gpu(rounded, {.form = Form::chunked, .chunk = chunk});
  EXPECT_EQ(chunked.result.form, Form::chunked);
  expect_near(rounded, chunked, run_oracle(rounded), dtype);
}

void compare_any_shapes(Random& random, int cases, DType dtype) {
  for (const MixerSpec& spec : every_spec()) {
    for (int i = 0; i < (spec.degree > 0 ? 2 : cases); ++i) {
      CaseLimits limits;
      limits.strongest_decay = random.pick<double>({0.01, 1, 20});
      compare_with_oracle(random, random_case(random, spec, limits), dtype);
    }
  }
}

// Where the oracle is too slow: bf16 against f32, which other tests compare with the oracle.
void compare_with_f32(const MixerCase& c, const MixerOptions& options, double decay_tolerance = 3e-2) {
  SCOPED_TRACE(describe(c));
  const MixerCase rounded = cast(c, DType::bf16);
  const MixerOptions parallel{.form = Form::parallel};
  expect_near(rounded, run_on_gpu(rounded, options), run_on_gpu(cast(rounded, DType::f32), parallel),
              tolerance(DType::bf16), decay_tolerance);
}

TEST(MixerCuda, AnyShapeInF32) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  compare_any_shapes(random, 6, DType::f32);
}

TEST(MixerCuda, AnyShapeInBf16) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  compare_any_shapes(random, 3, DType::bf16);
}

// Scores and masks that the simple kernels support in every dimension.
TEST(MixerCuda, FurtherScores) {
  SKIP_WITHOUT_GPU();
  Random random(12);
  for (const MixerSpec& spec : further_specs()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t dim : {0, 72}) {
        CaseLimits limits;
        limits.dim = dim;
        limits.longest = dim > 0 ? 30 : 90;
        limits.strongest_decay = random.pick<double>({0.01, 0.4});
        compare_with_oracle(random, random_case(random, spec, limits), dtype);
      }
    }
  }
}

// The mask grows past its largest value and falls again. Per row: weights of e^60 hide what is wrong elsewhere.
TEST(MixerCuda, SignedDecayPastSaturation) {
  SKIP_WITHOUT_GPU();
  Random random(13);
  for (const MixerSpec& spec : further_specs()) {
    if (!spec.signed_decay) continue;
    CaseLimits limits;
    limits.shortest = 60;
    limits.longest = 90;
    MixerCase c = random_case(random, spec, limits);
    c.inputs.log_decay = random.uniform_tensor(c.inputs.log_decay.shape(), -1, 7);
    const Tensor falling = c.inputs.log_decay.slice(1, 25, 25);
    copy(falling, random.uniform_tensor(falling.shape(), -7, 1));
    SCOPED_TRACE(describe(c));
    const MixerRun actual = run_on_gpu(c), expected = run_oracle(c);
    EXPECT_EQ(actual.result.form, Form::parallel);
    EXPECT_LE(worst_row(actual.result.out, expected.result.out, 0.1), 1e-4);
    EXPECT_LE(worst_row(actual.gradients.q, expected.gradients.q, 1), 1e-4);
    EXPECT_LE(worst_row(actual.gradients.k, expected.gradients.k, 1), 1e-4);
    EXPECT_LE(worst_row(actual.gradients.v, expected.gradients.v, 1), 1e-4);
    for (int64_t h = 0; h < c.heads; ++h)
      EXPECT_LE(worst_row(actual.gradients.log_decay.select(2, h), expected.gradients.log_decay.select(2, h), 1), 1e-4);
  }
}

#ifdef FURIOUS_CUDA  // forcing kernels needs a build with CUDA
// Each set of kernels on calls that all of them support, independent of the choice for this device: also those of
// older devices.
TEST(MixerCuda, EverySetOfKernelsAgreesWithTheOracle) {
  SKIP_WITHOUT_GPU();
  Random random(14);
  for (const MixerSpec& spec : all_specs()) {
    if (spec.score == Score::exponential && spec.norm == Norm::none) continue;  // not on the fast kernels
    for (const int64_t dim : {64, 128}) {
      CaseLimits limits;
      limits.dim = dim;
      limits.shortest = 100;
      limits.longest = 200;
      limits.states = limits.final_gradient = false;
      limits.strongest_decay = random.pick<double>({0.01, 1});
      const MixerCase c = cast(random_case(random, spec, limits), DType::bf16);
      const MixerRun expected = run_oracle(c);
      for (const char* kernel : {"hopper", "tensor cores", "tiles", "simple"}) {
        SCOPED_TRACE(fmt::format("{}; {}", describe(c), kernel));
        const std::string_view automatic = mixer_forward(spec, on_gpu(c).inputs, {.form = Form::parallel}).kernel;
        const cuda::KernelScope scope(kernel);
        if (kernel == std::string_view("hopper") && automatic != "hopper") {
          expect_error([&] { mixer_forward(spec, on_gpu(c).inputs); }, {"mixer_forward", "hopper"});
          continue;
        }
        const MixerRun parallel = run_on_gpu(c, {.form = Form::parallel});
        EXPECT_EQ(parallel.result.kernel, kernel);
        expect_near(c, parallel, expected, DType::bf16);
        if (!has_state(spec)) continue;
        const MixerRun chunked = run_on_gpu(c, {.form = Form::chunked, .chunk = 64});
        EXPECT_EQ(chunked.result.form, Form::chunked);
        const bool in_memory = kernel == std::string_view("tiles") || kernel == std::string_view("simple");
        EXPECT_EQ(chunked.result.kernel, in_memory ? kernel : kernel_of_states(spec));
        expect_near(c, chunked, expected, DType::bf16);
      }
    }
  }
}

// Chunks of 256 tokens use dedicated kernels on Hopper and the general ones elsewhere.
TEST(MixerCuda, LongChunksWithAndWithoutHopper) {
  SKIP_WITHOUT_GPU();
  Random random(15);
  for (const MixerSpec& spec : all_specs()) {
    if (!has_state(spec)) continue;
    CaseLimits limits;
    limits.dim = 64;
    limits.shortest = 520;
    limits.longest = 600;
    limits.states = limits.final_gradient = limits.boundaries = false;
    limits.strongest_decay = 0.02;
    const MixerCase c = cast(random_case(random, spec, limits), DType::bf16);
    const MixerRun expected = run_on_gpu(cast(c, DType::f32), {.form = Form::parallel});
    const MixerOptions options{.form = Form::chunked, .chunk = 256};
    SCOPED_TRACE(describe(c));
    const MixerRun automatic = run_on_gpu(c, options);
    const bool hopper = mixer_forward(spec, on_gpu(c).inputs, {.form = Form::parallel}).kernel == "hopper";
    const bool linear = spec.score == Score::linear;
    EXPECT_EQ(automatic.result.kernel, linear && spec.norm == Norm::none ? "walk"
                                       : hopper && !linear               ? "states"
                                                                         : kernel_of_states(spec));
    expect_near(c, automatic, expected, DType::bf16);
    const cuda::KernelScope scope("tensor cores");
    const MixerRun older = run_on_gpu(c, options);
    EXPECT_EQ(older.result.form, Form::chunked);
    EXPECT_EQ(older.result.kernel, kernel_of_states(spec));
    expect_near(c, older, expected, DType::bf16);
  }
}
#endif

TEST(MixerCuda, OneToken) {
  SKIP_WITHOUT_GPU();
  Random random(7);
  CaseLimits limits;
  limits.longest = 1;
  for (const MixerSpec& spec : all_specs()) compare_with_oracle(random, random_case(random, spec, limits), DType::f32);
}

TEST(MixerCuda, OtherDimensionsAsOnTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(10);
  for (const MixerSpec& spec : all_specs()) {
    for (const int64_t dim : {40, 72, 136}) {
      CaseLimits limits;
      limits.dim = dim;
      limits.longest = 30;
      limits.states = false;
      const MixerCase c = random_case(random, spec, limits);
      SCOPED_TRACE(describe(c));
      expect_near(c, run_on_gpu(c, {.chunk = 10}), run(c, {}), DType::f32);
    }
  }
}

TEST(MixerCuda, TensorCores) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const MixerSpec& spec : all_specs()) {
    for (const int64_t dim : {64, 128}) {
      for (const double strongest : {0.01, 1.0, 20.0}) {
        CaseLimits limits;
        limits.dim = dim;
        limits.longest = 300;
        limits.states = limits.final_gradient = false;
        limits.strongest_decay = strongest;
        compare_with_f32(random_case(random, spec, limits), {.form = Form::parallel});
      }
    }
  }
}

// The same numbers as part of wider rows, like the outputs of a fused projection.
Tensor within_rows(const Tensor& x, int64_t before) {
  const int64_t width = x.size(2) * x.size(3);
  const Tensor rows = Tensor::empty({x.size(0), x.size(1), before + width + before}, x.dtype(), x.device());
  const Tensor there = rows.slice(-1, before, width).split_dim(-1, x.size(2), x.size(3));
  copy(there, x);
  return there;
}

TEST(MixerCuda, InputsWithinRows) {
  SKIP_WITHOUT_GPU();
  Random random(11);
  for (const MixerSpec& spec : all_specs())
    for (const int64_t before : {8, 3}) {  // 3: unaligned for the fast kernels
      CaseLimits limits;
      limits.dim = random.pick<int64_t>({64, 128});
      limits.longest = 300;
      limits.states = false;
      const MixerCase c = cast(random_case(random, spec, limits), DType::bf16);
      SCOPED_TRACE(describe(c));
      MixerCase within = on_gpu(c);
      for (Tensor* x : {&within.inputs.q, &within.inputs.k, &within.inputs.v}) *x = within_rows(*x, before);
      for (const Form form : {Form::parallel, Form::chunked})
        if (form == Form::parallel || has_state(spec))
          expect_near(c, run_there(within, {.form = form}), run_on_gpu(c, {.form = form}), DType::bf16);
    }
}

TEST(MixerCuda, LongerThanManyTiles) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const MixerSpec& spec : all_specs()) {
    CaseLimits limits;
    limits.dim = 64;
    limits.shortest = 700;
    limits.longest = 800;
    limits.states = limits.final_gradient = limits.boundaries = false;
    limits.strongest_decay = 0.02;
    const MixerCase c = random_case(random, spec, limits);
    compare_with_f32(c, {.form = Form::parallel});
    if (has_state(spec)) compare_with_f32(c, {.form = Form::chunked, .chunk = 128});
  }
}

TEST(MixerCuda, HeadsOf64And128WithStates) {
  SKIP_WITHOUT_GPU();
  Random random(8);
  for (const MixerSpec& spec : all_specs()) {
    if (!has_state(spec)) continue;
    for (const int64_t dim : {64, 128}) {
      CaseLimits limits;
      limits.dim = dim;
      limits.longest = 100;
      limits.states = false;
      limits.strongest_decay = 0.1;
      MixerCase c = random_case(random, spec, limits);
      // The state of actual tokens: its normalizer column is consistent with its features.
      const MixerCase past = on_gpu(c);
      c.inputs.initial_state =
          to_cpu(mixer_forward(spec, past.inputs, {.form = Form::chunked, .final_state = true}).final_state);
      compare_with_f32(c, {.form = Form::chunked, .chunk = random.integer(10, 120)});
    }
  }
}

// Chunks of a multiple of 256 tokens: these have dedicated kernels on Hopper.
TEST(MixerCuda, LongChunks) {
  SKIP_WITHOUT_GPU();
  Random random(9);
  for (const MixerSpec& spec : all_specs()) {
    if (!has_state(spec)) continue;
    for (const double strongest : {0.001, 0.02, 1.0, 50.0}) {
      CaseLimits limits;
      limits.dim = random.pick<int64_t>({64, 64, 24, 40, 104});
      limits.shortest = 1000;
      limits.longest = 2200;
      limits.states = limits.final_gradient = limits.boundaries = false;
      limits.strongest_decay = strongest;
      MixerCase c = random_case(random, spec, limits);
      if (random.coin()) {
        std::vector<int32_t> starts;
        for (int64_t t = random.integer(0, 500); t < c.inputs.q.size(0) * c.inputs.q.size(1);
             t += random.integer(1, 1500))
          starts.push_back(static_cast<int32_t>(t));
        c.inputs.boundaries = int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
      }
      const int64_t chunk = random.pick<int64_t>({0, 256, 512});
      SCOPED_TRACE(fmt::format("chunked by {}, decay to {}", chunk, -strongest));
      // da_t sums the rounding of all tokens after t (of o in δ, above all), while strong decay leaves it small: of the
      // numbers of this test alone, rounded in an exact computation, up to 7e-2.
      compare_with_f32(c, {.form = Form::chunked, .chunk = chunk}, strongest < 1 ? 3e-2 : 1e-1);
    }
  }
}

TEST(MixerCuda, LongChunksWithStates) {
  SKIP_WITHOUT_GPU();
  Random random(10);
  for (const MixerSpec& spec : all_specs()) {
    if (!has_state(spec)) continue;
    for (const bool final_gradient : {false, true}) {
      CaseLimits limits;
      limits.dim = random.pick<int64_t>({64, 24, 40, 104});
      limits.shortest = 100;
      limits.longest = 700;
      limits.states = limits.boundaries = false;
      limits.final_gradient = final_gradient;
      limits.strongest_decay = 0.02;
      MixerCase c = random_case(random, spec, limits);
      const MixerCase past = on_gpu(c);
      c.inputs.initial_state =
          to_cpu(mixer_forward(spec, past.inputs, {.form = Form::chunked, .final_state = true}).final_state);
      compare_with_f32(c, {.form = Form::chunked, .chunk = 256});
    }
  }
}

TEST(MixerCuda, LongChunksSameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(11);
  CaseLimits limits;
  limits.dim = 64;
  limits.shortest = 600;
  limits.longest = 1500;
  limits.states = limits.final_gradient = false;
  for (const MixerSpec& spec : all_specs()) {
    if (!has_state(spec)) continue;
    const MixerCase c = cast(random_case(random, spec, limits), DType::bf16);
    const MixerOptions options{.form = Form::chunked, .chunk = 256};
    const MixerRun a = run_on_gpu(c, options), b = run_on_gpu(c, options);
    EXPECT_TRUE(same_bits(a.result.out, b.result.out));
    EXPECT_TRUE(same_bits(a.gradients.q, b.gradients.q));
    EXPECT_TRUE(same_bits(a.gradients.k, b.gradients.k));
    EXPECT_TRUE(same_bits(a.gradients.v, b.gradients.v));
  }
}

// A state that grows over thousands of tokens, passed on a thousand times.
TEST(MixerCuda, LongSequence) {
  SKIP_WITHOUT_GPU();
  MixerCase c;
  c.spec = mixer_spec("2mamba");
  const Shape shape{1, 262144, 1, 16};
  for (Tensor* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.out_gradient}) *x = Tensor::empty(shape, DType::f32);
  c.inputs.log_decay = Tensor::empty({1, 262144, 1}, DType::f32);
  fill_uniform(c.inputs.q, 0, 1, 1, 0);
  fill_uniform(c.inputs.k, 0, 1, 2, 0);
  fill_normal(c.inputs.v, 0, 1, 3, 0);
  fill_uniform(c.inputs.log_decay, -0.001f, 0, 4, 0);
  fill_normal(c.out_gradient, 0, 1, 5, 0);
  const MixerRun gpu = run_on_gpu(c);
  EXPECT_EQ(gpu.result.form, Form::chunked);
  expect_near(c, gpu, run(c, {.form = Form::chunked}), 1e-4, 1e-3);
}

TEST(MixerCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  CaseLimits limits;
  limits.dim = 64;
  limits.shortest = 300;
  limits.longest = 600;
  limits.states = limits.final_gradient = false;
  for (const MixerSpec& spec : all_specs()) {
    const MixerCase c = cast(random_case(random, spec, limits), DType::bf16);
    for (const Form form : {Form::parallel, Form::chunked}) {
      if (form == Form::chunked && !has_state(spec)) continue;
      const MixerRun a = run_on_gpu(c, {.form = form, .chunk = 128}), b = run_on_gpu(c, {.form = form, .chunk = 128});
      EXPECT_TRUE(same_bits(a.result.out, b.result.out));
      EXPECT_TRUE(same_bits(a.gradients.q, b.gradients.q));
      EXPECT_TRUE(same_bits(a.gradients.k, b.gradients.k));
      EXPECT_TRUE(same_bits(a.gradients.v, b.gradients.v));
      if (spec.decay) {
        EXPECT_TRUE(same_bits(a.gradients.log_decay, b.gradients.log_decay));
      }
    }
  }
}

#ifdef FURIOUS_CUDA  // forcing kernels needs a build with CUDA
struct WarningCall {
  DType dtype = DType::bf16;
  int64_t dim = 16, length = 1100;
  MixerOptions options{.form = Form::parallel};
  int64_t before = 0;  // numbers before each row, see within_rows()
};

// What mixer_forward() says when it is called twice.
std::string warning_of(const WarningCall& call, std::string_view kernel = {}) {
  Random random(16);
  const auto input = [&] {
    const Tensor x = to_gpu(random.uniform_tensor({1, call.length, 1, call.dim}, 0, 1), call.dtype);
    return call.before > 0 ? within_rows(x, call.before) : x;
  };
  const MixerInputs inputs{input(), input(), input(), {}, {}, {}};
  const MixerSpec spec{Score::squared, false, Norm::sum};
  std::optional<cuda::KernelScope> forced;
  if (!kernel.empty()) forced.emplace(kernel);
  reset_warnings();
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) mixer_forward(spec, inputs, call.options);
  reset_warnings();
  return ::testing::internal::GetCapturedStderr();
}

void expect_one_warning(const WarningCall& call, const std::vector<std::string>& parts) {
  const std::string text = warning_of(call);
  EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  EXPECT_TRUE(text.starts_with("warning: mixer: ")) << text;
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(MixerCuda, WarnsOnceOfF16) {
  SKIP_WITHOUT_GPU();
  expect_one_warning({.dtype = DType::f16}, {"f16", "TF32", "use bf16 tensors", "--mixer-precision bf16"});
  EXPECT_EQ(warning_of({.dtype = DType::f16, .length = 900}), "");
  EXPECT_EQ(warning_of({.dtype = DType::bf16}), "");
  EXPECT_EQ(warning_of({.dtype = DType::f32}), "");
  for (const MixerPrecision precision : {MixerPrecision::bf16, MixerPrecision::tf32})
    EXPECT_EQ(warning_of({.dtype = DType::f16, .options = {.form = Form::parallel, .precision = precision}}), "");
  EXPECT_EQ(warning_of({.dtype = DType::f16}, "tiles"), "");
}

TEST(MixerCuda, WarnsOnceOfKernelsWithoutTensorCores) {
  SKIP_WITHOUT_GPU();
  if (const int64_t largest = cuda::largest_tile_dim(kGpu); largest < kLargestDim) {
    expect_one_warning({.dtype = DType::f32, .dim = largest + 8},
                       {fmt::format("heads of {}", largest + 8), "f32", "without tensor cores",
                        fmt::format("use dimensions of at most {}", largest), "or bf16 tensors"});
    EXPECT_EQ(warning_of({.dtype = DType::f32, .dim = largest + 8, .length = 300}), "");
  }
  EXPECT_EQ(warning_of({.dtype = DType::f32, .dim = 9}), "");
  EXPECT_EQ(warning_of({.dtype = DType::f32, .dim = 16}, "simple"), "");
}

TEST(MixerCuda, WarnsOnceOfFeaturesInMemory) {
  SKIP_WITHOUT_GPU();
  const MixerOptions chunked{.form = Form::chunked, .chunk = 256};
  expect_one_warning({.dtype = DType::f32, .options = chunked},
                     {"chunked form", "precision auto", "use bf16 tensors", "or the parallel form"});
  expect_one_warning({.dim = 9, .options = chunked},
                     {"chunked form", "heads of 9", "use dimensions", "multiples of 8"});
  expect_one_warning({.options = chunked, .before = 3}, {"chunked form", "use rows of q, k and v", "16 bytes"});
  EXPECT_EQ(warning_of({.options = chunked}), "");
  EXPECT_EQ(warning_of({.options = chunked, .before = 8}), "");
  EXPECT_EQ(warning_of({.dtype = DType::f32, .length = 300, .options = chunked}), "");
  EXPECT_EQ(warning_of({.dtype = DType::bf16, .options = chunked}, "tiles"), "");
}

TEST(MixerCuda, WarnsOnceOfRowsThatHopperCannotRead) {
  SKIP_WITHOUT_GPU();
  const Tensor x = to_gpu(Random(17).uniform_tensor({1, 16, 1, 16}, 0, 1), DType::bf16);
  if (mixer_forward({Score::squared, false, Norm::sum}, {x, x, x, {}, {}, {}}).kernel != "hopper") {
    EXPECT_EQ(warning_of({.dim = 9}), "");
    GTEST_SKIP() << "no Hopper device";
  }
  expect_one_warning({.dim = 9}, {"heads of 9", "use dimensions", "multiples of 8"});
  expect_one_warning({.before = 3}, {"heads of 16", "use rows of q, k and v", "16 bytes"});
  EXPECT_EQ(warning_of({.dim = 9, .length = 300}), "");
  EXPECT_EQ(warning_of({.dim = 9}, "tensor cores"), "");
}
#endif

}  // namespace
}  // namespace furious
