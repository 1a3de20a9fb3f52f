#include <csignal>
#include <cstdio>

#include "base/boundary.h"
#include "base/error.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/train_flags.h"
#include "dist/communicator.h"

namespace {

// For a command line that could not be understood: throws if a word stands where a command should, and is none.
void check_commands(const CLI::App& app, int argc, char** argv) {
  const CLI::App* command = &app;
  for (int i = 1; i < argc && argv[i][0] != '-'; ++i) {
    std::vector<std::string> known;
    for (const CLI::App* candidate : command->get_subcommands({}))
      if (!candidate->get_name().empty()) known.push_back(candidate->get_name());  // a group of options has none
    if (known.empty()) return;
    if (std::find(known.begin(), known.end(), argv[i]) == known.end()) furious::unknown_name("command", argv[i], known);
    command = command->get_subcommand(argv[i]);
  }
}

// Only training knows what to do with several processes: others would each do all of it, and write the same files.
void check_processes(int argc, char** argv) {
  if (furious::launched_processes() == 1 || argc < 2 || argv[1][0] == '-') return;
  const std::string command = argv[1];
  furious::require(command == "train" || (command == "bench" && argc > 2 && std::string(argv[2]) == "step"),
                   "`{}` runs in one process; of several, as mpirun or srun starts them, only `train` and `bench step` "
                   "make use",
                   command);
}

int usage_error(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  if (error.get_exit_code() != 0) {
    try {
      check_commands(app, argc, argv);
    } catch (const furious::Error& better) {
      std::fprintf(stderr, "furious: %s\n", better.what());
      return 2;
    }
  }
  return app.exit(error) == 0 ? 0 : 2;
}

}  // namespace

// Exit codes: 0 done, 1 failed, 2 usage.
int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that grows past `ulimit -f` is an error of the write, which says so
  CLI::App app("furious trains, evaluates and runs language models of the 2Mamba family.", "furious");
  app.set_version_flag("--version", furious::cli::version_text, "Version, compiler, CPU features and devices in use");
  app.require_subcommand(0, 1);
  app.footer(furious::cli::kPaperPage);
  furious::cli::add_demo(app);
  furious::cli::add_presets(app);
  furious::cli::add_tokenizer(app);
  furious::cli::add_tokenize(app);
  furious::cli::add_train(app);
  furious::cli::add_eval(app);
  furious::cli::add_generate(app);
  furious::cli::add_ablate(app);
  furious::cli::add_plot(app);
  furious::cli::add_niah(app);
  furious::cli::add_recall(app);
  furious::cli::add_memory(app);
  furious::cli::add_verify(app);
  furious::cli::add_bench(app);
  try {
    check_processes(argc, argv);
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) std::fputs(app.help().c_str(), stdout);
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error, argc, argv);
  } catch (...) {
    const std::string words = furious::words_of(std::current_exception());
    if (furious::Communicator::speaks()) std::fprintf(stderr, "furious: %s\n", words.c_str());
    return 1;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "furious: not all of the output could be written: the disk is full, or nobody reads it\n");
    return 1;
  }
  return 0;
}
