#include "ops/mixer/mixer.h"

#include <hwy/targets.h>

#include <numeric>
#include <set>

#include "base/build_info.h"
#include "base/parallel.h"
#include "ops/mixer/cost.h"
#include "ops/mixer/mixer_case.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kTolerance = 1e-4;

std::vector<MixerSpec> specs_with_state() {
  std::vector<MixerSpec> specs;
  for (const MixerSpec& spec : every_spec())
    if (has_state(spec, kSmallestDim)) specs.push_back(spec);
  return specs;
}

// da of a single token is 0, the difference of two large sums; of a high degree they are too large for f32.
CaseLimits any_length(const MixerSpec& spec) {
  CaseLimits limits;
  limits.shortest = spec.degree > 2 ? 4 : 1;
  return limits;
}

// Both fast forms of a case, the chunked one with a chunk of a random size.
void expect_all_forms_close(Random& random, const MixerCase& c, const MixerRun& expected, double tolerance) {
  {
    SCOPED_TRACE("parallel: " + describe(c));
    expect_close(run(c, {Form::parallel}), expected, tolerance);
  }
  if (!has_state(c)) return;
  const int64_t chunk = random.integer(1, c.inputs.q.size(1) + 3);
  SCOPED_TRACE(fmt::format("chunks of {}: {}", chunk, describe(c)));
  expect_close(run(c, {Form::chunked, chunk}), expected, tolerance);
}

TEST(Mixer, FormsAgreeWithOracle) {
  Random random(1);
  for (const MixerSpec& spec : every_spec()) {
    for (int i = 0; i < (spec.degree > 0 ? 2 : 8); ++i) {
      const MixerCase c = random_case(random, spec, any_length(spec));
      expect_all_forms_close(random, c, run_oracle(c), kTolerance);
    }
  }
}

// Longer than a block of queries, and wider than a panel of registers.
TEST(Mixer, FormsAgreeWithOracleOnLongAndWideInputs) {
  Random random(2);
  for (const MixerSpec& spec : every_spec()) {
    CaseLimits limits;
    limits.longest = has_state(spec) ? 420 : 250;
    limits.largest_dim = 20;
    limits.strongest_decay = 0.2;
    const MixerCase long_case = random_case(random, spec, limits);
    expect_all_forms_close(random, long_case, run_oracle(long_case), kTolerance);
    limits.shortest = 4;  // da of a single token is 0, the difference of two large sums
    limits.longest = 8;
    limits.largest_dim = 256;
    limits.states = false;
    const MixerCase wide_case = random_case(random, spec, limits);
    expect_all_forms_close(random, wide_case, run_oracle(wide_case), kTolerance);
  }
}

