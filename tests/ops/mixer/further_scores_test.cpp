// Scores of higher degree (power, series) and masks that may grow (signed decay).
#include <array>

#include "ops/mixer/features.h"
#include "ops/mixer/mixer_case.h"
#include "ops/mixer/polynomial.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kTolerance = 1e-4;

void expect_rows_close(const MixerCase& c, const MixerRun& actual, const MixerRun& expected) {
  EXPECT_EQ(actual.result.kernel, "cpu");
  EXPECT_EQ(actual.result.form, Form::parallel);
  EXPECT_EQ(expected.result.kernel, "reference");
  const auto close = [](const char* what, const Tensor& a, const Tensor& e, double floor) {
    EXPECT_LE(worst_row(a, e, floor), kTolerance) << what;
  };
  close("out", actual.result.out, expected.result.out, 0.1);
  close("dq", actual.gradients.q, expected.gradients.q, 1);
  close("dk", actual.gradients.k, expected.gradients.k, 1);
  close("dv", actual.gradients.v, expected.gradients.v, 1);
  if (!c.spec.decay) return;
  // da_t is a sum over all later tokens, whose largest sets its error: all tokens of a head make one row.
  for (int64_t h = 0; h < c.heads; ++h)
    close("da", actual.gradients.log_decay.select(2, h), expected.gradients.log_decay.select(2, h), 1);
}

TEST(FurtherScores, MatchHandComputedValues) {
  // One head; q·k/√8 = s for every pair; v_t is 10^t in its first place.
  const auto out = [](const MixerSpec& spec, double s, std::vector<float> decays, Form form) {
    const auto length = static_cast<int64_t>(decays.size());
    MixerInputs in;
    in.q = Tensor::zeros({1, length, 1, 8}, DType::f32);
    in.k = Tensor::zeros({1, length, 1, 8}, DType::f32);
    in.v = Tensor::zeros({1, length, 1, 8}, DType::f32);
    for (int64_t t = 0; t < length; ++t) {
      in.q.data<float>()[t * 8] = static_cast<float>(s * std::sqrt(8.0));
      in.k.data<float>()[t * 8] = 1;
      in.v.data<float>()[t * 8] = std::pow(10.0f, static_cast<float>(t));
    }
    if (spec.decay) in.log_decay = tensor_of(decays, {1, length, 1});
    return to_doubles(mixer_forward(spec, in, {form}).out)[static_cast<size_t>(length - 1) * 8];
  };
  for (const Form form : {Form::reference, Form::parallel}) {
    const auto expect = [&](const MixerSpec& spec, double s, const std::vector<float>& decays, double expected) {
      EXPECT_NEAR(out(spec, s, decays, form) / expected, 1, 1e-5) << to_string(spec) << ", " << name_of(form);
    };
    const auto spec = [](Score score, int degree, bool decay, Norm norm = Norm::none) {
      return MixerSpec{score, decay, norm, 0, degree, decay};
    };
    expect(spec(Score::power, 3, false), -2, {0}, -8);
    expect(spec(Score::power, 4, false), -2, {0}, 16);
    expect(spec(Score::series, 1, false), 2, {0}, 3);
    expect(spec(Score::series, 2, false), 2, {0}, 5);
    expect(spec(Score::series, 3, false), 2, {0}, 5 + 4.0 / 3);
    expect(spec(Score::series, 4, false), 2, {0}, 7);
    // Growth: the first token counts e² times as much, or e⁶⁰ times and no more.
    const double e2 = std::exp(2.0), e60 = std::exp(60.0);
    expect(spec(Score::power, 3, true), 2, {5, 2}, 8 * (e2 + 10));
    expect(spec(Score::linear, 0, true, Norm::sum), 2, {5, 2}, (e2 + 10) / (e2 + 1));
    expect(spec(Score::exponential, 0, true, Norm::sum), 2, {5, 2}, (e2 + 10) / (e2 + 1));
    expect(spec(Score::exponential, 0, true), 2, {5, 2}, std::exp(2.0) * (e2 + 10));
    expect(spec(Score::squared, 0, true), 2, {5, 70}, 4 * e60);
    expect(spec(Score::series, 2, true), 2, {1, 50, 50}, 5 * (e60 + 10 * std::exp(50.0)));
    expect(spec(Score::series, 2, true), 2, {1, 50, 50, -45}, 5 * (std::exp(55.0) + 10 * std::exp(5.0)));
  }
}

