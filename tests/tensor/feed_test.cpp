#include "tensor/feed.h"

#include "support.h"

namespace furious {
namespace {

TEST(Feed, CopiesArriveInOrder) {
  const Tensor place = Tensor::zeros({3}, DType::i32);
  Feed feed(place);
  for (int32_t round = 1; round < 4; ++round) {
    feed.next().data<int32_t>()[2] = round;
    feed.send();
    EXPECT_EQ(place.data<int32_t>()[2], round - 1);
    feed.arrive();
    EXPECT_EQ(place.data<int32_t>()[2], round);
  }
}

}  // namespace
}  // namespace furious