// Tests the code for every instruction set, also those below the best of this CPU.
TEST(Mixer, EveryInstructionSetAgreesWithOracle) {
  Random random(3);
  std::set<std::string> ran;
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(rest & -rest);
    if (!ran.insert(simd_target()).second) continue;  // not in the binary: Highway chooses another one
    SCOPED_TRACE(simd_target());
    for (const MixerSpec& spec : every_spec()) {
      const MixerCase c = random_case(random, spec, any_length(spec));
      expect_all_forms_close(random, c, run_oracle(c), kTolerance);
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  EXPECT_GE(ran.size(), 2u);  // plain x86-64 at least, and what this machine has
}

TEST(Mixer, StrongDecayAgreesWithOracle) {
  Random random(4);
  for (const MixerSpec& spec : every_spec()) {
    if (!spec.decay) continue;
    CaseLimits limits;
    limits.longest = 400;
    limits.strongest_decay = 50;
    const MixerCase c = random_case(random, spec, limits);
    expect_all_forms_close(random, c, run_oracle(c), kTolerance);
  }
}

TEST(Mixer, LowPrecisionInputsAgreeWithOracle) {
  Random random(5);
  for (DType dtype : {DType::bf16, DType::f16}) {
    // What grows leaves the range of f16.
    for (const MixerSpec& spec : dtype == DType::f16 ? all_specs() : every_spec()) {
      const MixerCase c = cast(random_case(random, spec), dtype);
      // δ = g·o is taken from the rounded output.
      expect_all_forms_close(random, c, run_oracle(c), dtype == DType::bf16 ? 2e-2 : 2e-3);
    }
  }
}

// The oracle's gradients against differences of its own forward pass, all in double.
TEST(Mixer, OracleGradientsMatchFiniteDifferences) {
  Random random(6);
  for (const MixerSpec& spec : every_spec()) {
    CaseLimits limits;
    limits.longest = 7;
    limits.largest_dim = 9;
    const MixerCase c = cast(random_case(random, spec, limits), DType::f64);
    for (int64_t i = 0; spec.decay && i < c.inputs.log_decay.elements(); ++i)
      c.inputs.log_decay.data<double>()[i] -= 0.01;  // a step to either side must still be a decay
    SCOPED_TRACE(describe(c));
    const MixerRun oracle = run(c, {Form::reference});
    std::vector<double> weights = to_doubles(c.out_gradient);
    if (c.final_state_gradient)
      for (double g : to_doubles(c.final_state_gradient)) weights.push_back(g);
    const auto expect_gradient = [&](const char* what, Tensor MixerInputs::*input, const Tensor& gradient) {
      const Tensor x = c.inputs.*input;
      if (!x) return;
      const Function forward = [&](const std::vector<double>& values) {
        MixerInputs moved = c.inputs;
        moved.*input = Tensor::empty(x.shape(), DType::f64);
        std::copy(values.begin(), values.end(), (moved.*input).data<double>());
        const MixerResult result = mixer_forward(c.spec, moved, {Form::reference, 0, has_state(c)});
        std::vector<double> y = to_doubles(result.out);
        if (result.final_state)
          for (double s : to_doubles(result.final_state)) y.push_back(s);
        return y;
      };
      const std::vector<double> at = to_doubles(x), exact = to_doubles(gradient);
      if (state_rows(spec, c.inputs.q.size(3)) < 100) {
        EXPECT_LE(relative_error(exact, numeric_gradient(forward, at, weights), 1e-3), 1e-5) << what;
        return;
      }
      // A state too large to move number by number: along some directions.
      for (int i = 0; i < 3; ++i) {
        std::vector<double> direction(at.size());
        for (double& d : direction) d = random.normal();
        const auto moved = [&](double by) {
          std::vector<double> y = at;
          for (size_t j = 0; j < y.size(); ++j) y[j] += by * direction[j];
          return y;
        };
        const auto loss = [&](double by) {
          const std::vector<double> y = forward(moved(by));
          return std::inner_product(y.begin(), y.end(), weights.begin(), 0.0);
        };
        constexpr double kStep = 1e-5;
        const double slope = (loss(kStep) - loss(-kStep)) / (2 * kStep);
        const double expected = std::inner_product(exact.begin(), exact.end(), direction.begin(), 0.0);
        EXPECT_NEAR(slope, expected, 1e-5 * (1 + std::fabs(expected) + std::fabs(loss(0)))) << what;
      }
    };
    expect_gradient("dq", &MixerInputs::q, oracle.gradients.q);
    expect_gradient("dk", &MixerInputs::k, oracle.gradients.k);
    expect_gradient("dv", &MixerInputs::v, oracle.gradients.v);
    expect_gradient("da", &MixerInputs::log_decay, oracle.gradients.log_decay);
    expect_gradient("d initial_state", &MixerInputs::initial_state, oracle.gradients.initial_state);
  }
}

// The first `count` tokens of a case, or the rest.
MixerInputs part_of(const MixerInputs& in, int64_t begin, int64_t count) {
  MixerInputs part = in;
  for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v, &MixerInputs::log_decay})
    if (part.*x) part.*x = (part.*x).slice(1, begin, count);
  return part;
}

