#include "base/numpy_shuffle.h"

#include "support.h"

namespace furious {
namespace {

// Made by numpy 2.4.6: first and last rows, and the sum over i of (i + 1) * order[i], modulo 2^64.
TEST(NumpyShuffle, TheOrderOfNumpy) {
  struct Case {
    uint32_t seed;
    int64_t count;
    std::vector<int64_t> first, last;
    uint64_t sum;
  };
  for (const Case& one : std::vector<Case>{
           {420, 1, {0}, {0}, 0},
           {420, 2, {0, 1}, {0, 1}, 2},
           {420, 10, {5, 7, 0, 4, 2}, {6, 8, 1}, 250},
           {0, 7, {6, 2, 1, 3, 0}, {0, 5, 4}, 83},
           {420, 12000, {5874, 5239, 1656, 469, 10972}, {4671, 4486, 11185}, 431368300879},
           {4294967295, 12001, {10178, 489, 2122, 3771, 9034}, {11276, 290, 10659}, 432072766657},
           {420, 65536, {8594, 49147, 14460, 22636, 55234}, {53638, 62536, 11185}, 70433139137509},
           {420, 65537, {8594, 60271, 14460, 22636, 55235}, {53638, 62536, 11185}, 70448675025769},
           {123, 1000000, {373315, 459286, 262398, 789396, 383229}, {28030, 277869, 773630}, 249909444006043267}}) {
    SCOPED_TRACE(fmt::format("seed {}, {} rows", one.seed, one.count));
    const std::vector<int64_t> order = numpy_shuffle(one.seed, one.count);
    ASSERT_EQ(static_cast<int64_t>(order.size()), one.count);
    EXPECT_TRUE(std::equal(one.first.begin(), one.first.end(), order.begin()));
    EXPECT_TRUE(std::equal(one.last.rbegin(), one.last.rend(), order.rbegin()));
    uint64_t sum = 0;
    for (size_t i = 0; i < order.size(); ++i) sum += (i + 1) * static_cast<uint64_t>(order[i]);
    EXPECT_EQ(sum, one.sum);
  }
  EXPECT_TRUE(numpy_shuffle(420, 0).empty());
}

}  // namespace
}  // namespace furious
