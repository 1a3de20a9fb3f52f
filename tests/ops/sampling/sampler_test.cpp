#include <numeric>

#include "ops/sampling/oracle.h"

namespace furious {
namespace {

using namespace furious::testing;

Tensor logits_of(const std::vector<std::vector<float>>& rows, int64_t more_columns = 0) {
  const auto columns = static_cast<int64_t>(rows[0].size()) + more_columns;
  const Tensor out = Tensor::empty({static_cast<int64_t>(rows.size()), columns}, DType::f32);
  for (size_t i = 0; i < rows.size(); ++i) {
    float* const row = out.data<float>() + static_cast<int64_t>(i) * columns;
    std::fill(std::copy(rows[i].begin(), rows[i].end(), row), row + columns, 1e9f);
  }
  return out;
}

int32_t id_of(const Choice& choice, int64_t row = 0) {
  return choice.ids.data<int32_t>()[2 * row];
}

// Slots with options of their own, in another order every step, beside a plain list of tokens for each.
TEST(Sampler, SlotsDoNotAffectEachOther) {
  Random random(1);
  constexpr int64_t kSlots = 5, kVocabulary = 60;
  Sampler sampler(kSlots, kVocabulary, {});
  std::vector<Sampling> options;
  std::vector<std::vector<int32_t>> texts(kSlots);
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    options.push_back(random_sampling(random, kVocabulary));
    options.back().repetition_penalty = 1.2;
    options.back().frequency_penalty = 0.01 * static_cast<double>(slot);
    sampler.set(slot, options.back());
    for (int64_t i = 100 * slot; i > 0; --i)
      texts[slot].push_back(static_cast<int32_t>(random.integer(0, kVocabulary - 1)));
    sampler.read(slot, texts[slot]);
  }
  for (int step = 0; step < 600; ++step) {  // past the window, more than once
    std::vector<int32_t> slots(kSlots);
    std::iota(slots.begin(), slots.end(), 0);
    for (int64_t i = kSlots - 1; i > 0; --i) std::swap(slots[i], slots[random.integer(0, i)]);
    slots.resize(random.integer(1, kSlots));
    std::vector<std::vector<float>> rows;
    for (size_t i = 0; i < slots.size(); ++i) rows.push_back(random_logits(random, kVocabulary));
    const Choice choice = sampler.choose(logits_of(rows, 3), slot_rows(slots));
    EXPECT_FALSE(choice.best.defined());
    for (size_t i = 0; i < slots.size(); ++i) {
      std::vector<int32_t>& text = texts[slots[i]];
      const int32_t id = id_of(choice, static_cast<int64_t>(i));
      ASSERT_EQ(id, sample(rows[i], options[slots[i]], text)) << step << " " << slots[i];
      ASSERT_EQ(choice.ids.data<int32_t>()[2 * i + 1], 1);
      text.push_back(id);
    }
  }
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    const Sampler::Contents contents = sampler.contents(slot);
    const std::vector<int32_t>& text = texts[slot];
    EXPECT_EQ(contents.position, text.size());
    EXPECT_EQ(contents.history, std::vector(text.end() - std::min<int64_t>(256, std::ssize(text)), text.end()));
  }
}

TEST(Sampler, ReadsInPieces) {
  Random random(2);
  std::vector<int32_t> text(1000);
  std::iota(text.begin(), text.end(), 0);
  Sampler sampler(2, 2000, {});
  sampler.read(0, text);
  for (size_t begin = 0; begin < text.size();) {
    const size_t count = std::min<size_t>(random.integer(0, 400), text.size() - begin);
    sampler.read(1, std::span(text).subspan(begin, count));
    begin += count;
  }
  for (const int64_t slot : {0, 1}) {
    EXPECT_EQ(sampler.contents(slot).position, 1000u);
    EXPECT_EQ(sampler.contents(slot).history, std::vector<int32_t>(text.end() - 256, text.end()));
  }
  sampler.clear(1);
  EXPECT_EQ(sampler.contents(1).position, 0u);
  EXPECT_TRUE(sampler.contents(1).history.empty());
  sampler.read(1, std::span(text).first(3));
  EXPECT_EQ(sampler.contents(1).history, (std::vector<int32_t>{0, 1, 2}));
}

// Copies and restored contents go on as the slot they come from does.
TEST(Sampler, CopiesGoOnAlike) {
  Random random(3);
  Sampling sampling = random_sampling(random, 30);
  sampling.temperature = 1;
  sampling.presence_penalty = 1;
  Sampler sampler(3, 30, {}), other(1, 30, {});
  for (const int64_t slot : {0, 1}) sampler.set(slot, sampling);
  other.set(0, sampling);
  for (const int64_t read : {10, 300}) {
    for (int64_t i = 0; i < read; ++i) sampler.choose(logits_of({random_logits(random, 30)}), slot_rows({0}));
    sampler.copy(0, 1);
    other.restore(0, sampler.contents(0));
    for (int i = 0; i < 50; ++i) {
      const std::vector<float> logits = random_logits(random, 30);
      const Choice both = sampler.choose(logits_of({logits, logits}), slot_rows({1, 0}));
      EXPECT_EQ(id_of(both, 0), id_of(both, 1));
      EXPECT_EQ(id_of(both, 0), id_of(other.choose(logits_of({logits}), slot_rows({0}))));
    }
  }
  sampler.copy(2, 2);
  EXPECT_EQ(sampler.contents(2).position, 0u);
}