TEST(Mixer, SplitAndCarriedStateEqualsOnePass) {
  Random random(7);
  for (const MixerSpec& spec : specs_with_state()) {
    for (const Form form : {Form::parallel, Form::chunked}) {
      CaseLimits limits;
      limits.boundaries = false;
      limits.shortest = 2;
      MixerCase c = random_case(random, spec, limits);
      SCOPED_TRACE(describe(c));
      const MixerOptions options{form, 16, true};
      const MixerRun whole = run(c, options);
      const int64_t length = c.inputs.q.size(1);
      const int64_t cut = random.integer(1, length - 1);

      MixerCase first = c, second = c;
      first.inputs = part_of(c.inputs, 0, cut);
      second.inputs = part_of(c.inputs, cut, length - cut);
      first.out_gradient = c.out_gradient.slice(1, 0, cut);
      second.out_gradient = c.out_gradient.slice(1, cut, length - cut);
      second.inputs.initial_state = mixer_forward(spec, first.inputs, options).final_state;
      const MixerRun later = run(second, options);
      first.final_state_gradient = later.gradients.initial_state;
      const MixerRun earlier = run(first, options);

      const auto expect_joined = [&](const char* what, const Tensor& a, const Tensor& b, const Tensor& joined) {
        EXPECT_LE(relative_error(a, joined.slice(1, 0, cut), 1), kTolerance) << what << ", first part";
        EXPECT_LE(relative_error(b, joined.slice(1, cut, length - cut), 1), kTolerance) << what << ", second part";
      };
      expect_joined("out", earlier.result.out, later.result.out, whole.result.out);
      expect_joined("dq", earlier.gradients.q, later.gradients.q, whole.gradients.q);
      expect_joined("dk", earlier.gradients.k, later.gradients.k, whole.gradients.k);
      expect_joined("dv", earlier.gradients.v, later.gradients.v, whole.gradients.v);
      if (spec.decay)
        expect_joined("da", earlier.gradients.log_decay, later.gradients.log_decay, whole.gradients.log_decay);
      EXPECT_LE(relative_error(later.result.final_state, whole.result.final_state, 1), kTolerance);
    }
  }
}

TEST(Mixer, NothingLeaksAcrossBoundaries) {
  Random random(8);
  for (const MixerSpec& spec : every_spec()) {
    for (const Form form : {Form::parallel, Form::chunked}) {
      if (form == Form::chunked && !has_state(spec)) continue;
      CaseLimits limits;
      limits.boundaries = false;
      limits.states = false;
      limits.longest = 250;
      limits.shortest = 2;
      MixerCase c = random_case(random, spec, limits);
      SCOPED_TRACE(describe(c));
      const int64_t length = c.inputs.q.size(1);
      const int64_t cut = random.integer(1, length - 1);
      const int64_t batch = c.inputs.q.size(0);
      std::vector<int32_t> starts;
      for (int64_t b = 0; b < batch; ++b) starts.push_back(static_cast<int32_t>(b * length + cut));
      c.inputs.boundaries = int_tensor_of(starts, {batch});
      const MixerOptions options{form, 32};
      const Tensor before = to_dtype(run(c, options).result.out.slice(1, cut, length - cut), DType::f32);

      // Another first document; a gradient on the second document alone.
      for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v}) {
        const Tensor part = (c.inputs.*x).slice(1, 0, cut);
        copy(part, random.normal_tensor(part.shape(), 3));
      }
      fill(c.out_gradient, 0);
      const Tensor second = c.out_gradient.slice(1, cut, length - cut);
      copy(second, random.normal_tensor(second.shape()));
      c.final_state_gradient = {};
      const MixerRun after = run(c, options);
      EXPECT_TRUE(same_bits(before, to_dtype(after.result.out.slice(1, cut, length - cut), DType::f32)));
      for (const Tensor& gradient :
           {after.gradients.q, after.gradients.k, after.gradients.v, after.gradients.log_decay}) {
        if (!gradient) continue;
        for (double g : to_doubles(gradient.slice(1, 0, cut))) ASSERT_EQ(g, 0);
      }
    }
  }
}

