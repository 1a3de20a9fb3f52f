#include "tensor/tensor.h"

#include "support.h"
#include "tensor/arena.h"
#include "tensor/check.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::int_tensor_of;
using testing::tensor_of;
using testing::to_doubles;
using Values = std::vector<double>;

Tensor counting(const Shape& shape) {
  std::vector<float> values(shape.elements());
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  return tensor_of(values, shape);
}

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
  expect_error([&] { copy_between(Tensor::empty({2, 1}, DType::f32), from.slice(1, 0, 1)); }, {"needs contiguous"});
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

TEST(Shape, ElementsEqualityAndText) {
  EXPECT_EQ(Shape({2, 3, 4}).elements(), 24);
  EXPECT_EQ(Shape({2, 0, 4}).elements(), 0);
  EXPECT_EQ(Shape().elements(), 1);
  EXPECT_EQ(Shape({2, 3}), Shape({2, 3}));
  EXPECT_FALSE(Shape({2, 3}) == Shape({3, 2}));
  EXPECT_FALSE(Shape({2, 3}) == Shape({2, 3, 1}));
  EXPECT_EQ(to_string(Shape{2, 16, 64}), "[2, 16, 64]");
  EXPECT_EQ(to_string(Shape{}), "[]");
  expect_error([] { Shape({2, -1}); }, {"size -1", "negative"});
  expect_error([] { Shape({1, 1, 1, 1, 1, 1, 1}); }, {"rank 7", "6"});
}

TEST(Tensor, UndefinedByDefault) {
  const Tensor none;
  EXPECT_FALSE(none.defined());
  EXPECT_FALSE(none);
  EXPECT_TRUE(Tensor::empty({0}, DType::f32).defined());
}

TEST(Tensor, SizesStridesAndBytes) {
  const Tensor x = Tensor::zeros({2, 3, 4}, DType::bf16);
  EXPECT_EQ(x.size(0), 2);
  EXPECT_EQ(x.size(-1), 4);
  EXPECT_EQ(x.stride(0), 12);
  EXPECT_EQ(x.stride(-2), 4);
  EXPECT_EQ(x.bytes(), 48u);
  EXPECT_TRUE(x.is_contiguous());
  EXPECT_EQ(to_doubles(x), Values(24));
}

TEST(Tensor, ViewsShareMemory) {
  const Tensor x = counting({2, 6});
  const Tensor y = x.view({3, 4});
  y.data<float>()[5] = 100;
  EXPECT_EQ(to_doubles(x)[5], 100);
  EXPECT_EQ(y.shape(), (Shape{3, 4}));
  EXPECT_EQ(y.stride(0), 4);
}

TEST(Tensor, SliceSelectAndSplit) {
  const Tensor x = counting({2, 3, 4});
  EXPECT_EQ(to_doubles(x.slice(1, 1, 2)), (Values{4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(to_doubles(x.slice(-1, 3, 1)), (Values{3, 7, 11, 15, 19, 23}));
  EXPECT_EQ(x.slice(-1, 3, 1).shape(), (Shape{2, 3, 1}));
  EXPECT_EQ(x.slice(0, 2, 0).elements(), 0);
  EXPECT_EQ(x.select(1, 2).shape(), (Shape{2, 4}));
  EXPECT_EQ(to_doubles(x.select(1, 2)), (Values{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(to_doubles(x.select(0, 1).select(-1, 0)), (Values{12, 16, 20}));
  const Tensor heads = x.slice(-1, 0, 2).split_dim(-1, 2, 1);
  EXPECT_EQ(heads.shape(), (Shape{2, 3, 2, 1}));
  EXPECT_EQ(to_doubles(heads), (Values{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21}));
  EXPECT_EQ(x.split_dim(0, 1, 2).shape(), (Shape{1, 2, 3, 4}));
}

TEST(Tensor, ContiguityIsAboutElementsInOrder) {
  const Tensor x = counting({2, 3, 4});
  EXPECT_TRUE(x.slice(0, 1, 1).is_contiguous());
  EXPECT_TRUE(x.select(0, 1).is_contiguous());
  EXPECT_FALSE(x.slice(1, 0, 2).is_contiguous());
  EXPECT_FALSE(x.slice(2, 0, 2).is_contiguous());
  EXPECT_TRUE(x.slice(0, 0, 1).slice(1, 0, 2).is_contiguous());
  EXPECT_FALSE(x.select(2, 0).is_contiguous());
}

TEST(Tensor, AViewKeepsTheMemoryAlive) {
  Tensor view;
  {
    const Tensor x = counting({2, 2});
    view = x.select(0, 1);
  }
  const Tensor other = Tensor::zeros({2, 2}, DType::f32);
  EXPECT_NE(other.raw(), static_cast<const float*>(view.raw()) - 2);
  EXPECT_EQ(to_doubles(view), (Values{2, 3}));
}

TEST(Tensor, WrapsExternalMemory) {
  float values[] = {1, 2, 3, 4};
  const Tensor x = Tensor::wrap(values, {2, 2}, DType::f32);
  x.data<float>()[3] = 9;
  EXPECT_EQ(values[3], 9);
}

TEST(Tensor, ErrorsNameTheArguments) {
  const Tensor x = counting({2, 3});
  expect_error([&] { x.view({4}); }, {"6 elements", "[2, 3]", "[4]"});
  expect_error([&] { x.slice(1, 0, 2).view({4}); }, {"[2, 2]", "not contiguous"});
  expect_error([&] { x.slice(1, 2, 2); }, {"[2, 4)", "dimension 1", "[2, 3]"});
  expect_error([&] { x.slice(1, -1, 1); }, {"[-1, 0)"});
  expect_error([&] { x.slice(2, 0, 1); }, {"dimension 2", "rank 2"});
  expect_error([&] { x.select(0, 2); }, {"[2, 3)", "dimension 0"});
  expect_error([&] { x.split_dim(1, 2, 2); }, {"dimension 1", "[2, 3]", "2 x 2"});
  expect_error([&] { x.data<int32_t>(); }, {"f32", "i32"});
}

TEST(Tensor, SharedMemoryReturnsWithTheLastView) {
  const size_t before = Arena::of({}).usage().live;
  {
    const Tensor x = Tensor::empty({1000}, DType::f32);
    const Tensor y = x.slice(0, 10, 10);
    EXPECT_GE(Arena::of({}).usage().live, before + 4000);
  }
  EXPECT_EQ(Arena::of({}).usage().live, before);
}

}  // namespace
}  // namespace furious
