#include "ops/sampling/sampling.h"

#include <numeric>

#include "ops/sampling/oracle.h"
#include "ops/sampling/weights.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Sampling sampling_of(double temperature, int64_t top_k = 0, double top_p = 1, double penalty = 1) {
  Sampling out;
  out.temperature = temperature;
  out.top_k = top_k;
  out.top_p = top_p;
  out.repetition_penalty = penalty;
  out.seed = 7;
  return out;
}

std::map<int32_t, int> drawn_counts(const std::vector<float>& logits, const Sampling& sampling, int draws,
                                    const std::vector<int32_t>& history = {}) {
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) counts[sample(logits, sampling, history, static_cast<uint64_t>(i))] += 1;
  return counts;
}

std::set<int32_t> drawn(const std::vector<float>& logits, const Sampling& sampling, int draws = 3000,
                        const std::vector<int32_t>& history = {}) {
  std::set<int32_t> ids;
  for (const auto& [id, count] : drawn_counts(logits, sampling, draws, history)) ids.insert(id);
  return ids;
}

// Pearson's χ² of draws against the exact probabilities, as a number of standard deviations above its mean. Tokens that
// are expected fewer than 5 times count as one.
double chi_square(const std::map<int32_t, int>& counts, const std::vector<double>& probabilities, int draws) {
  double sum = 0, rare_expected = 0, rare_counted = 0;
  int cells = 0;
  const auto add = [&](double expected, double counted) {
    sum += (counted - expected) * (counted - expected) / expected;
    cells += 1;
  };
  for (size_t i = 0; i < probabilities.size(); ++i) {
    const auto found = counts.find(static_cast<int32_t>(i));
    const double counted = found == counts.end() ? 0 : found->second, expected = probabilities[i] * draws;
    if (expected >= 5) {
      add(expected, counted);
    } else {
      rare_expected += expected;
      rare_counted += counted;
    }
  }
  if (rare_expected >= 5) add(rare_expected, rare_counted);
  if (cells < 2) return 0;
  return (sum - (cells - 1)) / std::sqrt(2.0 * (cells - 1));
}

TEST(Sampling, WeightsAreExponentials) {
  Random random(11);
  for (int i = 0; i < 100000; ++i) {
    const auto largest = static_cast<float>(random.normal() * 10);
    const float logit = largest - static_cast<float>(random.uniform(0, 25));
    const double temperature = random.pick<double>({0.5, 1, 3});
    const float scale = static_cast<float>(1.4426950408889634 / temperature);
    const double exact = std::exp((static_cast<double>(logit) - largest) / temperature) * sampling::kLargestWeight;
    // f32 keeps a difference of 25 to 1e-6; and the weight is rounded.
    EXPECT_NEAR(sampling::weight_of(logit, largest, scale), exact, exact * 6e-6 + 0.51) << logit << " " << largest;
  }
  EXPECT_EQ(sampling::weight_of(3, 3, 1), sampling::kLargestWeight);
  EXPECT_EQ(sampling::weight_of(-3e38f, 3e38f, 1), 0u);
  EXPECT_EQ(sampling::weight_of(-3e38f, 3e38f, 0), sampling::kLargestWeight);
  EXPECT_EQ(sampling::weight_of(sampling::minus_infinity(), 0, 0), 0u);
}

TEST(Sampling, RanksOrderTokens) {
  const std::vector<float> rising = {sampling::minus_infinity(), -FLT_MAX, -2, -1e-30f, 0, 1e-30f, 1, 2, FLT_MAX};
  for (size_t i = 0; i < rising.size(); ++i) {
    EXPECT_EQ(sampling::logit_of_rank(sampling::rank_of(rising[i], 5)), rising[i]);
    EXPECT_EQ(sampling::id_of_rank(sampling::rank_of(rising[i], 5)), 5u);
    EXPECT_GT(sampling::rank_of(rising[i], 4), sampling::rank_of(rising[i], 5));
    if (i == 0) continue;
    EXPECT_GT(sampling::rank_of(rising[i], 9), sampling::rank_of(rising[i - 1], 0));
  }
  EXPECT_EQ(sampling::usable(-0.0f), 0.0f);
  EXPECT_FALSE(std::signbit(sampling::usable(-0.0f)));
  EXPECT_FALSE(std::signbit(sampling::usable(-1e-40f)));
}

