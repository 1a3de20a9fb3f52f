#include "base/subnormals.h"

#include <gtest/gtest.h>

namespace furious {
namespace {

float product(float a, float b) {
  volatile float x = a, y = b;  // computed when it runs, not when it is compiled
  return x * y;
}

TEST(FlushSubnormals, AppliesDuringItsLifetime) {
  EXPECT_GT(product(1e-30f, 1e-10f), 0.0f);
  {
    const FlushSubnormals flush;
    EXPECT_EQ(product(1e-30f, 1e-10f), 0.0f);
    EXPECT_EQ(product(1e-40f, 1e10f), 0.0f);
    EXPECT_EQ(product(1e-20f, 1e-10f), 1e-30f);
  }
  EXPECT_GT(product(1e-30f, 1e-10f), 0.0f);
  EXPECT_GT(product(1e-40f, 1e10f), 0.0f);
}

}  // namespace
}  // namespace furious