TEST(Mixer, SameBitsOnEveryRunAndForEveryNumberOfThreads) {
  Random random(9);
  const int before = threads();
  for (const MixerSpec& spec : every_spec()) {
    CaseLimits limits;
    limits.longest = 500;
    const MixerCase c = random_case(random, spec, limits);
    SCOPED_TRACE(describe(c));
    const MixerOptions options{has_state(spec) ? Form::chunked : Form::parallel, 96};
    std::vector<MixerRun> runs;
    for (int count : {1, 2, 2, 7}) {
      set_threads(count);
      runs.push_back(run(c, options));
    }
    for (const MixerRun& other : runs) {
      EXPECT_TRUE(same_bits(other.result.out, runs[0].result.out));
      EXPECT_TRUE(same_bits(other.gradients.q, runs[0].gradients.q));
      EXPECT_TRUE(same_bits(other.gradients.k, runs[0].gradients.k));
      EXPECT_TRUE(same_bits(other.gradients.v, runs[0].gradients.v));
      if (spec.decay) {
        EXPECT_TRUE(same_bits(other.gradients.log_decay, runs[0].gradients.log_decay));
      }
    }
  }
  set_threads(before);
}

// One head and long spans: here the threads share the work inside a head.
TEST(Mixer, SameBitsForEveryNumberOfThreadsInsideAHead) {
  Random random(17);
  const int before = threads();
  for (const Form form : {Form::parallel, Form::chunked}) {
    MixerCase c;
    c.spec = mixer_spec("2mamba");
    c.inputs = {random.normal_tensor({1, 1500, 1, 64}),
                random.normal_tensor({1, 1500, 1, 64}),
                random.normal_tensor({1, 1500, 1, 64}),
                random.uniform_tensor({1, 1500, 1}, -0.01, 0),
                {},
                {}};
    c.out_gradient = random.normal_tensor({1, 1500, 1, 64});
    set_threads(1);
    const MixerRun alone = run(c, {form, 512});
    set_threads(3);
    const MixerRun shared = run(c, {form, 512});
    EXPECT_TRUE(same_bits(alone.result.out, shared.result.out));
    EXPECT_TRUE(same_bits(alone.result.final_state, shared.result.final_state));
    EXPECT_TRUE(same_bits(alone.gradients.q, shared.gradients.q));
    EXPECT_TRUE(same_bits(alone.gradients.k, shared.gradients.k));
    EXPECT_TRUE(same_bits(alone.gradients.v, shared.gradients.v));
    EXPECT_TRUE(same_bits(alone.gradients.log_decay, shared.gradients.log_decay));
  }
  set_threads(before);
}

// A key so large that its score overflows comes after all rows but one, which must not be affected.
TEST(Mixer, AHugeLaterKeyDoesNotReachEarlierRows) {
  Random random(18);
  for (const MixerSpec& spec : every_spec()) {
    MixerInputs in;
    in.q = random.uniform_tensor({1, 16, 1, 8}, 0.5, 1);
    in.k = random.uniform_tensor({1, 16, 1, 8}, 0.5, 1);
    in.v = random.normal_tensor({1, 16, 1, 8});
    if (spec.decay) in.log_decay = random.uniform_tensor({1, 16, 1}, -1, 0);
    const Tensor expected = mixer_forward(spec, in, {Form::parallel}).out;
    fill(in.k.slice(1, 15, 1), 1e30f);
    const MixerResult result = mixer_forward(spec, in, {Form::parallel});
    EXPECT_EQ(to_doubles(result.out.slice(1, 0, 15)), to_doubles(expected.slice(1, 0, 15))) << to_string(spec);
    Tensor gradient = Tensor::zeros({1, 16, 1, 8}, DType::f32);
    fill(gradient.slice(1, 0, 15), 1);
    const Tensor dq = mixer_backward(spec, in, result, gradient).q;
    EXPECT_TRUE(all_finite(dq.slice(1, 0, 15))) << to_string(spec);
  }
}

