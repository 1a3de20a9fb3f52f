#include "ops/sampling/sampling.h"

#include <algorithm>
#include <limits>
#include <set>

#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

std::vector<float> random_logits(Random& random, int64_t count) {
  std::vector<float> logits(count);
  for (float& logit : logits) logit = static_cast<float>(3 * random.normal());
  return logits;
}

Sampling sampling_of(double temperature, int64_t top_k, double top_p, double penalty = 1) {
  return {temperature, top_k, top_p, penalty, 7};
}

std::set<int32_t> drawn(const std::vector<float>& logits, const Sampling& sampling, int draws = 3000) {
  std::set<int32_t> ids;
  for (int i = 0; i < draws; ++i) ids.insert(sample(logits, sampling, {}, static_cast<uint64_t>(i)));
  return ids;
}

// Ids, the most probable first; of equal ones the smaller id.
std::vector<int32_t> ranked(const std::vector<float>& logits) {
  std::vector<int32_t> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  return ids;
}

TEST(Sampling, TemperatureZeroTakesTheFirstOfTheLargest) {
  EXPECT_EQ(sample(std::vector<float>{1, 5, -2, 5, 3}, sampling_of(0, 0, 1), {}, 0), 1);
  EXPECT_EQ(sample(std::vector<float>{2, 2, 2}, sampling_of(0, 2, 0.5), {}, 9), 0);
}

TEST(Sampling, IsAFunctionOfItsArguments) {
  Random random(1);
  const std::vector<float> logits = random_logits(random, 50);
  std::set<int32_t> positions, seeds;
  for (uint64_t i = 0; i < 100; ++i) {
    Sampling sampling = sampling_of(1, 0, 1);
    EXPECT_EQ(sample(logits, sampling, {}, i), sample(logits, sampling, {}, i));
    positions.insert(sample(logits, sampling, {}, i));
    sampling.seed = i;
    seeds.insert(sample(logits, sampling, {}, 0));
  }
  EXPECT_GT(positions.size(), 3u);
  EXPECT_GT(seeds.size(), 3u);
}

TEST(Sampling, FollowsTheProbabilities) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f)};
  std::vector<double> counts(3);
  constexpr int kDraws = 80000;
  for (int i = 0; i < kDraws; ++i) counts[sample(logits, sampling_of(1, 0, 1), {}, static_cast<uint64_t>(i))] += 1;
  EXPECT_NEAR(counts[0] / kDraws, 1.0 / 8, 0.01);
  EXPECT_NEAR(counts[1] / kDraws, 2.0 / 8, 0.01);
  EXPECT_NEAR(counts[2] / kDraws, 5.0 / 8, 0.01);
}

TEST(Sampling, TopKKeepsTheKMostProbable) {
  Random random(2);
  const std::vector<float> logits = random_logits(random, 40);
  const std::vector<int32_t> order = ranked(logits);
  for (const int64_t k : {1, 2, 5}) {
    const std::set<int32_t> expected(order.begin(), order.begin() + k);
    EXPECT_EQ(drawn(logits, sampling_of(10, k, 1)), expected);
  }
  EXPECT_EQ(drawn(logits, sampling_of(100, 1000, 1)).size(), 40u);
}

TEST(Sampling, TopPKeepsTheSmallestSetWithThatProbability) {
  Random random(3);
  for (const double p : {0.05, 0.3, 0.7, 0.95}) {
    const std::vector<float> logits = random_logits(random, 30);
    const double temperature = random.uniform(2, 6);
    double total = 0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit) / temperature);
    std::set<int32_t> expected;
    double mass = 0;
    for (const int32_t id : ranked(logits)) {
      if (mass >= p * total) break;
      expected.insert(id);
      mass += std::exp(static_cast<double>(logits[id]) / temperature);
    }
    EXPECT_EQ(drawn(logits, sampling_of(temperature, 0, p)), expected) << p;
  }
}

TEST(Sampling, TiesAreCutByTheSmallerId) {
  const std::vector<float> logits(10, 1.5f);
  EXPECT_EQ(drawn(logits, sampling_of(1, 3, 1)), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(drawn(logits, sampling_of(1, 0, 0.35)), (std::set<int32_t>{0, 1, 2, 3}));
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

TEST(Sampling, ExtremesStayFinite) {
  const std::vector<float> logits = {-3e38f, 3e38f, 0};
  EXPECT_EQ(drawn(logits, sampling_of(1e-300, 0, 1), 50), std::set<int32_t>{1});
  EXPECT_EQ(drawn(logits, sampling_of(1, 2, 0.9), 50), std::set<int32_t>{1});
}

TEST(Sampling, RefusesLogitsThatAreNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), infinity, -infinity})
    expect_error([&] { sample(std::vector<float>{0, bad}, {}, {}, 0); }, {"logit of token 1", "diverged"});
  expect_error([&] { sample({}, {}, {}, 0); }, {"no logits"});
}

TEST(Sampling, RefusesOptionsThatCannotBe) {
  expect_error([] { check_sampling(sampling_of(-1, 0, 1)); }, {"temperature -1"});
  expect_error([] { check_sampling(sampling_of(std::nan(""), 0, 1)); }, {"temperature nan"});
  expect_error([] { check_sampling(sampling_of(1, -1, 1)); }, {"top-k -1"});
  for (const double p : {0.0, 1.5, -0.1}) expect_error([&] { check_sampling(sampling_of(1, 0, p)); }, {"top-p"});
  for (const double penalty : {0.0, -1.0})
    expect_error([&] { check_sampling(sampling_of(1, 0, 1, penalty)); }, {"repetition penalty"});
}

}  // namespace
}  // namespace furious
