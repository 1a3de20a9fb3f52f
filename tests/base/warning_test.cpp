#include "base/warning.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace furious {
namespace {

using ::testing::internal::CaptureStderr;
using ::testing::internal::GetCapturedStderr;

class Warning : public ::testing::Test {
 protected:
  Warning() { reset_warnings(); }
  ~Warning() override {
    set_warning_output({});
    reset_warnings();
  }
};

TEST_F(Warning, OncePerKey) {
  CaptureStderr();
  warn_once("a", "first");
  warn_once("a", "second");
  warn_once("b", "third");
  EXPECT_EQ(GetCapturedStderr(), "warning: first\nwarning: third\n");
  CaptureStderr();
  reset_warnings();
  warn_once("a", "again");
  EXPECT_EQ(GetCapturedStderr(), "warning: again\n");
}

TEST_F(Warning, OnceFromManyThreads) {
  CaptureStderr();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([] {
      for (int j = 0; j < 100; ++j) warn_once("key", "message");
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(GetCapturedStderr(), "warning: message\n");
}

TEST_F(Warning, AnotherOutput) {
  std::vector<std::string> lines;
  // An output may warn, too.
  set_warning_output([&](const std::string& line) {
    lines.push_back(line);
    warn_once("inside", "inside");
  });
  CaptureStderr();
  warn_once("a", "message");
  EXPECT_EQ(GetCapturedStderr(), "");
  EXPECT_EQ(lines, (std::vector<std::string>{"message", "inside"}));
}

}  // namespace
}  // namespace furious
