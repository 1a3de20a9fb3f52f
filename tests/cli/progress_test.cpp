#include "cli/progress.h"

#include <gtest/gtest.h>

namespace furious::cli {
namespace {

using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;

// Files in the place of the terminal, as in the log of a batch system.
TEST(ProgressLine, LinesOfLongWorkAreAmongThePermanentOnes) {
  CaptureStdout();
  CaptureStderr();
  ProgressLine line("train", std::chrono::seconds(0));
  line.print("begin");
  EXPECT_TRUE(line.due());
  line.show("step 1");
  line.show("step 2");
  EXPECT_EQ(GetCapturedStdout(), "begin\nstep 1\nstep 2\n");
  EXPECT_EQ(GetCapturedStderr(), "");
}

TEST(ProgressLine, OneLineAMinute) {
  CaptureStdout();
  CaptureStderr();
  ProgressLine line("train", ProgressLine::kMinute);
  EXPECT_FALSE(line.due());
  line.show("step 1");  // too early
  ProgressLine other("eval");
  EXPECT_FALSE(other.due());
  EXPECT_EQ(GetCapturedStdout() + GetCapturedStderr(), "");
}

}  // namespace
}  // namespace furious::cli
