#include "serve/warm_slots.h"

#include <gtest/gtest.h>

#include "model/little.h"

namespace furious::serve {
namespace {

using Ids = std::vector<int32_t>;

class WarmSlotsTest : public ::testing::Test {
 protected:
  // A slot that has read the ids.
  int32_t read(WarmSlots& warm, const Ids& ids) {
    const int32_t slot = warm.start();
    decoder.read(slot, ids);
    return slot;
  }
  // Reads the ids in one pass, keeps a copy and stops the slot.
  void keep(WarmSlots& warm, const Ids& ids) {
    const int32_t slot = read(warm, ids);
    warm.keep(slot, ids, after_pass(1, ids.size()), decoder.slots() - 1);
    decoder.stop(slot);
  }
  // How many ids of the prompt a warm slot has read.
  size_t found(WarmSlots& warm, const Ids& prompt) {
    std::vector<PassEnd> passes;
    for (size_t end = 1; end <= prompt.size(); ++end) passes.push_back({end, after_pass(1, end)});
    const auto forked = warm.fork_longest(prompt, passes);
    if (!forked) return 0;
    EXPECT_EQ(decoder.tokens(forked->slot), static_cast<int64_t>(forked->read.ids));
    decoder.stop(forked->slot);
    return forked->read.ids;
  }

  const LanguageModel model{furious::testing::little(preset("2mamba")), 1, Device{}};
  Decoder decoder{model, 4};
};

TEST_F(WarmSlotsTest, ForksTheLongestOfTheSamePasses) {
  WarmSlots warm(decoder, 1 << 30);
  EXPECT_EQ(found(warm, {1, 2, 3}), 0u);
  keep(warm, {1, 2});
  keep(warm, {1, 2, 3});
  EXPECT_EQ(found(warm, {1, 2, 3, 4}), 3u);
  EXPECT_EQ(found(warm, {1, 2, 5, 4}), 2u);
  EXPECT_EQ(found(warm, {1}), 0u);
  EXPECT_EQ(found(warm, {2, 2, 3}), 0u);
  EXPECT_FALSE(warm.fork_longest(Ids{1, 2, 3}, std::vector<PassEnd>{{2, 77}, {3, 78}})) << "read in other passes";
  EXPECT_FALSE(warm.fork_longest(Ids{1, 2, 3}, {})) << "no pass ends there";
  EXPECT_EQ(decoder.free_slots(), 2);
}

TEST_F(WarmSlotsTest, GivesUpTheLeastRecentlyUsed) {
  WarmSlots warm(decoder, 1 << 30);
  for (const int32_t id : {1, 2, 3}) keep(warm, {id});
  EXPECT_EQ(warm.size(), 3);
  EXPECT_EQ(found(warm, {1}), 1u);  // used
  keep(warm, {4});
  EXPECT_EQ(found(warm, {2}), 0u);
  keep(warm, {3});  // known already: used
  keep(warm, {5});
  EXPECT_EQ(found(warm, {1}), 0u);
  for (const int32_t id : {3, 4, 5}) EXPECT_EQ(found(warm, {id}), 1u) << id;
}

TEST_F(WarmSlotsTest, GivesWayToJobs) {
  WarmSlots warm(decoder, 1 << 30);
  for (const int32_t id : {1, 2, 3}) keep(warm, {id});
  const int32_t first = read(warm, {9});
  (void)warm.fork(first);
  (void)warm.start();
  EXPECT_EQ(warm.size(), 1);
  EXPECT_EQ(warm.fork_longest(Ids{3}, std::vector<PassEnd>{{1, after_pass(1, 1)}})->read.ids, 1u);
  EXPECT_EQ(warm.size(), 0) << "the job goes on in the slot itself";
  EXPECT_EQ(warm.bytes(), 0u);
  EXPECT_EQ(decoder.free_slots(), 0);
  warm.keep(first, Ids{9}, 1, 0);
  EXPECT_EQ(warm.size(), 0) << "jobs need all slots";
}

TEST_F(WarmSlotsTest, LimitsTheirBytes) {
  const int32_t slot = decoder.start();
  decoder.read(slot, Ids{1});
  const auto bytes = static_cast<uint64_t>(decoder.bytes(slot));
  decoder.stop(slot);
  WarmSlots two(decoder, 2 * bytes + bytes / 2), none(decoder, bytes - 1);
  for (const int32_t id : {1, 2, 3}) keep(two, {id});
  EXPECT_EQ(two.size(), 2);
  EXPECT_EQ(two.bytes(), 2 * bytes);
  EXPECT_EQ(found(two, {1}), 0u);
  EXPECT_EQ(found(two, {3}), 1u);
  keep(none, {1});
  EXPECT_EQ(none.size(), 0);
}

// What a copy writes is what the sequence itself writes.
TEST_F(WarmSlotsTest, GoOnToTheBit) {
  WarmSlots warm(decoder, 1 << 30);
  const Ids ids = {1, 2, 3, 4, 5};
  const int32_t slot = read(warm, ids);
  warm.keep(slot, ids, after_pass(1, 5), 3);
  const auto written = [&](int32_t own) {
    decoder.set_sampling(own, {.temperature = 1, .seed = 5});
    Ids all;
    for (int i = 0; i < 20; ++i) all.push_back(decoder.step({&own, 1}).wait()[0]);
    return all;
  };
  const Ids expected = written(slot);
  for (int i = 0; i < 2; ++i) {
    const auto forked = warm.fork_longest(ids, std::vector<PassEnd>{{5, after_pass(1, 5)}});
    ASSERT_TRUE(forked);
    EXPECT_EQ(written(forked->slot), expected);
    decoder.stop(forked->slot);
  }
}

}  // namespace
}  // namespace furious::serve
