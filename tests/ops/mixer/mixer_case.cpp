#include "ops/mixer/mixer_case.h"

namespace furious::testing {
namespace {

// [batch, length, heads, dim] as a view into a wider tensor, as q, k and v lie in a fused projection.
Tensor strided_normal(Random& random, int64_t batch, int64_t length, int64_t heads, int64_t dim,
                      bool non_negative = false) {
  const int64_t before = random.integer(0, 9);
  const int64_t after = random.integer(0, 9);
  const Tensor wide = random.normal_tensor({batch, length, before + heads * dim + after});
  for (int64_t i = 0; non_negative && i < wide.elements(); ++i)
    wide.data<float>()[i] = std::fabs(wide.data<float>()[i]);
  return wide.slice(2, before, heads * dim).split_dim(2, heads, dim);
}

Tensor random_boundaries(Random& random, int64_t tokens) {
  std::vector<int32_t> starts;
  for (int64_t t = 0; t < tokens; ++t)
    if (random.integer(0, 15) == 0) starts.push_back(static_cast<int32_t>(t));
  if (starts.empty()) starts.push_back(0);
  return int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
}

}  // namespace

std::vector<MixerSpec> all_specs() {
  std::vector<MixerSpec> specs;
  for (Score score : {Score::linear, Score::squared, Score::exponential})
    for (bool decay : {false, true})
      for (Norm norm : {Norm::none, Norm::sum}) specs.push_back({score, decay, norm});
  return specs;
}

std::vector<MixerSpec> further_specs() {
  std::vector<MixerSpec> specs;
  const auto add = [&](Score score, int degree, bool decay, bool is_signed) {
    for (Norm norm : {Norm::none, Norm::sum}) specs.push_back({score, decay, norm, 0, degree, is_signed});
  };
  for (Score score : {Score::linear, Score::squared, Score::exponential}) add(score, 0, true, true);
  for (const auto& [score, first] : {std::pair{Score::power, 3}, {Score::series, 1}})
    for (int degree = first; degree <= kLargestDegree; ++degree)
      for (const auto& [decay, is_signed] : {std::pair{false, false}, {true, false}, {true, true}})
        add(score, degree, decay, is_signed);
  return specs;
}

std::vector<MixerSpec> every_spec() {
  std::vector<MixerSpec> specs = all_specs();
  for (const MixerSpec& spec : further_specs()) specs.push_back(spec);
  return specs;
}

bool has_state(const MixerSpec& spec, int64_t qk_dim) {
  return state_rows(spec, qk_dim) > 0;
}

bool has_state(const MixerCase& c) {
  return has_state(c.spec, c.inputs.q.size(3));
}

MixerCase random_case(Random& random, const MixerSpec& spec, const CaseLimits& limits) {
  MixerCase c;
  c.spec = spec;
  const int64_t batch = random.integer(1, 2);
  const int64_t length = random.integer(limits.shortest, limits.longest);
  c.heads = random.pick<int64_t>({1, 2, 4, 6});
  const auto divisor = [&] {
    int64_t heads = c.heads;
    while (c.heads % (heads = random.integer(1, c.heads)) != 0) continue;
    return heads;
  };
  int64_t q_heads = divisor(), k_heads = divisor(), v_heads = divisor();
  (random.coin() ? v_heads : q_heads) = c.heads;
  int64_t qk_dim = limits.dim > 0 ? limits.dim : random.integer(8, limits.largest_dim);
  // Limits the cost of the oracle.
  while (limits.dim == 0 && qk_dim > 8 && spec.degree > 0 && state_rows(spec, qk_dim) * length > 40'000) --qk_dim;
  const int64_t v_dim = limits.dim > 0 ? limits.dim : random.integer(8, limits.largest_dim);
  // Under the sum norm, scores that cancel (linear) or vanish (squared) are ill-conditioned in any precision.
  const bool non_negative = spec.score != Score::exponential && spec.norm == Norm::sum;
  c.inputs.q = strided_normal(random, batch, length, q_heads, qk_dim, non_negative);
  c.inputs.k = strided_normal(random, batch, length, k_heads, qk_dim, non_negative);
  c.inputs.v = strided_normal(random, batch, length, v_heads, v_dim);
  if (spec.decay)
    c.inputs.log_decay = random
                             .uniform_tensor({batch, length, c.heads + 1}, -limits.strongest_decay,
                                             spec.signed_decay ? limits.strongest_decay : 0)
                             .slice(2, 1, c.heads);
  if (limits.boundaries && random.coin()) c.inputs.boundaries = random_boundaries(random, batch * length);
  if (has_state(spec, qk_dim)) {
    const Shape state{batch, c.heads, state_rows(spec, qk_dim), state_columns(spec, v_dim)};
    // A state of actual tokens: its normalizer column is consistent with its features.
    if (limits.states && random.coin()) {
      MixerInputs past = c.inputs;
      past.boundaries = {};
      MixerOptions options{Form::reference, 0, true};
      c.inputs.initial_state = mixer_forward(spec, past, options).final_state;
    }
    if (limits.final_gradient)
      c.final_state_gradient = random.normal_tensor(state, 1 / std::sqrt(static_cast<double>(state[2])));
  }
  c.out_gradient = random.normal_tensor({batch, length, c.heads, v_dim});
  return c;
}

std::string describe(const MixerCase& c) {
  return fmt::format("{}; q {} k {} v {}{}{}", to_string(c.spec), to_string(c.inputs.q.shape()),
                     to_string(c.inputs.k.shape()), to_string(c.inputs.v.shape()),
                     c.inputs.boundaries ? ", boundaries" : "", c.inputs.initial_state ? ", initial state" : "");
}

MixerCase cast(const MixerCase& c, DType dtype) {
  const DType accumulator = dtype == DType::f64 ? DType::f64 : DType::f32;
  MixerCase out = c;
  out.inputs.q = to_dtype(c.inputs.q, dtype);
  out.inputs.k = to_dtype(c.inputs.k, dtype);
  out.inputs.v = to_dtype(c.inputs.v, dtype);
  out.out_gradient = to_dtype(c.out_gradient, dtype);
  if (c.inputs.log_decay) out.inputs.log_decay = to_dtype(c.inputs.log_decay, accumulator);
  if (c.inputs.initial_state) out.inputs.initial_state = to_dtype(c.inputs.initial_state, accumulator);
  if (c.final_state_gradient) out.final_state_gradient = to_dtype(c.final_state_gradient, accumulator);
  return out;
}

MixerRun run(const MixerCase& c, const MixerOptions& options) {
  MixerOptions with_state = options;
  with_state.final_state = has_state(c);
  MixerRun out;
  out.result = mixer_forward(c.spec, c.inputs, with_state);
  out.gradients = mixer_backward(c.spec, c.inputs, out.result, c.out_gradient, c.final_state_gradient, with_state);
  return out;
}

MixerRun run_oracle(const MixerCase& c) {
  return run(cast(c, DType::f64), {Form::reference});
}

double worst_row(const Tensor& actual, const Tensor& expected, double floor) {
  const std::vector<double> a = to_doubles(actual), e = to_doubles(expected);
  const auto width = static_cast<size_t>(expected.size(-1));
  double worst = 0;
  for (size_t i = 0; i < e.size(); i += width) {
    const auto row = [&](const std::vector<double>& x) { return std::vector<double>(&x[i], &x[i] + width); };
    double norm = 0;
    for (double x : row(e)) norm += x * x;
    worst = std::max(worst, relative_error(row(a), row(e), std::max(0.0, floor - std::sqrt(norm))).all);
  }
  return worst;
}

void expect_close(const MixerRun& actual, const MixerRun& expected, double tolerance) {
  const auto close = [&](const char* what, const Tensor& a, const Tensor& e) {
    ASSERT_EQ(a.defined(), e.defined()) << what;
    if (a) {
      // Numbers are of size 1; where the true gradient vanishes (a document of one token), rounding is measured by
      // that.
      EXPECT_LE(relative_error(a, e, 0.1 * std::sqrt(static_cast<double>(e.elements()))), tolerance) << what;
    }
  };
  close("out", actual.result.out, expected.result.out);
  close("final_state", actual.result.final_state, expected.result.final_state);
  close("dq", actual.gradients.q, expected.gradients.q);
  close("dk", actual.gradients.k, expected.gradients.k);
  close("dv", actual.gradients.v, expected.gradients.v);
  close("da", actual.gradients.log_decay, expected.gradients.log_decay);
  close("d initial_state", actual.gradients.initial_state, expected.gradients.initial_state);
}

}  // namespace furious::testing