void expect_finite(const MixerRun& r) {
  EXPECT_TRUE(all_finite(r.result.out));
  for (const Tensor& x : {r.result.final_state, r.gradients.q, r.gradients.k, r.gradients.v, r.gradients.log_decay,
                          r.gradients.initial_state}) {
    if (x) {
      EXPECT_TRUE(all_finite(x));
    }
  }
}

TEST(Mixer, ExtremeInputsStayFinite) {
  Random random(10);
  for (const MixerSpec& spec : all_specs()) {
    for (const Form form : {Form::parallel, Form::chunked}) {
      if (form == Form::chunked && !has_state(spec)) continue;
      for (const double size : {1e4, 1e-20, 0.0}) {
        for (const double decay : {0.0, -50.0, -1e4}) {
          if (!spec.decay && decay != 0) continue;
          CaseLimits limits;
          limits.states = false;
          limits.longest = 100;
          MixerCase c = random_case(random, spec, limits);
          for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k, &MixerInputs::v}) {
            const Tensor& t = c.inputs.*x;
            std::vector<double> values = to_doubles(t);
            for (double& value : values) value *= size;
            copy(t, tensor_of(std::vector<float>(values.begin(), values.end()), t.shape()));
          }
          if (spec.decay) {
            c.inputs.log_decay = Tensor::empty(c.inputs.log_decay.shape(), DType::f32);
            fill(c.inputs.log_decay, static_cast<float>(decay));
          }
          SCOPED_TRACE(fmt::format("{}, inputs of {}, decay {}", describe(c), size, decay));
          const MixerRun r = run(c, {form, 16});
          expect_finite(r);
          if (size == 0.0 && spec.score != Score::exponential) {
            for (double o : to_doubles(r.result.out)) ASSERT_EQ(o, 0);
          }
        }
      }
    }
  }
}

// One zero key or query among others is no special case of the oracle either.
TEST(Mixer, ZeroKeysAndQueriesAgreeWithOracle) {
  Random random(11);
  for (const MixerSpec& spec : every_spec()) {
    MixerCase c = random_case(random, spec);
    const int64_t length = c.inputs.q.size(1);
    for (int64_t t = 0; t < length; t += 3) {
      const Tensor x = (random.coin() ? c.inputs.q : c.inputs.k).slice(1, t, 1);
      copy(x, Tensor::zeros(x.shape(), DType::f32));
    }
    expect_all_forms_close(random, c, run_oracle(c), kTolerance);
  }
}

// y, n and state by the recurrence in double: linear time, so the only oracle for long inputs. One head.
std::vector<double> recurrence(const MixerInputs& in, int64_t dim) {
  const int64_t length = in.q.size(1);
  const std::vector<double> q = to_doubles(in.q), k = to_doubles(in.k), v = to_doubles(in.v),
                            a = to_doubles(in.log_decay);
  std::vector<double> state(dim * dim * (dim + 1)), out;
  for (int64_t t = 0; t < length; ++t) {
    std::vector<double> y(dim + 1);
    const double decay = std::exp(a[t]);
    for (int64_t i = 0; i < dim; ++i) {
      for (int64_t j = 0; j < dim; ++j) {
        double* row = &state[(i * dim + j) * (dim + 1)];
        const double kk = k[t * dim + i] * k[t * dim + j];
        const double qq = q[t * dim + i] * q[t * dim + j] / static_cast<double>(dim);
        for (int64_t c = 0; c <= dim; ++c) {
          row[c] = row[c] * decay + kk * (c < dim ? v[t * dim + c] : 1.0);
          y[c] += qq * row[c];
        }
      }
    }
    for (int64_t c = 0; c < dim; ++c) out.push_back(y[c] / y[dim]);
  }
  return out;
}

