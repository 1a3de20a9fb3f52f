#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

// One wrong row of ten thousand is a hundredth of the norm.
TEST(RelativeError, DetectsOneWrongRow) {
  Random random;
  const Tensor expected = random.normal_tensor({10000, 16}), actual = random.normal_tensor({10000, 16});
  copy(actual, expected);
  EXPECT_EQ(relative_error(actual, expected), 0.0);
  fill(actual.slice(0, 1234, 1), 0);
  const RelativeError error = relative_error(actual, expected);
  EXPECT_LE(error.all, 2e-2);
  EXPECT_GE(error.worst, 0.5);
  EXPECT_EQ(error.row, 1234);
  EXPECT_GE(static_cast<double>(error), 5e-2);
  EXPECT_NE(::testing::PrintToString(error).find("row 1234"), std::string::npos);
  const RelativeError of_list = relative_error(to_doubles(actual), to_doubles(expected));  // four rows in one
  EXPECT_LE(of_list.all, 2e-2);
  EXPECT_EQ(of_list.row, 1234 / 4);
  EXPECT_GE(static_cast<double>(of_list), 2e-2);
  actual.data<float>()[0] = NAN;
  EXPECT_EQ(static_cast<double>(relative_error(actual, expected)), INFINITY);
  EXPECT_EQ(static_cast<double>(relative_error(actual.slice(0, 0, 10), expected)), INFINITY);
}

}  // namespace
}  // namespace furious
