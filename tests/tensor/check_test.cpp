#include "tensor/check.h"

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;

const ArgumentCheck kCheck("op");

TEST(ArgumentCheck, MessagesNameOperationArgumentAndBothSides) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  const Tensor strided = Tensor::zeros({2, 3, 2}, DType::f32).select(2, 0);
  expect_error([&] { kCheck.present("x", {}); }, {"op: argument \"x\" is missing"});
  expect_error([&] { kCheck.rank("x", x, 3); }, {"op: argument \"x\" has rank 2 (shape [2, 3]), expected rank 3"});
  expect_error(
      [&] {
        kCheck.shape("x", x, {2, ArgumentCheck::kAny, 4});
      },
      {"op: argument \"x\" has shape [2, 3], expected [2, any, 4]"});
  expect_error([&] { kCheck.shape("x", x, {2, 4}); }, {"shape [2, 3], expected [2, 4]"});
  expect_error(
      [&] {
        kCheck.dtype("x", x, {DType::bf16, DType::f16});
      },
      {"op: argument \"x\" has dtype f32, expected bf16 or f16"});
  expect_error(
      [&] {
        kCheck.device("x", x, {DeviceKind::cuda, 1});
      },
      {"op: argument \"x\" is on cpu, expected cuda:1"});
  expect_error([&] { kCheck.contiguous("x", strided); }, {"op: argument \"x\" of shape [2, 3] is not contiguous"});
  expect_error([&] { kCheck.unit_inner_stride("x", strided); }, {"op: argument \"x\"", "stride 2", "expected 1"});
}

TEST(ArgumentCheck, DenseChecksEveryProperty) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  kCheck.dense("x", x, DType::f32, {2, ArgumentCheck::kAny});
  expect_error([&] { kCheck.dense("x", {}, DType::f32, {2, 3}); }, {"missing"});
  expect_error([&] { kCheck.dense("x", x, DType::f32, {3, 2}); }, {"shape"});
  expect_error([&] { kCheck.dense("x", x, DType::i32, {2, 3}); }, {"dtype"});
  expect_error([&] { kCheck.dense("x", x.slice(1, 0, 2), DType::f32, {2, 2}); }, {"contiguous"});
  expect_error([&] { kCheck.dense("x", x, DType::f32, {2, 3}, {DeviceKind::cuda, 0}); }, {"cuda:0"});
}

TEST(ArgumentCheck, RowsMayHaveAnyStride) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  kCheck.rows("x", x.slice(1, 0, 2));
  kCheck.rows("x", x.slice(1, 0, 2), Tensor::zeros({2, 2}, DType::f32));
  kCheck.rows("x", Tensor::zeros({2, 1, 2}, DType::f32).slice(2, 1, 1));  // any stride for a single element
  expect_error([&] { kCheck.rows("x", Tensor::zeros({2, 3, 2}, DType::f32).select(2, 0)); }, {"\"x\"", "stride 2"});
  expect_error([&] { kCheck.rows("x", x, Tensor::zeros({2, 2}, DType::f32)); }, {"[2, 3]", "[2, 2]"});
  expect_error([&] { kCheck.rows("x", Tensor::zeros({}, DType::f32)); }, {"\"x\"", "rank 0"});
  expect_error([&] { kCheck.rows("x", Tensor::zeros({2}, DType::i32)); }, {"\"x\"", "i32", "f32"});
}

}  // namespace
}  // namespace furious
