#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string>

#include "base/boundary.h"
#include "base/error.h"
#include "cli/commands.h"
#include "cli/train_flags.h"
#include "cli/unknown_flags.h"
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

int usage_error(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  if (error.get_exit_code() != 0) {
    try {
      const CLI::App& command = named_command(app, argc, argv);
      furious::cli::check_flags(command, argc, argv);  // it may be the cause of any other error
      furious::cli::check_arguments(command);
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