TEST(FurtherScores, RowsAgreeWithOracle) {
  Random random(1);
  for (const MixerSpec& spec : further_specs()) {
    for (int i = 0; i < 4; ++i) {
      CaseLimits limits;
      limits.strongest_decay = random.pick<double>({0.05, 0.4});
      const MixerCase c = random_case(random, spec, limits);
      SCOPED_TRACE(describe(c));
      expect_rows_close(c, run(c, {Form::parallel}), run_oracle(c));
    }
  }
}

// The mask grows past the largest exponent and falls again, in documents that begin anywhere.
TEST(FurtherScores, GrowthPastSaturationAgreesWithOracle) {
  Random random(2);
  for (const MixerSpec& spec : further_specs()) {
    if (!spec.signed_decay) continue;
    for (const int64_t longest : {60, 250}) {  // more than a block of queries
      CaseLimits limits;
      limits.shortest = longest / 2;
      limits.longest = longest;
      limits.largest_dim = 12;
      const MixerCase c = random_case(random, spec, limits);
      const Tensor decays = c.inputs.log_decay;
      double largest = 0;
      for (int64_t b = 0; b < decays.size(0); ++b)
        for (int64_t h = 0; h < decays.size(2); ++h) {
          double sum = 0, lowest = 0;
          for (int64_t t = 0; t < decays.size(1); ++t) {
            const double a = random.uniform(1, 7) * ((t / 25) % 2 == 0 ? 1.0 : -1.0);
            decays.data<float>()[b * decays.stride(0) + t * decays.stride(1) + h * decays.stride(2)] =
                static_cast<float>(a);
            sum += a;
            lowest = std::min(lowest, sum);
            largest = std::max(largest, sum - lowest);
          }
        }
      ASSERT_GT(largest, 60);
      SCOPED_TRACE(describe(c));
      expect_rows_close(c, run(c, {Form::parallel}), run_oracle(c));
    }
  }
}

TEST(FurtherScores, OracleGradientsMatchFiniteDifferencesPastSaturation) {
  Random random(3);
  for (const MixerSpec& spec : further_specs()) {
    if (!spec.signed_decay) continue;
    CaseLimits limits;
    limits.shortest = limits.longest = 6;
    limits.largest_dim = 9;
    limits.boundaries = false;
    const MixerCase c = cast(random_case(random, spec, limits), DType::f64);
    // A = 3, 62, 64, 17, 1, 62: between the first token and the third and the fifth and the last the mask saturates,
    // and the last row has weights beside the largest that do not.
    constexpr std::array<double, 6> kDecays{3, 59, 2, -47, -16, 61};
    const Tensor a = c.inputs.log_decay;
    for (int64_t i = 0; i < a.elements(); ++i)
      a.data<double>()[i] = kDecays[static_cast<size_t>(i / a.size(2) % 6)] + 0.01 * static_cast<double>(i % 7);
    SCOPED_TRACE(describe(c));
    const MixerRun oracle = run(c, {Form::reference});
    for (const auto& [what, input, gradient] : {std::tuple{"dq", &MixerInputs::q, oracle.gradients.q},
                                                {"dk", &MixerInputs::k, oracle.gradients.k},
                                                {"dv", &MixerInputs::v, oracle.gradients.v},
                                                {"da", &MixerInputs::log_decay, oracle.gradients.log_decay}}) {
      const Tensor x = c.inputs.*input;
      const Function forward = [&](const std::vector<double>& values) {
        MixerInputs moved = c.inputs;
        moved.*input = Tensor::empty(x.shape(), DType::f64);
        std::copy(values.begin(), values.end(), (moved.*input).data<double>());
        return to_doubles(mixer_forward(c.spec, moved, {Form::reference}).out);
      };
      EXPECT_LE(relative_error(gradient, numeric_gradient(forward, to_doubles(x), to_doubles(c.out_gradient)), 1e-3),
                1e-5)
          << what;
    }
  }
}

