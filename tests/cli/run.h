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

// Runs the binary and expects the exit code and all of `parts` in its output.
void expect_run(const std::string& arguments, int code, const std::vector<std::string>& parts);

// Replaces this process by the binary; for the child after a fork.
[[noreturn]] void exec_binary(std::vector<std::string> arguments);

// Starts the binary, sends `signal` once `ready` returns true, and returns the status of waitpid. Both streams go to
// the file `output`.
int run_and_signal(std::vector<std::string> arguments, int signal, const std::function<bool()>& ready,
                   const std::string& output = "/dev/null");

}  // namespace furious::testing
