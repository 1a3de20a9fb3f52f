#include "ops/elementwise.h"

#include "base/parallel.h"
#include "strided.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::strided_copy;
using testing::tensor_of;
using testing::to_doubles;
using Values = std::vector<double>;

TEST(Elementwise, CopyConvertsBetweenAllFloatTypes) {
  const std::vector<DType> dtypes = {DType::f32, DType::bf16, DType::f16, DType::f64};
  // Numbers that every type holds exactly.
  const Tensor exact = tensor_of({0, 1, -2, 0.5f, 1.75f, -240, 0.0078125f, 3}, {2, 4});
  for (DType from : dtypes)
    for (DType to : dtypes)
      EXPECT_EQ(to_doubles(to_dtype(to_dtype(exact, from), to)), to_doubles(exact)) << name_of(from) << name_of(to);
}

TEST(Elementwise, ConcatAndItsGradient) {
  testing::Random random(7);
  const Variable a(strided_copy(random.normal_tensor({2, 3, 5})), true), b(random.normal_tensor({2, 3, 4}), true);
  const Tensor dy = random.normal_tensor({2, 3, 9});
  Tape tape;
  const Variable y = concat(tape, a, b);
  tape.backward(y, dy);
  EXPECT_EQ(to_doubles(y.value().slice(-1, 0, 5)), to_doubles(a.value()));
  EXPECT_EQ(to_doubles(y.value().slice(-1, 5, 4)), to_doubles(b.value()));
  EXPECT_EQ(to_doubles(a.gradient()), to_doubles(dy.slice(-1, 0, 5)));
  EXPECT_EQ(to_doubles(b.gradient()), to_doubles(dy.slice(-1, 5, 4)));
  expect_error([&] { concat_forward(a.value(), {}); }, {"concat", "\"b\"", "missing"});
  expect_error([&] { concat_forward(a.value(), to_dtype(b.value(), DType::bf16)); }, {"concat", "\"b\"", "bf16"});
}

TEST(Elementwise, CopyRoundsOnce) {
  const Tensor x = tensor_of({1.00390625f, 1.01171875f, 3.14159274f}, {3});  // the first two are ties in bf16
  EXPECT_EQ(to_doubles(to_dtype(x, DType::bf16)), (Values{1, 1.015625, 3.140625}));
  Tensor wide = Tensor::empty({2}, DType::f64);
  wide.data<double>()[0] = 0.1;
  wide.data<double>()[1] = 1 + 1e-12;
  EXPECT_EQ(to_doubles(to_dtype(wide, DType::f32)), (Values{static_cast<double>(0.1f), 1}));
  EXPECT_EQ(to_doubles(to_dtype(wide, DType::f64)), (Values{0.1, 1 + 1e-12}));
  EXPECT_EQ(to_doubles(to_dtype(to_dtype(x, DType::f64), DType::f32)), to_doubles(x));
}

TEST(Elementwise, CopyFollowsStridesOnBothSides) {
  testing::Random random(2);
  for (int round = 0; round < 40; ++round) {
    const Shape shape{random.integer(1, 4), random.integer(1, 4), random.integer(1, 6), random.integer(2, 5)};
    const Tensor source = random.normal_tensor(shape);
    const Tensor target = Tensor::zeros(shape, DType::f32);
    const int dim = static_cast<int>(random.integer(0, 3));
    const int64_t start = random.integer(0, shape[dim] - 1);
    const int64_t count = random.integer(0, shape[dim] - start);
    const bool drop = random.coin();
    const auto part = [&](const Tensor& tensor) {
      return drop ? tensor.select(dim, start) : tensor.slice(dim, start, count);
    };
    copy(part(target), part(source));
    EXPECT_EQ(to_doubles(part(target)), to_doubles(part(source)));
    // Nothing else was written.
    const Values all = to_doubles(target);
    const auto written = std::count_if(all.begin(), all.end(), [](double value) { return value != 0; });
    EXPECT_EQ(written, part(source).elements());
  }
}

TEST(Elementwise, CopyOfIntegers) {
  const Tensor x = testing::int_tensor_of({1, -2, 2147483647, 4}, {2, 2});
  const Tensor y = Tensor::empty({2, 1}, DType::i32);
  copy(y, x.slice(1, 1, 1));
  EXPECT_EQ(y.data<int32_t>()[0], -2);
  EXPECT_EQ(y.data<int32_t>()[1], 4);
  copy(y, x.slice(1, 0, 1));
  EXPECT_EQ(y.data<int32_t>()[1], 2147483647);
  expect_error([&] { copy(Tensor::empty({2, 2}, DType::f32), x); }, {"copy", "\"out\"", "f32", "i32"});
}

TEST(Elementwise, FillAndAddIntoWriteOnlyTheView) {
  const Tensor x = tensor_of({1, 2, 3, 4, 5, 6}, {2, 3});
  fill(x.slice(1, 1, 1), 9);
  EXPECT_EQ(to_doubles(x), (Values{1, 9, 3, 4, 9, 6}));
  add_into(x.slice(1, 1, 2), strided_copy(tensor_of({1, 2, 3, 4}, {2, 2})));
  EXPECT_EQ(to_doubles(x), (Values{1, 10, 5, 4, 12, 10}));
  add_into(x, tensor_of({1, 1, 1, 1, 1, 1}, {2, 3}));
  EXPECT_EQ(to_doubles(x), (Values{2, 11, 6, 5, 13, 11}));
}

TEST(Elementwise, LargeTensorsRunInParallel) {
  testing::Random random(3);
  const Tensor a = random.normal_tensor({50'001}), b = random.normal_tensor({50'001});
  const Tensor sum = testing::with_threads(4, [&] { return add_forward(a, b); });
  for (int64_t i = 0; i < sum.elements(); ++i)
    ASSERT_EQ(sum.data<float>()[i], a.data<float>()[i] + b.data<float>()[i]) << i;
}

TEST(Elementwise, ScalarsAndEmptyTensors) {
  const Tensor scalar = Tensor::empty({}, DType::f32);
  fill(scalar, 3);
  EXPECT_EQ(to_doubles(to_dtype(scalar, DType::bf16)), (Values{3}));
  const Tensor none = Tensor::empty({0, 3}, DType::f32);
  fill(none, 1);
  copy(none, none);
  add_into(none, none);
}

TEST(Elementwise, AddGivesEachItsOwnGradient) {
  Tape tape;
  const Variable a(tensor_of({1, 2}, {2}), true), b(tensor_of({3, 4}, {2}), true);
  const Tensor dy = tensor_of({5, 6}, {2});
  tape.backward(add(tape, a, b), dy);
  EXPECT_NE(a.gradient().raw(), b.gradient().raw());
  fill(a.gradient(), 0);
  EXPECT_EQ(to_doubles(b.gradient()), (Values{5, 6}));
  EXPECT_EQ(to_doubles(dy), (Values{5, 6}));
}

TEST(Elementwise, BadArgumentsAreNamed) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  expect_error([&] { copy(x, Tensor::zeros({3, 2}, DType::f32)); }, {"copy", "\"in\"", "[3, 2]", "[2, 3]"});
  expect_error([&] { add_into(x, Tensor::zeros({2, 2}, DType::f32)); }, {"add_into", "\"in\"", "[2, 2]"});
  expect_error([&] { add_into(x, to_dtype(x, DType::bf16)); }, {"add_into", "\"in\"", "bf16"});
  expect_error([&] { fill({}, 1); }, {"fill", "\"out\"", "missing"});
}

}  // namespace
}  // namespace furious
