#include "ops/views.h"

#include "ops/elementwise.h"
#include "ops/nn/activation.h"
#include "strided.h"

namespace furious {
namespace {

using testing::dense;
using testing::tensor_of;
using testing::to_doubles;
using Values = std::vector<double>;

TEST(Views, SplitSharesMemoryAndGathersGradients) {
  Tape tape;
  const Variable x(tensor_of({1, 2, 3, 4, 5, 6, 7, 8}, {2, 4}), true);
  const std::vector<Variable> parts = split(tape, x, {1, 3});
  EXPECT_EQ(parts[0].value().raw(), x.value().raw());
  EXPECT_EQ(to_doubles(parts[0].value()), (Values{1, 5}));
  EXPECT_EQ(to_doubles(parts[1].value()), (Values{2, 3, 4, 6, 7, 8}));
  parts[0].add_gradient(tensor_of({10, 20}, {2, 1}));
  tape.backward(parts[1], tensor_of({1, 2, 3, 4, 5, 6}, {2, 3}));
  EXPECT_EQ(to_doubles(x.gradient()), (Values{10, 1, 2, 3, 20, 4, 5, 6}));
}

TEST(Views, NewGradientOfAPartIsAViewOfTheFusedGradient) {
  Tape tape;
  const Variable x(tensor_of({1, 2, 3, 4, 5, 6}, {2, 3}), true);
  const std::vector<Variable> parts = split(tape, x, {1, 2});
  std::vector<const void*> places;
  for (const Variable& part : parts) {
    const Tensor place = part.new_gradient();
    fill(place, places.empty() ? 1.0f : 2.0f);
    places.push_back(place.raw());
    part.add_gradient(place);
  }
  tape.backward(Variable(tensor_of({0}, {1})));
  EXPECT_EQ(x.gradient().raw(), places[0]);
  EXPECT_EQ(static_cast<const float*>(x.gradient().raw()) + 1, places[1]);
  EXPECT_EQ(to_doubles(x.gradient()), (Values{1, 2, 2, 1, 2, 2}));
}

TEST(Views, PartWithoutGradientHasZero) {
  Tape tape;
  const Variable x(tensor_of({1, 2, 3, 4}, {2, 2}), true);
  const std::vector<Variable> parts = split(tape, x, {1, 1});
  tape.backward(parts[1], tensor_of({5, 6}, {2, 1}));
  EXPECT_EQ(to_doubles(x.gradient()), (Values{0, 5, 0, 6}));
}

TEST(Views, NoPartWithGradientMeansNone) {
  Tape tape;
  const Variable x(tensor_of({1, 2}, {1, 2}), true);
  split(tape, x, {1, 1});
  tape.backward(Variable(tensor_of({0}, {1})));
  EXPECT_FALSE(x.gradient());
}

// Contributions in every order: into the view, as separate tensors, several, and while the view is in use.
TEST(Views, GradientsOfAPartAddUp) {
  for (int order = 0; order < 4; ++order) {
    Tape tape;
    const Variable x(tensor_of({1, 2, 3, 4}, {2, 2}), true);
    const Variable part = split(tape, x, {1, 1})[0];
    const Tensor place = part.new_gradient();
    const Tensor other = part.new_gradient();
    ASSERT_NE(place.raw(), other.raw());
    copy(place, tensor_of({1, 2}, {2, 1}));
    copy(other, tensor_of({10, 20}, {2, 1}));
    part.add_gradient(order & 1 ? place : other);
    part.add_gradient(order & 1 ? other : place);
    if (order & 2) part.add_gradient(tensor_of({100, 200}, {2, 1}));
    tape.backward(Variable(tensor_of({0}, {1})));
    EXPECT_EQ(to_doubles(x.gradient()), order & 2 ? (Values{111, 0, 222, 0}) : (Values{11, 0, 22, 0}));
  }
}

TEST(Views, WholeAndPartsMayBothBeUsed) {
  Tape tape;
  const Variable x(tensor_of({1, 2, 3, 4}, {2, 2}), true);
  const Variable part = split(tape, x, {1, 1})[1];
  const Variable sum = add(tape, x, x);
  part.add_gradient(tensor_of({10, 20}, {2, 1}));
  tape.backward(sum, tensor_of({1, 1, 1, 1}, {2, 2}));
  EXPECT_EQ(to_doubles(x.gradient()), (Values{2, 12, 2, 22}));
}

TEST(Views, PartsOfPartsWriteIntoOneGradient) {
  Tape tape;
  const Variable x(tensor_of({1, 2, 3, 4, 5, 6, 7, 8}, {1, 8}), true);
  const std::vector<Variable> outer = split(tape, x, {2, 6});
  const std::vector<Variable> inner = split_heads(tape, outer[1], {{2, 2}, {1, 2}});
  EXPECT_EQ(inner[0].value().shape(), (Shape{1, 2, 2}));
  const Tensor place = inner[1].new_gradient();
  fill(place, 7);
  inner[1].add_gradient(place);
  outer[1].add_gradient(tensor_of({1, 2, 3, 4, 5, 6}, {1, 6}));  // while the inner parts use its memory
  inner[0].add_gradient(tensor_of({10, 20, 30, 40}, {1, 2, 2}));
  tape.backward(Variable(tensor_of({0}, {1})));
  EXPECT_EQ(to_doubles(x.gradient()), (Values{0, 0, 11, 22, 33, 44, 12, 13}));
}

TEST(Views, OperationsOnPartsGiveTheGradientOfTheWhole) {
  testing::Random random(1);
  const Tensor value = random.normal_tensor({2, 3, 10});
  const Tensor dq = random.normal_tensor({2, 3, 2, 2}), dv = random.normal_tensor({2, 3, 2, 3});
  const Variable x(value, true);
  Tape tape;
  const std::vector<Variable> parts = split_heads(tape, x, {{2, 2}, {2, 3}});
  const Variable q = activation(tape, parts[0], Activation::silu);
  const Variable v = activation(tape, parts[1], Activation::relu);
  q.add_gradient(dense(dq));
  tape.backward(v, dv);

  const Tensor expected = Tensor::empty_like(value);
  const Tensor q_value = value.slice(-1, 0, 4).split_dim(-1, 2, 2), v_value = value.slice(-1, 4, 6).split_dim(-1, 2, 3);
  activation_backward(expected.slice(-1, 0, 4).split_dim(-1, 2, 2), dq, q_value, Activation::silu);
  activation_backward(expected.slice(-1, 4, 6).split_dim(-1, 2, 3), dv, v_value, Activation::relu);
  EXPECT_TRUE(testing::same_bits(x.gradient(), expected));
}

TEST(Views, ASecondPassAddsToTheFirst) {
  const Variable x(tensor_of({1, 2}, {1, 2}), true);
  for (int pass = 0; pass < 2; ++pass) {
    Tape tape;
    tape.backward(split(tape, x, {1, 1})[0], tensor_of({3}, {1, 1}));
  }
  EXPECT_EQ(to_doubles(x.gradient()), (Values{6, 0}));
}

TEST(Views, NothingIsRecordedWithoutNeed) {
  Tape tape;
  const Variable x(tensor_of({1, 2}, {1, 2}));
  EXPECT_FALSE(split(tape, x, {1, 1})[0].needs_gradient());
  EXPECT_EQ(tape.size(), 0u);
  const Variable parameter(tensor_of({1, 2}, {1, 2}), true);
  EXPECT_FALSE(split(Tape::off(), parameter, {1, 1})[0].needs_gradient());
}

TEST(Views, ReshapePassesTheGradientOn) {
  Tape tape;
  const Variable x(tensor_of({1, 2, 3, 4}, {2, 2}), true);
  const Variable y = reshape(tape, x, {1, 4});
  EXPECT_EQ(y.value().raw(), x.value().raw());
  tape.backward(y, tensor_of({5, 6, 7, 8}, {1, 4}));
  EXPECT_EQ(x.gradient().shape(), (Shape{2, 2}));
  EXPECT_EQ(to_doubles(x.gradient()), (Values{5, 6, 7, 8}));
}

TEST(Views, BadArgumentsAreNamed) {
  const Variable x(tensor_of({1, 2, 3, 4}, {2, 2}), true);
  testing::expect_error([&] { split(Tape::off(), x, {1, 2}); }, {"split", "\"x\"", "[2, 2]", "3", "1 + 2"});
  testing::expect_error([&] { split_heads(Tape::off(), x, {{2, 2}}); }, {"split_heads", "[2, 2]", "4"});
  testing::expect_error([&] { reshape(Tape::off(), x, {3}); }, {"[2, 2]", "[3]"});
  Tape tape;
  testing::expect_error([&] { tape.parts(x, {[](const Tensor& t) { return t.slice(0, 0, 1); }}); }, {"tape", "2", "4"});
}

}  // namespace
}  // namespace furious
