#include "cuda.h"
#include "tensor/feed.h"

namespace furious {
namespace {

using namespace furious::testing;

TEST(FeedCuda, CopiesArriveInOrder) {
  SKIP_WITHOUT_GPU();
  const Tensor place = Tensor::empty({5000}, DType::i32, kGpu), copied = Tensor::empty_like(place);
  Feed feed(place);
  for (int32_t round = 0; round < 20; ++round) {
    std::fill_n(feed.next().data<int32_t>(), 5000, round);
    feed.send();
    if (round > 0) {
      EXPECT_EQ(to_cpu(copied).data<int32_t>()[4999], round - 1);
      EXPECT_EQ(to_cpu(place).data<int32_t>()[4999], round - 1);
    }
    feed.arrive();
    copy(copied, place);
  }
}

}  // namespace
}  // namespace furious
