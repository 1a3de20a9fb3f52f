#include "cli/run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <thread>

namespace furious::testing {

RunResult run(const std::string& arguments, const std::string& before) {
  const std::string command = fmt::format("{} '{}' {} 2>&1", before, FURIOUS_BINARY, arguments);
  std::FILE* pipe = ::popen(command.c_str(), "r");
  RunResult result;
  std::array<char, 4096> buffer;
  while (const size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe)) result.output.append(buffer.data(), got);
  const int status = ::pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

void expect_run(const std::string& arguments, int code, const std::vector<std::string>& parts) {
  const RunResult result = run(arguments);
  EXPECT_EQ(result.code, code) << result.output;
  for (const std::string& part : parts)
    EXPECT_NE(result.output.find(part), std::string::npos) << "\"" << part << "\" is missing in: " << result.output;
}

void exec_binary(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "furious");
  std::vector<char*> words;
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  ::execv(FURIOUS_BINARY, words.data());
  ::_exit(127);
}

int run_and_signal(std::vector<std::string> arguments, int signal, const std::function<bool()>& ready,
                   const std::string& output) {
  std::fflush(nullptr);  // or the child writes it again
  const pid_t child = ::fork();
  if (child == 0) {
    if (std::freopen(output.c_str(), "a", stdout) == nullptr) ::_exit(126);
    if (std::freopen(output.c_str(), "a", stderr) == nullptr) ::_exit(126);
    exec_binary(std::move(arguments));
  }
  int status = 0;
  bool signalled = false;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (!signalled && ready()) {
      ::kill(child, signal);
      signalled = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return status;
}

}  // namespace furious::testing
