// `furious help COMMAND`: what `furious COMMAND --help` prints.
#include <fmt/format.h>

#include <memory>

#include "base/names.h"
#include "cli/commands.h"

namespace furious::cli {

const CLI::App& find_command(const CLI::App& app, const std::string& name) {
  std::vector<std::string> known;
  for (const CLI::App* candidate : app.get_subcommands({})) {
    if (candidate->get_name() == name) return *candidate;
    if (!candidate->get_name().empty()) known.push_back(candidate->get_name());  // a group of options has no name
  }
  if (known.empty()) throw UsageError(fmt::format("{} has no subcommands; leave out \"{}\"", app.get_name(), name));
  try {
    unknown_name("command", name, known);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

void add_help(CLI::App& app) {
  auto words = std::make_shared<std::vector<std::string>>();
  CLI::App* command = app.add_subcommand("help", "Print the help of a command");
  command->add_option("command", *words, "The command, and its subcommand where it has some: help bench step");
  command->footer("Example: furious help train");
  command->callback([&app, words] {
    const CLI::App* found = &app;
    std::string path;  // of the commands around it, for the usage line
    for (const std::string& word : *words) {
      path += (path.empty() ? "" : " ") + found->get_name();
      found = &find_command(*found, word);
    }
    // The root would print the help of the subcommand that was given, which is this one.
    fmt::print("{}", found == &app ? app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal)
                                   : found->help(path));
  });
}

}  // namespace furious::cli
