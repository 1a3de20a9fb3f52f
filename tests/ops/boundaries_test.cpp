#include "ops/boundaries.h"

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::int_tensor_of;

std::vector<Segment> segments(const std::vector<int32_t>& starts, int64_t batch, int64_t length) {
  return segments_of("test", int_tensor_of(starts, {static_cast<int64_t>(starts.size())}), batch, length);
}

TEST(Boundaries, NoneMeansOneSegmentPerRow) {
  const std::vector<Segment> rows = {{0, 0, 5}, {1, 0, 5}, {2, 0, 5}};
  EXPECT_EQ(segments_of("test", {}, 3, 5), rows);
  EXPECT_EQ(segments({}, 3, 5), rows);
}

TEST(Boundaries, RowStartsMayBeListedOrNot) {
  const std::vector<Segment> expected = {{0, 0, 2}, {0, 2, 4}, {1, 0, 3}, {1, 3, 4}};
  EXPECT_EQ(segments({2, 7}, 2, 4), expected);
  EXPECT_EQ(segments({0, 2, 4, 7}, 2, 4), expected);
  EXPECT_EQ(segments({2, 4, 7}, 2, 4), expected);
}

TEST(Boundaries, EveryTokenItsOwnDocument) {
  const std::vector<Segment> expected = {{0, 0, 1}, {0, 1, 2}, {1, 0, 1}, {1, 1, 2}};
  EXPECT_EQ(segments({0, 1, 2, 3}, 2, 2), expected);
}

TEST(Boundaries, EmptyInput) {
  EXPECT_TRUE(segments_of("test", {}, 0, 5).empty());
  EXPECT_TRUE(segments_of("test", {}, 5, 0).empty());
}

TEST(Boundaries, CoverEachTokenOnceInOrder) {
  testing::Random random(1);
  for (int round = 0; round < 50; ++round) {
    const int64_t batch = random.integer(1, 4);
    const int64_t length = random.integer(1, 9);
    std::vector<int32_t> starts;
    for (int32_t i = 0; i < batch * length; ++i)
      if (random.integer(0, 2) == 0) starts.push_back(i);
    std::vector<bool> is_start(batch * length);
    for (int64_t row = 0; row < batch; ++row) is_start[row * length] = true;
    for (int32_t start : starts) is_start[start] = true;

    int64_t token = 0;
    for (const Segment& segment : segments(starts, batch, length)) {
      ASSERT_EQ(segment.batch * length + segment.begin, token);
      ASSERT_GT(segment.length(), 0);
      for (int64_t t = segment.begin; t < segment.end; ++t, ++token)
        ASSERT_EQ(is_start[token], t == segment.begin) << "token " << token;
    }
    ASSERT_EQ(token, batch * length);
  }
}

TEST(Boundaries, RefusesBadBoundaries) {
  expect_error([] { segments({0, 3, 3}, 2, 4); }, {"test", "\"boundaries\"", "holds 3 at position 2 after 3"});
  expect_error([] { segments({5, 2}, 2, 4); }, {"test", "\"boundaries\"", "holds 2 at position 1 after 5"});
  expect_error([] { segments({1, 8}, 2, 4); }, {"test", "\"boundaries\"", "holds 8 at position 1", "0..7"});
  expect_error([] { segments({-1}, 2, 4); }, {"test", "\"boundaries\"", "holds -1 at position 0", "0..7"});
  expect_error([] { segments_of("test", testing::tensor_of({1}, {1}), 2, 4); }, {"\"boundaries\"", "f32", "i32"});
  expect_error([] { segments_of("test", int_tensor_of({1}, {1, 1}), 2, 4); }, {"\"boundaries\"", "shape [1, 1]"});
}

TEST(Boundaries, PositionsCountFromTheStartOfADocument) {
  const auto positions = [](const std::vector<int32_t>& starts) {
    const Tensor boundaries = testing::int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
    return positions_on({}, segments_of("test", boundaries, 2, 4), 2, 4);
  };
  EXPECT_FALSE(positions({}));
  EXPECT_FALSE(positions({0, 4}));
  EXPECT_TRUE(testing::same_bits(positions({2, 5}), testing::int_tensor_of({0, 1, 0, 1, 0, 0, 1, 2}, {2, 4})));
  EXPECT_TRUE(testing::same_bits(positions({2}), testing::int_tensor_of({0, 1, 0, 1, 0, 1, 2, 3}, {2, 4})));
  EXPECT_EQ(positions({2}).raw(), positions({2}).raw()) << "the same documents are not sent twice";
}

}  // namespace
}  // namespace furious
