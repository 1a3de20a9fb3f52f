#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "base/boundary.h"
#include "base/error.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/train_flags.h"
#include "dist/communicator.h"

namespace {

// The command that the words name. Throws if a word is where a command should be and is none: a better message than
// CLI11's.
const CLI::App& named_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App* command = &app;
  for (int i = 1; i < argc && argv[i][0] != '-' && !command->get_subcommands({}).empty(); ++i) {
    const auto named = [](const CLI::App* candidate) { return !candidate->get_name().empty(); };
    if (std::ranges::none_of(command->get_subcommands({}), named)) break;
    command = &furious::cli::find_command(*command, argv[i]);
  }
  return *command;
}

// Other commands would run in full in every process and write the same files.
void check_processes(int argc, char** argv) {
  if (furious::launched_processes() == 1 || argc < 2 || argv[1][0] == '-') return;
  const std::string command = argv[1];
  furious::require(command == "train" || (command == "bench" && argc > 2 && std::string(argv[2]) == "step"),
                   "`{}` runs in one process; start only `train` and `bench step` with mpirun or srun", command);
}

// Names that other programs have for flags of this one.
const std::map<std::string, std::string> kSynonyms = {
    {"learning-rate", "lr"},  {"batch-size", "batch"},      {"seq-len", "length"},  {"sequence-length", "length"},
    {"block-size", "length"}, {"context-length", "length"}, {"max-steps", "steps"}, {"max-iters", "steps"},
    {"n-layer", "layers"},    {"num-layers", "layers"},     {"n-head", "heads"},    {"num-heads", "heads"},
    {"wd", "weight-decay"},   {"warmup-steps", "warmup"},   {"optim", "optimizer"}, {"output-dir", "out"}};

// Throws if a flag of the command is unknown, naming the one that it resembles; does nothing if none does.
void check_flags(const CLI::App& command, int argc, char** argv) {
  std::vector<std::string> known;
  const auto add = [&](const CLI::App& from) {
    for (const CLI::Option* option : from.get_options())
      for (const std::string& name : option->get_lnames()) known.push_back(name);
  };
  add(command);
  for (const CLI::App* group : command.get_subcommands({}))
    if (group->get_name().empty()) add(*group);
  const auto is_known = [&](const std::string& name) { return std::ranges::find(known, name) != known.end(); };
  for (int i = 1; i < argc; ++i) {
    const std::string word(argv[i]);
    const std::string name = word.starts_with("--") ? word.substr(2, word.find('=') - 2) : "";
    if (name.empty() || is_known(name)) continue;
    const auto synonym = kSynonyms.find(name);
    const bool has_synonym = synonym != kSynonyms.end() && is_known(synonym->second);
    const std::string near = has_synonym ? synonym->second : furious::nearest_name(name, known);
    if (near.empty()) return;
    throw furious::cli::UsageError(fmt::format("unknown flag --{}; did you mean --{}? `furious {} --help` lists all",
                                               name, near, command.get_name()));
  }
}

int usage_error(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  if (error.get_exit_code() != 0) {
    try {
      const CLI::App& command = named_command(app, argc, argv);
      if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) check_flags(command, argc, argv);
    } catch (const furious::cli::UsageError& better) {
      std::fprintf(stderr, "furious: %s\n", better.what());
      return 2;
    }
  }
  return app.exit(error) == 0 ? 0 : 2;
}

}  // namespace

// Exit codes: 0 done, 1 failed, 2 usage.
int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` is then an error of the write
  CLI::App app("furious trains, evaluates and runs language models of the 2Mamba family.", "furious");
  app.set_version_flag("--version", furious::cli::version_text,
                       "Print the version, the compiler, the instruction set and the devices");
  app.require_subcommand(0, 1);
  app.footer(fmt::format("`furious help COMMAND` prints the help of a command.\n{}\n{}", furious::cli::kGlossaryPage,
                         furious::cli::kPaperPage));
  furious::cli::add_demo(app);
  furious::cli::add_presets(app);
  furious::cli::add_tokenizer(app);
  furious::cli::add_tokenize(app);
  furious::cli::add_data(app);
  furious::cli::add_train(app);
  furious::cli::add_watch(app);
  furious::cli::add_eval(app);
  furious::cli::add_generate(app);
  furious::cli::add_serve(app);
  furious::cli::add_chat(app);
  furious::cli::add_ablate(app);
  furious::cli::add_plot(app);
  furious::cli::add_scaling(app);
  furious::cli::add_compare(app);
  furious::cli::add_niah(app);
  furious::cli::add_recall(app);
  furious::cli::add_memory(app);
  furious::cli::add_verify(app);
  furious::cli::add_inspect(app);
  furious::cli::add_export(app);
  furious::cli::add_bench(app);
  furious::cli::add_help(app);
  try {
    check_processes(argc, argv);
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) std::fputs(app.help().c_str(), stdout);
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error, argc, argv);
  } catch (const furious::cli::UsageError& error) {
    std::fprintf(stderr, "furious: %s\n", error.what());
    return 2;
  } catch (...) {
    const std::string words = furious::words_of(std::current_exception());
    if (furious::Communicator::reports_errors()) std::fprintf(stderr, "furious: %s\n", words.c_str());
    return 1;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(
        stderr,
        "furious: the output could not be written; the disk is full, or the reading end of the pipe is closed\n");
    return 1;
  }
  return 0;
}
