#include "data/synthetic.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "ops/boundaries.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::same_bits;

RecallOptions small_recall() {
  return {.batch = 5, .length = 40, .pairs = 6, .vocabulary_size = 32, .seed = 9};
}

TEST(RecallTask, EveryKeyIsQueriedOnceWithItsValue) {
  const RecallTask task(small_recall());
  for (int64_t step = 0; step < 20; ++step) {
    const Batch batch = task.at(step);
    for (int64_t row = 0; row < 5; ++row) {
      const int32_t* inputs = batch.inputs.data<int32_t>() + row * 40;
      const int32_t* targets = batch.targets.data<int32_t>() + row * 40;
      std::map<int32_t, int32_t> value;
      for (int pair = 0; pair < 6; ++pair) {
        ASSERT_TRUE(inputs[2 * pair] >= 1 && inputs[2 * pair] < 16);
        ASSERT_TRUE(inputs[2 * pair + 1] >= 16 && inputs[2 * pair + 1] < 32);
        value[inputs[2 * pair]] = inputs[2 * pair + 1];
      }
      ASSERT_EQ(value.size(), 6u) << "a key stands twice";
      std::set<int32_t> asked;
      for (int t = 0; t < 40; ++t) {
        if (targets[t] < 0) continue;
        ASSERT_GE(t, 12);
        EXPECT_EQ(targets[t], value.at(inputs[t]));
        EXPECT_EQ(inputs[t + 1], targets[t]);
        asked.insert(inputs[t]);
      }
      EXPECT_EQ(asked.size(), 6u);
    }
  }
}

LookupOptions small_lookup() {
  return {.batch = 6, .length = 41, .pairs = 7, .vocabulary_size = 32, .seed = 9};
}

TEST(LookupTask, EveryDocumentAsksForAnEarlierKey) {
  const LookupTask task(small_lookup());
  std::set<int64_t> lengths;
  int64_t targets_in_all = 0;
  for (int64_t step = 0; step < 50; ++step) {
    const Batch batch = task.at(step);
    for (const Segment& document : segments_of("test", batch.boundaries, 6, 41)) {
      const int32_t* inputs = batch.inputs.data<int32_t>() + document.batch * 41;
      const int32_t* targets = batch.targets.data<int32_t>() + document.batch * 41;
      std::map<int32_t, int32_t> value;
      for (int64_t t = document.begin; t < document.end; t += 2) {
        if (t == 40) break;  // an odd length leaves one token
        ASSERT_TRUE(inputs[t] >= 1 && inputs[t] < 16);
        ASSERT_TRUE(inputs[t + 1] >= 16 && inputs[t + 1] < 32);
        const auto [found, first] = value.emplace(inputs[t], inputs[t + 1]);
        EXPECT_EQ(found->second, inputs[t + 1]) << "a key has changed its value";
        EXPECT_EQ(targets[t], first ? -1 : inputs[t + 1]);
        EXPECT_EQ(targets[t + 1], -1);
        targets_in_all += !first;
      }
      EXPECT_LE(value.size(), 7u);
      lengths.insert(document.length());
    }
  }
  EXPECT_GT(targets_in_all, 50 * 6 * 5);
  EXPECT_TRUE(lengths.contains(4) && *lengths.rbegin() >= 40);
}

TEST(NeedleTask, TheLastKeyIsAtItsDepth) {
  for (const double depth : {-1.0, 0.0, 0.5, 1.0}) {
    const NeedleTask task({.batch = 20, .pairs = 9, .vocabulary_size = 32, .depth = depth, .seed = 4});
    EXPECT_EQ(task.length(), 19);
    const Batch batch = task.at(2);
    std::set<int64_t> places;
    for (int64_t row = 0; row < 20; ++row) {
      const int32_t* inputs = batch.inputs.data<int32_t>() + row * 19;
      const int32_t* targets = batch.targets.data<int32_t>() + row * 19;
      const int64_t place = std::find(inputs, inputs + 18, inputs[18]) - inputs;
      ASSERT_LT(place, 18);
      places.insert(place);
      EXPECT_EQ(targets[18], inputs[place + 1]);
      for (int t = 0; t < 18; ++t) EXPECT_EQ(targets[t], -1);
      std::set<int32_t> keys;
      for (int t = 0; t < 18; t += 2) keys.insert(inputs[t]);
      EXPECT_EQ(keys.size(), 9u) << "a key stands twice";
    }
    if (depth < 0)
      EXPECT_GT(places.size(), 3u);
    else
      EXPECT_EQ(places, std::set<int64_t>{std::lround(16 * depth)});
  }
}

