#include "cli/run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>

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

}  // namespace furious::testing
