#include "ops/tape.h"

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

}  // namespace
}  // namespace furious