// Where f(0) is not 0, all keys of zero have the same weight.
TEST(FurtherScores, ZeroKeys) {
  Random random(4);
  for (const MixerSpec& spec : further_specs()) {
    if (spec.score == Score::exponential) continue;
    CaseLimits limits;
    limits.states = false;
    MixerCase c = random_case(random, spec, limits);
    fill(c.inputs.k, 0);
    SCOPED_TRACE(describe(c));
    const MixerRun r = run(c, {Form::parallel});
    expect_rows_close(c, r, run_oracle(c));
    if (spec.score == Score::series) continue;
    for (double o : to_doubles(r.result.out)) ASSERT_EQ(o, 0);
  }
}

TEST(FurtherScores, LargeAndSmallInputsStayFinite) {
  Random random(5);
  for (const MixerSpec& spec : further_specs()) {
    for (const double size : {100.0, 1e-10}) {
      for (const double decay : {-1e4, 0.0, 1e4}) {
        if (decay != 0 && !spec.signed_decay) continue;
        CaseLimits limits;
        limits.longest = 100;
        MixerCase c = random_case(random, spec, limits);
        for (Tensor MixerInputs::*x : {&MixerInputs::q, &MixerInputs::k}) {
          std::vector<double> values = to_doubles(c.inputs.*x);
          // Weights of e^60 leave less of the range of f32 to the scores.
          for (double& value : values) value *= decay > 0 ? std::min(size, 1.0) : size;
          c.inputs.*x = tensor_of(std::vector<float>(values.begin(), values.end()), (c.inputs.*x).shape());
        }
        if (spec.decay) {
          c.inputs.log_decay = Tensor::empty(c.inputs.log_decay.shape(), DType::f32);
          fill(c.inputs.log_decay, static_cast<float>(decay));
        }
        SCOPED_TRACE(fmt::format("{}, inputs of {}, decay {}", describe(c), size, decay));
        const MixerRun r = run(c, {});
        for (const Tensor& x : {r.result.out, r.gradients.q, r.gradients.k, r.gradients.v, r.gradients.log_decay}) {
          if (x) {
            EXPECT_TRUE(all_finite(x));
          }
        }
      }
    }
  }
}

TEST(FurtherScores, Names) {
  EXPECT_EQ(mixer_spec("2mamba-3"), (MixerSpec{Score::power, true, Norm::none, 0, 3}));
  EXPECT_EQ(mixer_spec("2mamba-4"), (MixerSpec{Score::power, true, Norm::sum, 0, 4}));
  EXPECT_EQ(mixer_spec("2mamba-series-2"), (MixerSpec{Score::series, true, Norm::sum, 0, 2}));
  EXPECT_EQ(mixer_spec("2mamba-series-4"), (MixerSpec{Score::series, true, Norm::sum, 0, 4}));
  EXPECT_EQ(mixer_spec("fox"), (MixerSpec{Score::exponential, true, Norm::sum}));
  EXPECT_EQ(to_string(mixer_spec("2mamba-3")), "power 3, decay, none");
}

