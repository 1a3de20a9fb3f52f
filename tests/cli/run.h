// Running the binary, for the command-line tests.
#pragma once

#include <string>
#include <vector>

namespace furious::testing {

struct RunResult {
  int code = -1;
  std::string output;  // both streams
};

RunResult run(const std::string& arguments, const std::string& before = "");  // `before`: shell, as `ulimit -f 100;`

// Runs it and expects the exit code, and every one of `parts` in what it says.
void expect_run(const std::string& arguments, int code, const std::vector<std::string>& parts);

}  // namespace furious::testing