TEST(Sampling, TemperatureZeroTakesTheFirstOfTheLargest) {
  EXPECT_EQ(sample(std::vector<float>{1, 5, -2, 5, 3}, sampling_of(0), {}, 0), 1);
  EXPECT_EQ(sample(std::vector<float>{2, 2, 2}, sampling_of(0, 2, 0.5), {}, 9), 0);
  EXPECT_EQ(sample(std::vector<float>{-1, -0.0f, 0}, sampling_of(0), {}, 9), 1);
}

TEST(Sampling, IsAFunctionOfItsArguments) {
  Random random(1);
  const std::vector<float> logits = random_logits(random, 50);
  std::set<int32_t> positions, seeds;
  for (uint64_t i = 0; i < 100; ++i) {
    Sampling sampling = sampling_of(1);
    EXPECT_EQ(sample(logits, sampling, {}, i), sample(logits, sampling, {}, i));
    positions.insert(sample(logits, sampling, {}, i));
    sampling.seed = i;
    seeds.insert(sample(logits, sampling, {}, 0));
  }
  EXPECT_GT(positions.size(), 3u);
  EXPECT_GT(seeds.size(), 3u);
}

// Every option alone and all together, against exact probabilities.
TEST(Sampling, FollowsTheProbabilities) {
  Random random(2);
  std::vector<std::pair<const char*, Sampling>> cases = {
      {"plain", sampling_of(1)},     {"cold", sampling_of(0.4)},        {"hot", sampling_of(30)},
      {"top-k", sampling_of(2, 12)}, {"top-p", sampling_of(2, 0, 0.8)}, {"repetition", sampling_of(1, 0, 1, 1.5)}};
  Sampling one = sampling_of(2);
  one.min_p = 0.1;
  cases.emplace_back("min-p", one);
  one = sampling_of(1);
  one.frequency_penalty = 0.4;
  cases.emplace_back("frequency", one);
  one = sampling_of(1);
  one.presence_penalty = 1.5;
  cases.emplace_back("presence", one);
  one = sampling_of(1);
  one.logit_bias = {{3, 4}, {17, -2}, {29, -kInfinity}};
  cases.emplace_back("bias", one);
  one = sampling_of(1.5, 25, 0.9, 1.3);
  one.min_p = 0.02;
  one.frequency_penalty = 0.2;
  one.presence_penalty = -0.3;
  one.logit_bias = {{3, 4}, {17, -2}, {29, -kInfinity}};
  cases.emplace_back("all", one);
  const std::vector<float> logits = random_logits(random, 40, 2);
  std::vector<int32_t> history;
  for (int i = 0; i < 60; ++i) history.push_back(static_cast<int32_t>(random.integer(0, 15)));
  constexpr int kDraws = 20000;
  const SamplingOracle plain = sampling_oracle(logits, sampling_of(1), history);
  uint64_t seed = 0;
  for (auto& [name, sampling] : cases) {
    sampling.seed = ++seed;
    const SamplingOracle oracle = sampling_oracle(logits, sampling, history);
    ASSERT_GT(oracle.margin, 1e-5) << name;
    const auto counts = drawn_counts(logits, sampling, kDraws, history);
    for (const auto& [id, count] : counts) EXPECT_TRUE(oracle.kept.contains(id)) << name << " " << id;
    EXPECT_LT(chi_square(counts, oracle.probabilities, kDraws), 4) << name;
    // The test can tell: without the option the probabilities are others.
    if (std::string(name) == "plain") continue;
    EXPECT_GT(chi_square(counts, plain.probabilities, kDraws), 20) << name;
  }
}

