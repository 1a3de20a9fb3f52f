// The mixers on a GPU against the double-precision oracle.
#include "cuda.h"
#include "ops/mixer/mixer_case.h"

namespace furious {
namespace {

using namespace furious::testing;

MixerCase on_gpu(const MixerCase& c) {
  MixerCase there = c;
  for (Tensor* x : {&there.inputs.q, &there.inputs.k, &there.inputs.v, &there.inputs.log_decay,
                    &there.inputs.initial_state, &there.out_gradient})
    if (*x) *x = to_gpu(*x);
  return there;
}

MixerRun run_on_gpu(const MixerCase& c, bool final_state) {
  const MixerCase there = on_gpu(c);
  MixerOptions options;
  options.final_state = final_state;
  MixerRun run;
  run.result = mixer_forward(there.spec, there.inputs, options);
  if (!there.inputs.initial_state)
    run.gradients = mixer_backward(there.spec, there.inputs, run.result, there.out_gradient);
  for (Tensor* x : {&run.result.out, &run.result.final_state, &run.gradients.q, &run.gradients.k, &run.gradients.v,
                    &run.gradients.log_decay})
    if (*x) *x = to_cpu(*x);
  return run;
}

// Against the oracle, or where that takes long against the CPU in f32, whose error is nothing beside that of bf16.
void compare(const MixerCase& c, DType dtype, double tolerance, bool oracle = true) {
  SCOPED_TRACE(describe(c));
  const MixerCase rounded = cast(c, dtype);
  MixerCase exact = cast(rounded, oracle ? DType::f64 : DType::f32);
  exact.final_state_gradient = {};
  MixerOptions parallel{Form::parallel, 0, c.spec.has_state()};
  const MixerRun expected = oracle ? run_oracle(exact) : run(exact, parallel);
  const MixerRun actual = run_on_gpu(rounded, c.spec.has_state());
  EXPECT_LE(relative_error(actual.result.out, expected.result.out), tolerance) << "out";
  if (actual.result.final_state) {
    EXPECT_LE(relative_error(actual.result.final_state, expected.result.final_state), tolerance) << "final state";
  }
  if (c.inputs.initial_state) return;
  // Under the sum norm gradients are differences that may cancel, to nothing for a document of one token: what came in
  // sets the scale.
  double scale = 0;
  for (const double g : to_doubles(c.out_gradient)) scale += g * g;
  scale = std::sqrt(scale);
  EXPECT_LE(relative_error(actual.gradients.q, expected.gradients.q, scale), tolerance) << "dq";
  EXPECT_LE(relative_error(actual.gradients.k, expected.gradients.k, scale), tolerance) << "dk";
  EXPECT_LE(relative_error(actual.gradients.v, expected.gradients.v, scale), tolerance) << "dv";
  if (c.spec.decay) {
    EXPECT_LE(relative_error(actual.gradients.log_decay, expected.gradients.log_decay, scale), 2 * tolerance) << "da";
  }
}

TEST(MixerCuda, AnyShapeInF32) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const MixerSpec& spec : all_specs())
    for (int i = 0; i < 6; ++i) compare(random_case(random, spec), DType::f32, 1e-4);
}

TEST(MixerCuda, AnyShapeInBf16) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const MixerSpec& spec : all_specs())
    for (int i = 0; i < 3; ++i) compare(random_case(random, spec), DType::bf16, 1e-2);
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
        limits.states = false;
        limits.strongest_decay = strongest;
        compare(random_case(random, spec, limits), DType::bf16, 1e-2, false);
      }
    }
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
    limits.states = limits.boundaries = false;
    limits.strongest_decay = 0.02;
    compare(random_case(random, spec, limits), DType::bf16, 1e-2, false);
  }
}

TEST(MixerCuda, ZeroKeysGiveZerosNotNaN) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (const MixerSpec& spec : all_specs()) {
    CaseLimits limits;
    limits.dim = 64;
    limits.states = false;
    MixerCase c = random_case(random, spec, limits);
    fill(c.inputs.k, 0);
    const MixerRun run = run_on_gpu(cast(c, DType::bf16), false);
    for (const Tensor& x : {run.result.out, run.gradients.q, run.gradients.k, run.gradients.v})
      EXPECT_TRUE(all_finite(x)) << describe(c);
  }
}

TEST(MixerCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  CaseLimits limits;
  limits.dim = 64;
  limits.shortest = 300;
  limits.longest = 600;
  limits.states = false;
  for (const MixerSpec& spec : all_specs()) {
    const MixerCase c = cast(random_case(random, spec, limits), DType::bf16);
    const MixerRun a = run_on_gpu(c, false), b = run_on_gpu(c, false);
    EXPECT_TRUE(same_bits(a.result.out, b.result.out));
    EXPECT_TRUE(same_bits(a.gradients.q, b.gradients.q));
    EXPECT_TRUE(same_bits(a.gradients.k, b.gradients.k));
    EXPECT_TRUE(same_bits(a.gradients.v, b.gradients.v));
  }
}

}  // namespace
}  // namespace furious
