#include "tensor/tensor.h"

#include "support.h"
#include "tensor/check.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::int_tensor_of;
using testing::tensor_of;

TEST(Tensor, AsMatrixKeepsTheLastDimension) {
  EXPECT_EQ(Tensor::empty({2, 3, 4}, DType::f32).as_matrix().shape(), (Shape{6, 4}));
  EXPECT_EQ(Tensor::empty({4}, DType::f32).as_matrix().shape(), (Shape{1, 4}));
  EXPECT_EQ(Tensor::empty({3, 0}, DType::f32).as_matrix().shape(), (Shape{3, 0}));
  EXPECT_EQ(Tensor::empty({0, 3}, DType::f32).as_matrix().shape(), (Shape{0, 3}));
  expect_error([] { Tensor::empty({3, 4}, DType::f32).slice(1, 0, 2).as_matrix(); }, {"not contiguous"});
  expect_error([] { Tensor::empty({}, DType::f32).as_matrix(); }, {"rank 0"});
}

TEST(Tensor, CopyBetweenOnTheCpu) {
  const Tensor from = tensor_of({1, 2, 3, 4}, {2, 2});
  const Tensor to = Tensor::zeros({2, 2}, DType::f32);
  copy_between(to, from);
  EXPECT_TRUE(testing::same_bits(to, from));
  expect_error([&] { copy_between(Tensor::empty({4}, DType::f32), from); }, {"[2, 2]", "[4]"});
  expect_error([&] { copy_between(Tensor::empty({2, 2}, DType::bf16), from); }, {"f32", "bf16"});
  expect_error([&] { copy_between(Tensor::empty({2, 1}, DType::f32), from.slice(1, 0, 1)); }, {"not contiguous"});
}

TEST(ArgumentCheck, TokenIdsNamesTheFirstBadOne) {
  const ArgumentCheck check("op");
  check.token_ids("tokens", int_tensor_of({0, 4}, {2}), 0, 5);
  check.token_ids("tokens", int_tensor_of({-1}, {1}), -1, 5);
  check.token_ids("tokens", Tensor::empty({0}, DType::i32), 0, 5);
  expect_error(
      [&] {
        check.token_ids("tokens", int_tensor_of({0, 1, 2, 3, 5, -1}, {2, 3}), 0, 5);
      },
      {"op: argument \"tokens\" holds 5 at position [1, 1]", "0 to 4", "5 tokens"});
  expect_error([&] { check.token_ids("tokens", int_tensor_of({-1}, {1}), 0, 5); }, {"holds -1 at position [0]"});
  expect_error([&] { check.token_ids("tokens", tensor_of({1}, {1}), 0, 5); }, {"dtype f32", "i32"});
  expect_error([&] { check.token_ids("tokens", {}, 0, 5); }, {"missing"});
}

}  // namespace
}  // namespace furious