// With decays this large a sum over all tokens in f32 has lost the differences that matter; chunk-local sums have not.
TEST(MixerSlow, LongInputsKeepTheirPrecision) {
  Random random(12);
  constexpr int64_t kLength = 131072;
  constexpr int64_t kDim = 8;
  const MixerSpec spec = mixer_spec("2mamba");
  MixerInputs in;
  in.q = random.normal_tensor({1, kLength, 1, kDim});
  in.k = random.normal_tensor({1, kLength, 1, kDim});
  in.v = random.normal_tensor({1, kLength, 1, kDim});
  in.log_decay = random.uniform_tensor({1, kLength, 1}, -0.3, 0);
  const std::vector<double> expected = recurrence(in, kDim);
  EXPECT_LE(relative_error(mixer_forward(spec, in, {Form::chunked}).out, expected), 1e-4);
  EXPECT_LE(relative_error(mixer_forward(spec, in, {Form::chunked, 1000}).out, expected), 1e-4);

  // The same decays as differences of one f32 sum over all tokens: the error that this test detects.
  MixerInputs rounded = in;
  rounded.log_decay = Tensor::empty(in.log_decay.shape(), DType::f32);
  float sum = 0;
  for (int64_t t = 0; t < kLength; ++t) {
    const float next = sum + in.log_decay.data<float>()[t];
    rounded.log_decay.data<float>()[t] = next - sum;
    sum = next;
  }
  EXPECT_GT(relative_error(mixer_forward(spec, rounded, {Form::chunked}).out, expected), 1e-4);
}

TEST(MixerSlow, WeakDecayOverLongInputsKeepsItsPrecision) {
  Random random(13);
  constexpr int64_t kLength = 131072;
  constexpr int64_t kDim = 8;
  MixerInputs in;
  in.q = random.normal_tensor({1, kLength, 1, kDim});
  in.k = random.normal_tensor({1, kLength, 1, kDim});
  in.v = random.uniform_tensor({1, kLength, 1, kDim}, 0, 2);
  in.log_decay = random.uniform_tensor({1, kLength, 1}, -1e-6, 0);
  EXPECT_LE(relative_error(mixer_forward(mixer_spec("2mamba"), in, {Form::chunked}).out, recurrence(in, kDim)), 1e-4);
}

TEST(MixerSlow, AMillionTokensStayFinite) {
  Random random(14);
  constexpr int64_t kLength = 1 << 20;
  for (const char* name : {"2mamba", "mamba2"}) {
    MixerInputs in;
    in.q = random.normal_tensor({1, kLength, 1, 8});
    in.k = random.normal_tensor({1, kLength, 1, 8});
    in.v = random.normal_tensor({1, kLength, 1, 8});
    in.log_decay = random.uniform_tensor({1, kLength, 1}, -1e-3, 0);
    const MixerSpec spec = mixer_spec(name);
    const MixerResult result = mixer_forward(spec, in);
    EXPECT_EQ(result.form, Form::chunked);
    EXPECT_TRUE(all_finite(result.out));
    const MixerGradients gradients = mixer_backward(spec, in, result, result.out);
    EXPECT_TRUE(all_finite(gradients.q));
    EXPECT_TRUE(all_finite(gradients.log_decay));
  }
}

