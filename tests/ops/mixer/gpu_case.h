// Calls of given sizes for the tests of kernels of the parallel form on a GPU, and their errors against the oracle.
#pragma once

#include "cuda.h"
#include "ops/mixer/mixer_case.h"

namespace furious::testing {

struct Sizes {
  int64_t qk_dim, v_dim;
  int64_t length;
  int64_t batch = 1, q_heads = 1, k_heads = 1, v_heads = 1;
  bool boundaries = false;
  double strongest_decay = 0.5;
};

// Every score, norm and decay: none, falling, and one that may grow.
inline std::vector<MixerSpec> gpu_specs() {
  std::vector<MixerSpec> specs;
  const std::vector<std::pair<Score, int>> scores{{Score::linear, 0}, {Score::squared, 0}, {Score::exponential, 0},
                                                  {Score::power, 3},  {Score::power, 4},   {Score::series, 1},
                                                  {Score::series, 2}, {Score::series, 3},  {Score::series, 4}};
  for (const auto& [score, degree] : scores)
    for (const Norm norm : {Norm::none, Norm::sum})
      for (const int decay : {0, 1, 2}) specs.push_back({score, decay > 0, norm, 0, degree, decay == 2});
  return specs;
}

inline MixerCase make_case(Random& random, const MixerSpec& spec, const Sizes& sizes, DType dtype) {
  MixerCase c;
  c.spec = spec;
  c.heads = std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads});
  // Under the sum norm, polynomial scores that cancel or vanish are ill-conditioned in any precision.
  const bool positive = spec.score != Score::exponential && spec.norm == Norm::sum;
  const auto normal = [&](int64_t heads, int64_t dim, bool absolute) {
    const Tensor x = random.normal_tensor({sizes.batch, sizes.length, heads, dim});
    for (int64_t i = 0; absolute && i < x.elements(); ++i) x.data<float>()[i] = std::fabs(x.data<float>()[i]);
    return x;
  };
  c.inputs.q = normal(sizes.q_heads, sizes.qk_dim, positive);
  c.inputs.k = normal(sizes.k_heads, sizes.qk_dim, positive);
  c.inputs.v = normal(sizes.v_heads, sizes.v_dim, false);
  c.out_gradient = normal(c.heads, sizes.v_dim, false);
  if (spec.decay)
    c.inputs.log_decay = random.uniform_tensor({sizes.batch, sizes.length, c.heads}, -sizes.strongest_decay,
                                               spec.signed_decay ? sizes.strongest_decay : 0);
  if (sizes.boundaries) {
    std::vector<int32_t> starts{0};
    for (int64_t t = 1; t < sizes.batch * sizes.length; ++t)
      if (random.integer(0, 39) == 0) starts.push_back(static_cast<int32_t>(t));
    c.inputs.boundaries = int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
  }
  return cast(c, dtype);
}

inline MixerCase on_gpu(const MixerCase& c) {
  MixerCase there = c;
  for (Tensor* x : {&there.inputs.q, &there.inputs.k, &there.inputs.v, &there.inputs.log_decay,
                    &there.inputs.initial_state, &there.out_gradient})
    if (*x) *x = to_gpu(*x);
  return there;
}

// The same numbers in rows that begin at odd places.
inline Tensor within_wider_rows(const Tensor& x) {
  const int64_t width = x.size(2) * x.size(3);
  const Tensor rows = Tensor::empty({x.size(0), x.size(1), width + 6}, x.dtype(), x.device());
  const Tensor there = rows.slice(-1, 3, width).split_dim(-1, x.size(2), x.size(3));
  copy(there, x);
  return there;
}

inline MixerRun run_there(const MixerCase& there, const MixerOptions& forward, const MixerOptions& backward) {
  MixerRun run;
  run.result = mixer_forward(there.spec, there.inputs, forward);
  run.gradients = mixer_backward(there.spec, there.inputs, run.result, there.out_gradient, {}, backward);
  for (Tensor* x : {&run.result.out, &run.result.normalizer, &run.result.maximum, &run.gradients.q, &run.gradients.k,
                    &run.gradients.v, &run.gradients.log_decay, &run.gradients.initial_state})
    if (*x) *x = to_cpu(*x);
  return run;
}
inline MixerRun run_on_gpu(const MixerCase& c, const MixerOptions& options) {
  return run_there(on_gpu(c), options, options);
}