// D: one row for every product of so many elements of x, or of [x, 1] for a series.
TEST(FurtherScores, RowsOfTheState) {
  const auto rows = [](Score score, int degree, int64_t dim) {
    return state_rows({score, true, Norm::sum, 0, degree}, dim);
  };
  EXPECT_EQ(rows(Score::linear, 0, 64), 64);
  EXPECT_EQ(rows(Score::squared, 0, 64), 64 * 65 / 2);
  EXPECT_EQ(rows(Score::series, 1, 64), 65);
  EXPECT_EQ(rows(Score::series, 2, 64), 65 * 66 / 2);
  EXPECT_EQ(rows(Score::series, 2, kLargestDim), kLargestStateRows);
  EXPECT_EQ(rows(Score::power, 3, 16), 16 * 17 * 18 / 6);
  EXPECT_EQ(rows(Score::power, 4, 16), 16 * 17 * 18 * 19 / 24);
  EXPECT_EQ(rows(Score::series, 3, 16), 17 * 18 * 19 / 6);
  EXPECT_EQ(rows(Score::series, 4, 16), 17 * 18 * 19 * 20 / 24);
  // The largest dimensions with a state.
  for (const auto& [score, degree, dim] : {std::tuple{Score::power, 3, int64_t{57}},
                                           {Score::series, 3, int64_t{56}},
                                           {Score::power, 4, int64_t{28}},
                                           {Score::series, 4, int64_t{27}}}) {
    EXPECT_GT(rows(score, degree, dim), 0) << degree;
    EXPECT_EQ(rows(score, degree, dim + 1), 0) << degree;
  }
  EXPECT_EQ(rows(Score::exponential, 0, 8), 0);
  for (const MixerSpec& spec : further_specs())
    EXPECT_EQ(state_rows(spec, 8) > 0, !spec.signed_decay) << to_string(spec);
}

// Kernels that compute the index of a feature of a squared score use the order of feature_of().
TEST(FurtherScores, PairsAreInTheOrderOfTheFeatures) {
  for (const int dim : {1, 8, 64}) {
    const FeatureMap map{dim, 2, false};
    EXPECT_EQ(first_pair(dim, dim), FeatureMap::tuples(dim, 2));
    for (int a = 0; a < dim; ++a)
      for (int b = a; b < dim; ++b) {
        const Feature feature = feature_of(map, pair_index(dim, a, b));
        ASSERT_EQ(feature.at[0], a);
        ASSERT_EQ(feature.at[1], b);
        ASSERT_EQ(feature.factor, a == b ? 1.0f : kPairFactor);
      }
  }
}

// feature_of() and FeatureRuns enumerate the same features, whose product is the score.
TEST(FurtherScores, FeaturesGiveTheScore) {
  Random random(7);
  for (const MixerSpec& spec : every_spec()) {
    for (const int dim : {8, 11, 27}) {
      const FeatureMap map = feature_map(spec, dim);
      if (map.degree == 0) continue;
      SCOPED_TRACE(fmt::format("{}, dimension {}", to_string(spec), dim));
      std::vector<float> q(static_cast<size_t>(dim) + 1, 1), k = q;
      double product = 0;
      for (size_t i = 0; i < static_cast<size_t>(dim); ++i) {
        q[i] = static_cast<float>(random.normal() / 3);
        k[i] = static_cast<float>(random.normal() / 3);
        product += static_cast<double>(q[i]) * static_cast<double>(k[i]);
      }
      const auto rows = static_cast<int>(state_rows(spec, dim));
      double sum = 0;
      for (int f = 0; f < rows; ++f)
        sum +=
            static_cast<double>(feature_of(map, f).of(q.data())) * static_cast<double>(feature_of(map, f).of(k.data()));
      const double expected = static_cast<double>(polynomial_of(spec)(static_cast<float>(product)));
      EXPECT_NEAR(sum, expected, 1e-5 * (1 + std::fabs(expected)));
      int f = 0;
      with_degree(map, [&]<int kDegree>() {
        FeatureRuns<kDegree> run(map);
        do {
          const auto factors = run.factors();
          for (int last = run.lowest(); last < map.width(); ++last, ++f) {
            const float factor = kDegree > 1 && last == run.lowest() ? factors.repeated : factors.each;
            const float own = feature_of(map, f).of(q.data());
            ASSERT_NEAR(factor * run.product(q.data()) * q[static_cast<size_t>(last)], own, 1e-6 * std::fabs(own));
          }
        } while (run.next());
      });
      EXPECT_EQ(f, rows);
    }
  }
}

struct Inputs {
  MixerInputs plain, decayed;

  Inputs() {
    Random random(6);
    plain.q = random.normal_tensor({1, 5, 2, 8});
    plain.k = random.normal_tensor({1, 5, 2, 8});
    plain.v = random.normal_tensor({1, 5, 2, 8});
    decayed = plain;
    decayed.log_decay = random.uniform_tensor({1, 5, 2}, 0.1, 1);
  }
};

