#include "ops/tape.h"

#include "ops/nn/linear.h"

#include "support.h"

namespace furious {
namespace {

using testing::tensor_of;

TEST(Tape, AddsGradientsOfAVariableUsedTwice) {
  Tape tape;
  const Variable x(tensor_of({1.0f, 2.0f, 3.0f}, {3}), true);
  const Variable y = add(tape, add(tape, x, x), x);
  tape.backward(y, tensor_of({1.0f, 10.0f, 100.0f}, {3}));
  EXPECT_EQ(testing::to_doubles(y.value()), (std::vector<double>{3, 6, 9}));
  EXPECT_EQ(testing::to_doubles(x.gradient()), (std::vector<double>{3, 30, 300}));
}

TEST(Tape, RecordsNothingWithoutNeed) {
  Tape tape;
  const Variable x(tensor_of({1.0f}, {1}));
  add(tape, x, x);
  EXPECT_EQ(tape.size(), 0u);
  const Variable parameter(tensor_of({1.0f}, {1}), true);
  EXPECT_FALSE(add(Tape::off(), parameter, x).needs_gradient());
  EXPECT_EQ(Tape::off().size(), 0u);
}

TEST(Tape, GradientTargetIsTheGradientItself) {
  const Variable x(tensor_of({1.0f, 2.0f}, {2}), true);
  const GradientTarget first = x.gradient_target();
  EXPECT_FALSE(first.holds_sum);
  fill(first.tensor, 5.0f);
  const GradientTarget second = x.gradient_target();
  EXPECT_TRUE(second.holds_sum);
  x.add_gradient(tensor_of({1.0f, 2.0f}, {2}));
  EXPECT_EQ(testing::to_doubles(second.tensor), (std::vector<double>{6, 7}));
  x.clear_gradient();
  EXPECT_FALSE(x.gradient_target().holds_sum);
}

TEST(Tape, GradientTargetOfAConstantIsRefused) {
  testing::expect_error([] { Variable(tensor_of({1.0f}, {1})).gradient_target(); }, {"tape", "needs none"});
}

TEST(Tape, AnUndefinedVariableHasNoValue) {
  EXPECT_FALSE(Variable().value().defined());
  EXPECT_FALSE(Variable().needs_gradient());
}

// linear accumulates into gradient_target(), which for a part is a view of the whole gradient.
TEST(Tape, PartsOfALinearLayersInputReachTheWhole) {
  Tape tape;
  const Variable x(tensor_of({1, 2, 3, 4}, {4}), true);
  const std::vector<Variable> parts = tape.parts(
      x, {[](const Tensor& t) { return t.slice(0, 0, 2); }, [](const Tensor& t) { return t.slice(0, 2, 2); }});
  const Variable weight(tensor_of({10, 20}, {1, 2}));
  tape.backward(linear(tape, parts[1], weight));
  ASSERT_TRUE(x.gradient());
  EXPECT_EQ(testing::to_doubles(x.gradient()), (std::vector<double>{0, 0, 10, 20}));
}

TEST(Tape, ReportsWhenTheGradientOfASettledVariableIsComplete) {
  const Variable w(testing::tensor_of({1, 2}, {1, 2}), true);
  const Tensor value = to_dtype(w.value(), DType::f32), gradient = Tensor::empty_like(value);
  int complete = 0;
  w.settle(value, gradient, [&] { ++complete; });
  EXPECT_EQ(w.value().raw(), value.raw());
  const Variable x(testing::tensor_of({3, 4}, {1, 2}), true);
  for (const bool recompute : {false, true}) {
    const auto twice = [&](Tape& tape, const Variable& in) {
      return add(tape, linear(tape, in, w), linear(tape, in, w));
    };
    complete = 0;
    Tape abandoned;
    twice(abandoned, x);  // its backward pass never runs
    w.clear_gradient();
    Tape tape;
    const Variable y = recompute ? recomputed(tape, x, twice) : twice(tape, x);
    EXPECT_EQ(complete, 0);
    tape.backward(y);
    EXPECT_EQ(complete, 1);
    EXPECT_EQ(w.gradient().raw(), gradient.raw());
    EXPECT_EQ(testing::to_doubles(w.gradient()), (std::vector<double>{6, 8}));
    Tape again;
    again.backward(twice(again, x));
    EXPECT_EQ(complete, 2);
    EXPECT_EQ(testing::to_doubles(w.gradient()), (std::vector<double>{12, 16}));  // gradients add up
    w.clear_gradient();
    x.clear_gradient();
  }
}

}  // namespace
}  // namespace furious