// A token is drawn if and only if it is kept: at a temperature at which all that is kept is drawn.
TEST(Sampling, KeepsWhatASortKeeps) {
  Random random(3);
  for (const int64_t count : {1, 2, 7, 40}) {
    for (int i = 0; i < 25; ++i) {
      Sampling sampling = random_sampling(random, count);
      sampling.temperature = random.uniform(3, 8);
      const std::vector<float> logits = random_logits(random, count, 2);
      std::vector<int32_t> history;
      for (int j = 0; j < 20; ++j) history.push_back(static_cast<int32_t>(random.integer(0, count + 2)));
      const SamplingOracle oracle = sampling_oracle(logits, sampling, history);
      if (oracle.margin < 1e-5) continue;
      std::set<int32_t> expected;
      for (const int32_t id : oracle.kept)
        if (oracle.probabilities[id] > 0.004) expected.insert(id);
      const std::set<int32_t> found = drawn(logits, sampling, 2500, history);
      EXPECT_TRUE(std::ranges::includes(found, expected)) << count << " " << i;
      EXPECT_TRUE(std::ranges::includes(oracle.kept, found)) << count << " " << i;
    }
  }
}

// Large vocabularies: every draw is a kept token, and the mean rank of draws is that of the probabilities.
TEST(Sampling, LargeVocabularies) {
  Random random(4);
  for (const int64_t count : {1000, 32000, 200000}) {
    const std::vector<float> logits = random_logits(random, count, 1);
    for (const Sampling& sampling : {sampling_of(1), sampling_of(1, 0, 0.95), sampling_of(1, 40, 0.95),
                                     sampling_of(1, 5000), sampling_of(1e9, 0, 0.5)}) {
      const SamplingOracle oracle = sampling_oracle(logits, sampling);
      std::vector<double> rank_of(count);
      for (int64_t i = 0; i < count; ++i) rank_of[oracle.order[i]] = static_cast<double>(i);
      double mean = 0, square = 0, found = 0;
      for (int64_t i = 0; i < count; ++i) {
        mean += oracle.probabilities[i] * rank_of[i];
        square += oracle.probabilities[i] * rank_of[i] * rank_of[i];
      }
      constexpr int kDraws = 60;
      // The last token kept may be another one where the mass comes as close as f32 can tell.
      const double last_rank = static_cast<double>(oracle.kept.size()) + (sampling.top_k > 0 ? 0 : 1 + 1e-4 * count);
      for (int i = 0; i < kDraws; ++i) {
        const int32_t id = sample(logits, sampling, {}, static_cast<uint64_t>(i));
        ASSERT_LT(rank_of[id], last_rank);
        found += rank_of[id] / kDraws;
      }
      EXPECT_LT(std::abs(found - mean), 4 * std::sqrt((square - mean * mean) / kDraws) + 1e-6) << count;
    }
  }
}

// Few of many equal tokens are kept: most draws are rejected, in several rounds, and the others follow the weights.
TEST(Sampling, RejectsUntilATokenIsKept) {
  Random random(6);
  std::vector<float> logits(2000, 0.0f);
  const auto first = static_cast<int32_t>(random.integer(0, 1000));
  logits[first] = std::log(3.0f);
  const Sampling sampling = sampling_of(1, 2, 1);  // 3/4 and 1/4 of it
  const int32_t second = first == 0 ? 1 : 0;
  std::vector<double> probabilities(logits.size(), 0.0);
  probabilities[first] = 0.75;
  probabilities[second] = 0.25;
  const std::map<int32_t, int> counts = drawn_counts(logits, sampling, 4000);
  ASSERT_EQ(counts.size(), 2u);
  EXPECT_EQ(counts.at(first) + counts.at(second), 4000);
  EXPECT_LT(chi_square(counts, probabilities, 4000), 5);
}