TEST(FurtherScoresBadInput, Degrees) {
  const Inputs in;
  const auto refused = [&](Score score, int degree, std::vector<std::string> parts) {
    parts.insert(parts.end(), {"mixer_forward", "\"degree\"", fmt::format("is {}", degree)});
    expect_error([&] { mixer_forward({score, false, Norm::none, 0, degree}, in.plain); }, parts);
  };
  for (int degree : {-1, 0, 1, 2, 5}) refused(Score::power, degree, {"expected 3 to 4", "linear and squared"});
  for (int degree : {-1, 0, 5}) refused(Score::series, degree, {"expected 1 to 4", "exponential"});
  for (Score score : {Score::linear, Score::squared, Score::exponential})
    refused(score, 2, {"expected 0", "power and series"});
}

TEST(FurtherScoresBadInput, SignedDecayStatesAndForms) {
  const Inputs in;
  const MixerSpec spec{Score::squared, true, Norm::sum, 0, 0, true}, power{Score::power, true, Norm::none, 0, 3};
  ASSERT_NO_THROW(mixer_forward(spec, in.decayed));
  expect_error([&] { mixer_forward(power, in.decayed); }, {"\"log_decay\"", "at most 0"});
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    MixerInputs broken = in.decayed;
    broken.log_decay = tensor_of(std::vector<float>(10, bad), {1, 5, 2});
    expect_error([&] { mixer_forward(spec, broken); }, {"\"log_decay\"", "[0, 0, 0]", "expected finite values"});
  }
  expect_error(
      [&] {
        mixer_forward({Score::squared, false, Norm::sum, 0, 0, true}, in.plain);
      },
      {"\"signed_decay\"", "no decay"});
  MixerInputs kept = in.decayed;
  kept.log_decay = Tensor::zeros({1, 5, 2}, DType::f32);
  MixerInputs wide = kept;  // more rows than a state may have
  for (Tensor* x : {&wide.q, &wide.k, &wide.v}) *x = Tensor::zeros({1, 5, 2, 64}, DType::f32);
  for (const auto& [without, inputs] : {std::pair{spec, kept}, {power, wide}}) {
    expect_error(
        [&] { mixer_forward(without, inputs, {Form::chunked}); },
        {"\"form\"", "chunked", to_string(without), fmt::format("dimension {}", inputs.q.size(3)), "use parallel"});
    expect_error(
        [&] {
          mixer_forward(without, inputs, {Form::parallel, 0, true});
        },
        {"\"final_state\"", to_string(without)});
  }
}

TEST(FurtherScoresBadInput, PrecisionOfACpu) {
  const Inputs in;
  const MixerSpec spec = mixer_spec("softmax");
  const MixerResult result = mixer_forward(spec, in.plain, {.precision = MixerPrecision::f32});
  const Tensor g = Tensor::zeros({1, 5, 2, 8}, DType::f32);
  ASSERT_NO_THROW(mixer_backward(spec, in.plain, result, g, {}, {.precision = MixerPrecision::f32}));
  for (MixerPrecision precision : {MixerPrecision::bf16, MixerPrecision::tf32, MixerPrecision::tf32x3}) {
    const std::vector<std::string> parts{"\"precision\"", std::string(name_of(precision)), "use auto or f32"};
    const auto with = [&](std::string operation) {
      std::vector<std::string> all = parts;
      all.push_back(std::move(operation));
      return all;
    };
    expect_error([&] { mixer_forward(spec, in.plain, {.precision = precision}); }, with("mixer_forward"));
    expect_error([&] { mixer_backward(spec, in.plain, result, g, {}, {.precision = precision}); },
                 with("mixer_backward"));
    Tape tape;
    const Variable q(in.plain.q, true), k(in.plain.k, true), v(in.plain.v, true);
    expect_error([&] { mixer(tape, spec, q, k, v, {}, {}, {.precision = precision}); }, with("mixer_forward"));
  }
}

}  // namespace
}  // namespace furious