TEST(Mixer, WritesGradientsIntoSlicesOfAFusedTensor) {
  Random random(15);
  const int64_t heads = 2, dim = 9, length = 33;
  const Variable fused(random.normal_tensor({1, length, 3 * heads * dim}), true);
  const Variable decay(random.uniform_tensor({1, length, heads}, -1, 0), true);
  Tape tape;
  const auto part = [&](int64_t i) -> Tape::Part {
    return [=](const Tensor& x) { return x.slice(2, i * heads * dim, heads * dim).split_dim(2, heads, dim); };
  };
  const std::vector<Variable> qkv = tape.parts(fused, {part(0), part(1), part(2)});
  const MixerSpec spec = mixer_spec("2mamba");
  const Variable out = mixer(tape, spec, qkv[0], qkv[1], qkv[2], decay);
  MixerCase c;
  c.spec = spec;
  c.inputs = {qkv[0].value(), qkv[1].value(), qkv[2].value(), decay.value(), {}, {}};
  c.out_gradient = random.normal_tensor({1, length, heads, dim});
  tape.backward(out, c.out_gradient);
  const MixerResult result = mixer_forward(spec, c.inputs);
  const MixerGradients expected = mixer_backward(spec, c.inputs, result, c.out_gradient);
  EXPECT_EQ(to_doubles(part(0)(fused.gradient())), to_doubles(expected.q));
  EXPECT_EQ(to_doubles(part(1)(fused.gradient())), to_doubles(expected.k));
  EXPECT_EQ(to_doubles(part(2)(fused.gradient())), to_doubles(expected.v));
  EXPECT_EQ(to_doubles(decay.gradient()), to_doubles(expected.log_decay));
}

TEST(Mixer, NamesOfThePaper) {
  EXPECT_EQ(mixer_spec("softmax"), (MixerSpec{Score::exponential, false, Norm::sum}));
  EXPECT_EQ(mixer_spec("2mamba"), (MixerSpec{Score::squared, true, Norm::sum}));
  EXPECT_EQ(mixer_spec("mamba2"), (MixerSpec{Score::linear, true, Norm::none}));
  expect_error([] { mixer_spec("2mama"); }, {"unknown mixer \"2mama\"", "did you mean \"2mamba\""});
  EXPECT_EQ(state_rows(mixer_spec("2mamba"), 64), 2080);
  EXPECT_EQ(state_columns(mixer_spec("2mamba"), 64), 65);
}

// ------------------------------------------------------------------------------------------------------- bad input

MixerInputs good_inputs() {
  Random random(16);
  return {random.normal_tensor({2, 5, 4, 8}),
          random.normal_tensor({2, 5, 2, 8}),
          random.normal_tensor({2, 5, 4, 10}),
          random.uniform_tensor({2, 5, 4}, -1, 0),
          {},
          {}};
}

void expect_refused(const MixerSpec& spec, const MixerInputs& inputs, const MixerOptions& options,
                    std::vector<std::string> parts) {
  parts.push_back("mixer_forward");
  expect_error([&] { mixer_forward(spec, inputs, options); }, parts);
}