// The oracle without the final state, which costs more than all the rest where states are large.
inline MixerRun run_oracle_without_state(const MixerCase& c) {
  const MixerCase exact = cast(c, DType::f64);
  const MixerOptions reference{Form::reference};
  MixerRun run;
  run.result = mixer_forward(exact.spec, exact.inputs, reference);
  run.gradients = mixer_backward(exact.spec, exact.inputs, run.result, exact.out_gradient, {}, reference);
  return run;
}

struct Errors {
  double out, q, k, v, log_decay = 0;
};

inline Errors errors_of(const MixerCase& c, const MixerRun& actual, const MixerRun& expected) {
  // Under the sum norm gradients are differences that may cancel, to nothing for a document of one token: what came in
  // sets the scale.
  double least = 0;
  for (const double g : to_doubles(c.out_gradient)) least += g * g;
  const double floor = c.spec.norm == Norm::sum ? std::sqrt(least) : 1e-30;
  Errors errors{relative_error(actual.result.out, expected.result.out).worst,
                relative_error(actual.gradients.q, expected.gradients.q, floor).worst,
                relative_error(actual.gradients.k, expected.gradients.k, floor).worst,
                relative_error(actual.gradients.v, expected.gradients.v, floor).worst};
  // A sum over all later tokens: their errors add up, their values may cancel.
  if (c.spec.decay)
    errors.log_decay = relative_error(actual.gradients.log_decay, expected.gradients.log_decay,
                                      c.spec.norm == Norm::sum ? std::sqrt(least) : 1e-6);  // of one token it is 0
  return errors;
}

inline void expect_within(const Errors& errors, double tolerance) {
  EXPECT_LE(errors.out, tolerance) << "out";
  EXPECT_LE(errors.q, tolerance) << "dq";
  EXPECT_LE(errors.k, tolerance) << "dk";
  EXPECT_LE(errors.v, tolerance) << "dv";
  EXPECT_LE(errors.log_decay, 4 * tolerance) << "da";
}

inline void expect_same_bits(const MixerRun& a, const MixerRun& b) {
  EXPECT_TRUE(same_bits(a.result.out, b.result.out));
  EXPECT_TRUE(same_bits(a.gradients.q, b.gradients.q));
  EXPECT_TRUE(same_bits(a.gradients.k, b.gradients.k));
  EXPECT_TRUE(same_bits(a.gradients.v, b.gradients.v));
  if (a.gradients.log_decay) {
    EXPECT_TRUE(same_bits(a.gradients.log_decay, b.gradients.log_decay));
  }
}

// Of a case on the GPU: results have the same bits where rows cannot be written 16 bytes at a time.
inline void expect_same_bits_in_unaligned_results(const MixerCase& there, const MixerOptions& options,
                                                  std::string_view kernel) {
  const MixerRun expected = run_there(there, options, options);
  MixerResult into_result;
  const int64_t count = expected.result.out.elements();
  into_result.out = Tensor::empty({count + 1}, expected.result.out.dtype(), kGpu)
                        .slice(0, 1, count)
                        .view(expected.result.out.shape());
  const MixerResult result = mixer_forward(there.spec, there.inputs, options, into_result);
  EXPECT_EQ(result.kernel, kernel);
  EXPECT_EQ(expected.result.kernel, kernel);
  EXPECT_TRUE(same_bits(to_cpu(result.out), to_cpu(expected.result.out)));
  const MixerGradients into{
      within_wider_rows(there.inputs.q), within_wider_rows(there.inputs.k), within_wider_rows(there.inputs.v), {}, {}};
  mixer_backward(there.spec, there.inputs, result, there.out_gradient, {}, options, into);
  EXPECT_TRUE(same_bits(to_cpu(into.q), to_cpu(expected.gradients.q)));
  EXPECT_TRUE(same_bits(to_cpu(into.k), to_cpu(expected.gradients.k)));
  EXPECT_TRUE(same_bits(to_cpu(into.v), to_cpu(expected.gradients.v)));
}

// The same where rows of inputs cannot be read 16 bytes at a time either.
inline void expect_same_bits_in_wider_rows(const MixerCase& there, const MixerOptions& options,
                                           std::string_view kernel) {
  MixerCase odd = there;
  for (Tensor* x : {&odd.inputs.q, &odd.inputs.k, &odd.inputs.v, &odd.out_gradient}) *x = within_wider_rows(*x);
  const MixerRun a = run_there(there, options, options), b = run_there(odd, options, options);
  EXPECT_EQ(b.result.kernel, kernel);
  expect_same_bits(a, b);
  expect_same_bits_in_unaligned_results(there, options, kernel);
}

}  // namespace furious::testing