PasskeyOptions small_passkey() {
  return {.batch = 4, .length = 30, .digits = 3, .vocabulary_size = 20, .depth = -1, .seed = 9};
}

TEST(PasskeyTask, KeyOccursOnceAndIsAskedForAtTheEnd) {
  const PasskeyTask task(small_passkey());
  std::set<int> places;
  for (int64_t step = 0; step < 100; ++step) {
    const Batch batch = task.at(step);
    for (int64_t row = 0; row < 4; ++row) {
      const int32_t* inputs = batch.inputs.data<int32_t>() + row * 30;
      const int32_t* targets = batch.targets.data<int32_t>() + row * 30;
      const int place = static_cast<int>(std::find(inputs, inputs + 30, 10) - inputs);
      ASSERT_LE(place + 3, 26);
      places.insert(place);
      ASSERT_EQ(inputs[27], 11);
      for (int t = 0; t < 27; ++t) {
        EXPECT_EQ(targets[t], -1);
        EXPECT_TRUE(inputs[t] >= 12 || (t >= place && t <= place + 3)) << t;
      }
      for (int d = 0; d < 3; ++d) {
        EXPECT_TRUE(targets[27 + d] >= 0 && targets[27 + d] < 10);
        EXPECT_EQ(targets[27 + d], inputs[place + 1 + d]);
        if (d < 2) {
          EXPECT_EQ(inputs[28 + d], targets[27 + d]);
        }
      }
    }
  }
  EXPECT_EQ(places.size(), 24u);  // every place from 0 to 23
}

TEST(PasskeyTask, DepthPlacesTheKey) {
  PasskeyOptions options = small_passkey();
  options.depth = 0;
  EXPECT_EQ(PasskeyTask(options).at(3).inputs.data<int32_t>()[0], 10);
  options.depth = 1;
  EXPECT_EQ(PasskeyTask(options).at(3).inputs.data<int32_t>()[23], 10);
}

template <class Task>
void expect_pure(const Task& task, const Task& again, const Task& other_seed) {
  EXPECT_TRUE(same_bits(task.at(7).inputs, again.at(7).inputs));
  EXPECT_FALSE(same_bits(task.at(7).inputs, task.at(8).inputs));
  EXPECT_FALSE(same_bits(task.at(7).inputs, other_seed.at(7).inputs));
  const Tensor part = task.at(7, {1, 2}).inputs;
  EXPECT_TRUE(same_bits(part, task.at(7).inputs.slice(0, 1, 2)));
}

TEST(SyntheticTasks, AreAPureFunctionOfSeedStepAndRow) {
  RecallOptions recall = small_recall();
  recall.seed = 10;
  expect_pure(RecallTask(small_recall()), RecallTask(small_recall()), RecallTask(recall));
  LookupOptions lookup = small_lookup();
  lookup.seed = 10;
  expect_pure(LookupTask(small_lookup()), LookupTask(small_lookup()), LookupTask(lookup));
  const NeedleOptions needle{.batch = 5, .pairs = 6}, other_needle{.batch = 5, .pairs = 6, .seed = 10};
  expect_pure(NeedleTask(needle), NeedleTask(needle), NeedleTask(other_needle));
  PasskeyOptions passkey = small_passkey();
  passkey.seed = 10;
  expect_pure(PasskeyTask(small_passkey()), PasskeyTask(small_passkey()), PasskeyTask(passkey));
}

TEST(SyntheticTasks, ErrorsSayWhatDoesNotFit) {
  RecallOptions recall = small_recall();
  recall.length = 23;
  expect_error([&] { RecallTask task(recall); }, {"6 pairs", "length 24", "not 23"});
  recall = small_recall();
  recall.vocabulary_size = 13;
  expect_error([&] { RecallTask task(recall); }, {"vocabulary of 14", "not 13"});
  expect_error([] { LookupTask task({.length = 3}); }, {"length 3"});
  expect_error([] { LookupTask task({.pairs = 40, .vocabulary_size = 66}); }, {"40 pairs", "2 to 32", "66"});
  expect_error([] { NeedleTask task({.pairs = 40, .vocabulary_size = 66}); }, {"40 pairs", "82", "66"});
  expect_error([] { NeedleTask task({.depth = 1.5}); }, {"depth 1.5"});
  PasskeyOptions passkey = small_passkey();
  passkey.length = 6;
  expect_error([&] { PasskeyTask task(passkey); }, {"3 digits", "length 7", "not 6"});
  passkey = small_passkey();
  passkey.vocabulary_size = 12;
  expect_error([&] { PasskeyTask task(passkey); }, {"vocabulary 12"});
}

}  // namespace
}  // namespace furious
