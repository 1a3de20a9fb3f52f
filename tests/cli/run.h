// Running the binary, for the command-line tests.
#pragma once

#include <functional>
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

// Starts it and gives it `signal` as soon as `ready` says so; returns what waitpid says.
int run_and_signal(std::vector<std::string> arguments, int signal, const std::function<bool()>& ready);

}  // namespace furious::testing