TEST(Sampling, TiesAreCutByTheSmallerId) {
  const std::vector<float> logits(10, 1.5f);
  EXPECT_EQ(drawn(logits, sampling_of(1, 3, 1)), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(drawn(logits, sampling_of(1, 0, 0.35)), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(drawn(logits, sampling_of(1, 0, 0.1)), (std::set<int32_t>{0}));
  EXPECT_EQ(drawn(logits, sampling_of(1, 0, 0.3)), (std::set<int32_t>{0, 1, 2}));
  std::vector<float> two = logits;
  two[8] = two[5] = 1.6f;
  EXPECT_EQ(drawn(two, sampling_of(1, 4, 1)), (std::set<int32_t>{0, 1, 5, 8}));
}

TEST(Sampling, TopKAndTopPWithoutEffectAndWithOneLeft) {
  Random random(5);
  const std::vector<float> logits = random_logits(random, 7, 1);
  const SamplingOracle oracle = sampling_oracle(logits, sampling_of(1));
  EXPECT_EQ(drawn(logits, sampling_of(100, 1000, 1)).size(), 7u);
  EXPECT_EQ(drawn(logits, sampling_of(100, 7, 1)).size(), 7u);
  EXPECT_EQ(drawn(logits, sampling_of(100, 0, 1e-12), 100), std::set<int32_t>{oracle.order[0]});
  EXPECT_EQ(drawn(logits, sampling_of(100, 0, 1e-300), 100), std::set<int32_t>{oracle.order[0]});
  EXPECT_EQ(drawn(logits, sampling_of(100, 1, 1), 100), std::set<int32_t>{oracle.order[0]});
  Sampling most = sampling_of(100);
  most.min_p = 1;
  EXPECT_EQ(drawn(logits, most, 100), std::set<int32_t>{oracle.order[0]});
}

TEST(Sampling, RepetitionPenalty) {
  const std::vector<float> logits = {2, 1.5, -1, -1.2f};
  const Sampling greedy = sampling_of(0, 0, 1, 2);
  EXPECT_EQ(sample(logits, greedy, {}, 0), 0);
  EXPECT_EQ(sample(logits, greedy, std::vector<int32_t>{0, 0, 0}, 0), 1);  // 2 / 2 once, not three times
  EXPECT_EQ(sample(logits, greedy, std::vector<int32_t>{0, 1}, 0), 0);
  EXPECT_EQ(sample(std::vector<float>{-1, -1.5}, greedy, std::vector<int32_t>{0}, 0), 1);
  std::vector<int32_t> long_ago(1 + kRepetitionWindow, 3);
  long_ago[0] = 0;
  EXPECT_EQ(sample(logits, greedy, long_ago, 0), 0);
}

TEST(Sampling, FrequencyAndPresencePenalty) {
  const std::vector<float> logits = {2, 1.5, -1};
  Sampling frequency = sampling_of(0), presence = sampling_of(0);
  frequency.frequency_penalty = 0.2;
  presence.presence_penalty = 0.4;
  EXPECT_EQ(sample(logits, frequency, std::vector<int32_t>{0, 0}, 0), 0);
  EXPECT_EQ(sample(logits, frequency, std::vector<int32_t>{0, 0, 0}, 0), 1);
  EXPECT_EQ(sample(logits, presence, std::vector<int32_t>{0, 0, 0}, 0), 0);
  presence.presence_penalty = 0.6;
  EXPECT_EQ(sample(logits, presence, std::vector<int32_t>{0}, 0), 1);
  presence.presence_penalty = -4;
  EXPECT_EQ(sample(logits, presence, std::vector<int32_t>{2, -1, 99}, 0), 2);
}

TEST(Sampling, BannedTokensAreNeverChosen) {
  std::vector<float> logits(20, 1.0f);
  logits[4] = 30;
  Sampling sampling = sampling_of(1e6);
  for (int32_t id = 0; id < 20; ++id)
    if (id != 13) sampling.logit_bias.push_back({id, -kInfinity});
  EXPECT_EQ(drawn(logits, sampling, 200), std::set<int32_t>{13});
  sampling.repetition_penalty = 1e300;
  EXPECT_EQ(drawn(logits, sampling, 200, {13}), std::set<int32_t>{13});
  sampling.temperature = 0;
  EXPECT_EQ(drawn(logits, sampling, 1, {13}), std::set<int32_t>{13});
  sampling.temperature = 1;
  sampling.top_k = 3;
  sampling.top_p = 0.9;
  EXPECT_EQ(drawn(logits, sampling, 200), std::set<int32_t>{13});
  sampling.logit_bias.push_back({13, -kInfinity});
  expect_error([&] { sample(logits, sampling, {}, 0); }, {"exclude all tokens"});
}

TEST(Sampling, ExtremesStayFinite) {
  const std::vector<float> logits = {-3e38f, 3e38f, 0};
  EXPECT_EQ(drawn(logits, sampling_of(1e-300), 50), std::set<int32_t>{1});
  EXPECT_EQ(drawn(logits, sampling_of(1, 2, 0.9), 50), std::set<int32_t>{1});
  EXPECT_EQ(drawn(logits, sampling_of(1e300), 200), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(drawn(logits, sampling_of(1e300, 2, 0.99), 200), (std::set<int32_t>{1, 2}));
  Sampling huge = sampling_of(1, 0, 1, 1e300);
  huge.frequency_penalty = 1e300;
  huge.logit_bias = {{1, 1e300}, {0, -1e300}};
  EXPECT_EQ(drawn(logits, huge, 50, {0, 0}), std::set<int32_t>{1});
  EXPECT_EQ(sample(std::vector<float>{4}, sampling_of(1, 3, 0.5), {}, 3), 0);
}

TEST(Sampling, RefusesLogitsThatAreNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), infinity, -infinity})
    expect_error([&] { sample(std::vector<float>{0, bad}, {}, {}, 0); }, {"not finite", "diverged"});
}