TEST(Sampler, LogProbabilities) {
  Random random(4);
  constexpr int64_t kVocabulary = 500;
  Sampler sampler(3, kVocabulary, {});
  Sampling sampling;
  sampling.logit_bias = {{7, 100}};  // the log-probabilities are those before it
  sampling.temperature = 3;
  sampling.log_probabilities = 20;
  sampler.set(0, sampling);
  sampling.log_probabilities = 0;
  sampler.set(1, sampling);
  std::vector<float> logits = random_logits(random, kVocabulary, 4);
  logits[100] = logits[200] = 14;
  const SamplingOracle oracle = [&] {
    Sampling plain;
    plain.temperature = 1;
    plain.top_p = 1;
    return sampling_oracle(logits, plain);
  }();
  EXPECT_FALSE(sampler.wants_log_probabilities(slot_rows({2})));
  EXPECT_TRUE(sampler.wants_log_probabilities(slot_rows({2, 1})));
  const Choice choice = sampler.choose(logits_of({logits, logits, logits}), slot_rows({1, 0, 2}));
  const auto best = [&](int64_t row, int64_t i) { return choice.best.data<int32_t>()[21 * row + i]; };
  const auto value = [&](int64_t row, int64_t i) { return choice.log_probabilities.data<float>()[21 * row + i]; };
  for (int64_t i = 0; i <= 20; ++i) {
    EXPECT_EQ(best(2, i), -1);
    EXPECT_EQ(value(2, i), 0);
    EXPECT_NEAR(value(1, i), std::log(oracle.probabilities[best(1, i)]), 2e-6 * std::abs(value(1, i)) + 1e-6);
    if (i == 0) continue;
    EXPECT_EQ(best(0, i), -1);
    EXPECT_EQ(best(1, i), oracle.order[i - 1]);
  }
  EXPECT_EQ(id_of(choice, 0), 7);
  EXPECT_EQ(best(0, 0), 7);
  EXPECT_EQ(value(0, 0), value(1, 0));
  // More than there are.
  Sampler small(1, 2, {});
  sampling.log_probabilities = 5;
  sampling.logit_bias.clear();
  small.set(0, sampling);
  const Choice two = small.choose(logits_of({{0, 1}}), slot_rows({0}));
  EXPECT_EQ(two.best.data<int32_t>()[1], 1);
  EXPECT_EQ(two.best.data<int32_t>()[2], 0);
  EXPECT_EQ(two.best.data<int32_t>()[3], -1);
}

TEST(Sampler, SaysWhichRowsAreNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  Sampler sampler(5, 3, {});
  const Choice choice = sampler.choose(
      logits_of({{1, 2, nan}, {1, infinity, 0}, {-infinity, 1, -infinity}, {nan, nan, nan}, {1, 2, 3}}, 1),
      all_slots(5));
  const int32_t* const ids = choice.ids.data<int32_t>();
  const std::vector<int32_t> finite = {0, 0, 0, 0, 1}, expected = {1, 0, 1, 0};
  for (size_t i = 0; i < finite.size(); ++i) EXPECT_EQ(ids[2 * i + 1], finite[i]) << i;
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(ids[2 * i], expected[i]) << i;
  expect_error([&] { require_finite_logits(choice.ids); }, {"not finite", "diverged"});
  EXPECT_NO_THROW(require_finite_logits(choice.ids.slice(0, 4, 1)));
}

TEST(Sampler, RefusesWhatCannotBe) {
  expect_error([] { Sampler(0, 5, {}); }, {"0 slots"});
  expect_error([] { Sampler(1, 0, {}); }, {"vocabulary of 0"});
  expect_error([] { Sampler(1, kLargestSampledVocabulary + 1, {}); }, {"vocabulary of 262145"});
  Sampler sampler(2, 5, {});
  expect_error([&] { sampler.set(2, {}); }, {"slot 2", "0 to 1"});
  expect_error([&] { sampler.read(-1, {}); }, {"slot -1"});
  expect_error([&] { sampler.copy(0, 2); }, {"slot 2"});
  expect_error([&] { sampler.restore(0, {1, {1, 2}}); }, {"2 recent tokens", "sequence of 1"});
  expect_error([&] { sampler.set_blocks_per_row(3); }, {"3 blocks"});
  Sampling sampling;
  sampling.logit_bias = {{5, 1}};
  expect_error([&] { sampler.set(0, sampling); }, {"token 5", "0 to 4"});
  const auto choose = [&](int64_t rows, int64_t columns, const SlotRows& slots) {
    return [&sampler, rows, columns, slots] { sampler.choose(Tensor::zeros({rows, columns}, DType::f32), slots); };
  };
  expect_error(choose(1, 4, slot_rows({0})), {"4 columns", "vocabulary of 5"});
  expect_error(choose(1, 5, slot_rows({2})), {"slot 2"});
  expect_error(choose(2, 5, slot_rows({0})), {"rows", "[1]", "[2]"});
}

}  // namespace
}  // namespace furious
