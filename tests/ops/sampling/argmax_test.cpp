#include "ops/sampling/argmax.h"

#include "cuda.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

std::vector<int32_t> ids_of(const Tensor& best) {
  const Tensor here = to_device(best, {});
  return {here.data<int32_t>(), here.data<int32_t>() + here.elements()};
}

Tensor some_logits() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  return tensor_of({-3,    -1,   -2, -1,  //
                    0,     5,    5,  4,   //
                    -0.0f, 0,    -1, -2,  //
                    1,     nan,  2,  0,   //
                    1,     -inf, 0,  3},
                   {5, 4});
}
const std::vector<int32_t> kBest{1, 1, 1, 1, 0, 1};  // of the first three rows

TEST(Argmax, FirstOfTheLargest) {
  const std::vector<int32_t> best = ids_of(argmax(some_logits()));
  EXPECT_EQ(std::vector(best.begin(), best.begin() + 6), kBest);
  EXPECT_EQ(best[7], 0);
  EXPECT_EQ(best[8], 3);
  EXPECT_EQ(best[9], 0);
  expect_error([] { argmax(Tensor::zeros({2, 0}, DType::f32)); }, {"argmax", "largest"});
}

TEST(ArgmaxCuda, AgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  const std::vector<int32_t> best = ids_of(argmax(to_gpu(some_logits())));
  EXPECT_EQ(std::vector(best.begin(), best.begin() + 6), kBest);
  EXPECT_EQ(best[7], 0);
  EXPECT_TRUE(best[6] >= 0 && best[6] < 4);
  EXPECT_EQ(best[9], 0);
  Random random(1);
  for (const int64_t columns : {1, 31, 1000, 32000}) {
    const Tensor logits = random.normal_tensor({3, columns + 5});
    const Tensor part = logits.slice(1, 2, columns), there = to_gpu(logits).slice(1, 2, columns);
    EXPECT_EQ(ids_of(argmax(part)), ids_of(argmax(there))) << columns;
  }
}

}  // namespace
}  // namespace furious