TEST(Sampling, RefusesOptionsThatCannotBe) {
  const auto refused = [](auto change, const std::string& what) {
    Sampling sampling;
    change(sampling);
    expect_error([&] { check_sampling(sampling); }, {what});
  };
  const double nan = std::nan("");
  refused([](Sampling& s) { s.temperature = -1; }, "temperature -1");
  refused([&](Sampling& s) { s.temperature = nan; }, "temperature nan");
  refused([](Sampling& s) { s.top_k = -1; }, "top-k -1");
  for (const double p : {0.0, 1.5, -0.1, nan}) refused([&](Sampling& s) { s.top_p = p; }, "top-p");
  for (const double p : {1.5, -0.1, nan}) refused([&](Sampling& s) { s.min_p = p; }, "min-p");
  for (const double x : {0.0, -1.0, nan}) refused([&](Sampling& s) { s.repetition_penalty = x; }, "repetition penalty");
  for (const double x : {kInfinity, nan}) {
    refused([&](Sampling& s) { s.frequency_penalty = x; }, "frequency penalty");
    refused([&](Sampling& s) { s.presence_penalty = x; }, "presence penalty");
    refused([&](Sampling& s) { s.logit_bias = {{5, x}}; }, "logit bias of token 5");
  }
  refused([](Sampling& s) { s.logit_bias = {{5, 1}, {5, 2}}; }, "two logit biases for token 5");
  refused([](Sampling& s) { s.logit_bias.resize(301); }, "301 tokens");
  for (const int64_t k : {-2, 21}) refused([&](Sampling& s) { s.log_probabilities = k; }, "log-probabilities");
  for (const int32_t id : {-1, 2}) {
    Sampling sampling;
    sampling.logit_bias = {{id, 1}};
    expect_error([&] { sample(std::vector<float>{0, 1}, sampling, {}, 0); }, {"logit bias for token", "0 to 1"});
  }
}

}  // namespace
}  // namespace furious
