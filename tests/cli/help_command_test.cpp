#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "cli/run.h"

namespace furious {
namespace {

using testing::expect_run;
using testing::run;

// The names under "Subcommands:" in the help of a command.
std::vector<std::string> commands_in(const std::string& help) {
  std::vector<std::string> names;
  std::istringstream lines(help.substr(std::min(help.find("Subcommands:\n"), help.size())));
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line) && line.starts_with("  "))
    if (line[2] != ' ') names.push_back(line.substr(2, line.find(' ', 2) - 2));
  return names;
}

// `help COMMAND` and `COMMAND --help` print the same, for all commands and their subcommands.
void expect_same_help(const std::string& command, int& seen) {
  const std::string help = run("help " + command).output;
  EXPECT_EQ(help, run(command + " --help").output) << command;
  EXPECT_NE(help.find("Usage: furious" + (command.empty() ? "" : " " + command)), std::string::npos) << help;
  ++seen;
  for (const std::string& name : commands_in(help))
    expect_same_help(command.empty() ? name : command + " " + name, seen);
}

TEST(HelpCommand, PrintsTheHelpOfEveryCommand) {
  int seen = 0;
  expect_same_help("", seen);
  EXPECT_GE(seen, 20);
  expect_run("help", 0, {"train", "bench", "docs/glossary.md", "docs/paper.md"});
}

TEST(HelpCommand, UnknownCommandsAreAnsweredWithTheNearest) {
  expect_run("help trian", 2, {"unknown command \"trian\"", "did you mean \"train\"?"});
  expect_run("help bench stpe", 2, {"unknown command \"stpe\"", "did you mean \"step\"?"});
  expect_run("help train steps", 2, {"train has no subcommands", "leave out \"steps\""});
}

TEST(VersionFlag, NamesTheInstructionSetAsItsVendorDoes) {
  EXPECT_EQ(run("--version").output.find("AVX3"), std::string::npos);
}

}  // namespace
}  // namespace furious