TEST(MixerBadInput, NamesOperationAndArgument) {
  const MixerSpec spec = mixer_spec("2mamba");
  ASSERT_NO_THROW(mixer_forward(spec, good_inputs()));
  const auto with = [](auto&& change) {
    MixerInputs in = good_inputs();
    change(in);
    return in;
  };
  expect_refused(spec, with([](MixerInputs& in) { in.q = {}; }), {}, {"\"q\"", "missing"});
  expect_refused(spec, with([](MixerInputs& in) { in.q = in.q.select(1, 0); }), {}, {"\"q\"", "rank 3", "rank 4"});
  expect_refused(spec, with([](MixerInputs& in) { in.k = in.k.slice(1, 0, 4); }), {},
                 {"\"k\"", "[2, 4, 2, 8]", "[2, 5, any, 8]"});
  expect_refused(spec, with([](MixerInputs& in) { in.v = in.v.slice(0, 0, 1); }), {}, {"\"v\"", "[1, 5, 4, 10]"});
  expect_refused(spec, with([](MixerInputs& in) { in.k = in.k.slice(3, 0, 7); }), {}, {"\"k\"", "[2, 5, 2, 7]"});
  expect_refused(spec, with([](MixerInputs& in) { in.v = in.v.slice(3, 0, 7); }), {}, {"\"v\"", "7", "8 to 256"});
  expect_refused(spec, with([](MixerInputs& in) { in.k = to_dtype(in.k, DType::bf16); }), {}, {"\"k\"", "bf16", "f32"});
  expect_refused(spec, with([](MixerInputs& in) { in.q = to_dtype(in.q, DType::f64); }), {}, {"\"q\"", "f64"});
  expect_refused(spec, with([](MixerInputs& in) {
                   in.v = Tensor::wrap(in.v.raw(), in.v.shape(), DType::f32, {DeviceKind::cuda, 0});
                 }),
                 {}, {"\"v\"", "cuda:0", "cpu"});
  expect_refused(spec, with([](MixerInputs& in) {
                   in.k = Random(1).normal_tensor({2, 5, 3, 8});
                 }),
                 {}, {"\"k\"", "3 heads", "divisor of 4"});
  expect_refused(spec, with([](MixerInputs& in) { in.log_decay = {}; }), {}, {"\"log_decay\"", "missing"});
  expect_refused(spec, with([](MixerInputs& in) { in.log_decay = in.log_decay.slice(2, 0, 3); }), {},
                 {"\"log_decay\"", "[2, 5, 3]", "expected 4 or a divisor"});
  expect_refused(spec, with([](MixerInputs& in) { in.log_decay.data<float>()[7] = 0.5f; }), {},
                 {"\"log_decay\"", "0.5", "[0, 1, 3]", "at most 0"});
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()})
    expect_refused(spec, with([bad](MixerInputs& in) { in.log_decay.data<float>()[0] = bad; }), {},
                   {"\"log_decay\"", "[0, 0, 0]", "finite"});
  expect_refused(mixer_spec("softmax"), good_inputs(), {}, {"\"log_decay\"", "no decay"});
  expect_refused(mixer_spec("2mamba-e"), good_inputs(), {Form::chunked}, {"\"form\"", "chunked", "exponential"});
  expect_refused(mixer_spec("2mamba-e"), good_inputs(), {Form::parallel, 0, true}, {"\"final_state\"", "exponential"});
  expect_refused(spec, with([](MixerInputs& in) {
                   in.initial_state = Tensor::zeros({2, 4, 36, 10}, DType::f32);
                 }),
                 {}, {"\"initial_state\"", "[2, 4, 36, 10]", "[2, 4, 36, 11]"});
  expect_refused(spec, with([](MixerInputs& in) {
                   in.boundaries = int_tensor_of({4, 3}, {2});
                 }),
                 {}, {"\"boundaries\"", "3", "increasing"});
  expect_refused(spec, with([](MixerInputs& in) { in.boundaries = int_tensor_of({10}, {1}); }), {},
                 {"\"boundaries\"", "10"});
  expect_refused({Score::squared, true, Norm::sum, -1}, good_inputs(), {}, {"\"scale\"", "-1"});
}

TEST(MixerBadInput, BackwardChecksItsOwnArguments) {
  const MixerSpec spec = mixer_spec("2mamba");
  const MixerInputs in = good_inputs();
  const MixerResult result = mixer_forward(spec, in);
  const Tensor g = Tensor::zeros({2, 5, 4, 10}, DType::f32);
  ASSERT_NO_THROW(mixer_backward(spec, in, result, g));
  expect_error([&] { mixer_backward(spec, in, result, g.slice(1, 0, 4)); },
               {"mixer_backward", "\"out_gradient\"", "[2, 4, 4, 10]", "[2, 5, 4, 10]"});
  expect_error(
      [&] {
        mixer_backward(spec, in, result, g, Tensor::zeros({2, 4, 36, 11}, DType::f32));
      },
      {"mixer_backward", "\"result.final_state\"", "missing"});
  MixerGradients into;
  into.k = Tensor::zeros({2, 5, 4, 8}, DType::f32);
  const Tensor before = to_dtype(into.k, DType::f32);
  expect_error([&] { mixer_backward(spec, in, result, g, {}, {}, into); },
               {"\"into.k\"", "[2, 5, 4, 8]", "[2, 5, 2, 8]"});
  EXPECT_TRUE(same_bits(before, into.k));
}

}  // namespace
}  // namespace furious
