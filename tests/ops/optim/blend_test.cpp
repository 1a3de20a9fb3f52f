#include "ops/optim/blend.h"

#include <cmath>

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::relative_error;
using testing::same_bits;
using testing::tensor_of;
using testing::to_doubles;

TEST(Blend, IsAWeightedSum) {
  testing::Random random(80);
  for (const int64_t count : {0, 1, 7, 40000}) {
    const Tensor x = random.normal_tensor({count}), y = random.normal_tensor({count});
    std::vector<double> expected = to_doubles(x);
    const std::vector<double> other = to_doubles(y);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = 0.75 * expected[i] - 2 * other[i];
    const Tensor out = Tensor::empty({count}, DType::f32);
    blend(out, 0.75f, x, -2, y);
    EXPECT_LT(relative_error(out, expected, 1e-3), 1e-4);
    blend(x, 0.75f, x, -2, y);  // in place
    EXPECT_TRUE(same_bits(out, x));
  }
}

TEST(Blend, AGuardThatIsNanKeepsTheResult) {
  const Tensor out = tensor_of({5, 6}, {2}), x = tensor_of({1, 2}, {2});
  blend(out, 1, x, 1, x, tensor_of({NAN}, {1}));
  EXPECT_EQ(to_doubles(out), (std::vector<double>{5, 6}));
  blend(out, 1, x, 1, x, tensor_of({0}, {1}));
  EXPECT_EQ(to_doubles(out), (std::vector<double>{2, 4}));
}

TEST(Blend, RefusesBadInput) {
  const Tensor x = Tensor::zeros({2}, DType::f32);
  expect_error([&] { blend(x, 1, Tensor::zeros({3}, DType::f32), 1, x); }, {"blend", "\"x\"", "[3]"});
  expect_error([&] { blend(x, 1, x, 1, Tensor::zeros({2}, DType::bf16)); }, {"blend", "\"y\"", "bf16"});
  expect_error([&] { blend(x, 1, x, 1, x, x); }, {"blend", "\"guard\""});
}

}  // namespace
}  // namespace furious
