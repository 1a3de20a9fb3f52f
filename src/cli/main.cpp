#include <cstdio>

#include "base/error.h"
#include "cli/commands.h"

// Exit codes: 0 done, 1 failed, 2 usage.
int main(int argc, char** argv) {
  CLI::App app("furious trains, evaluates and runs language models of the 2Mamba family.", "furious");
  app.set_version_flag("--version", furious::cli::version_text, "Version, compiler, CPU features and devices in use");
  app.require_subcommand(0, 1);
  furious::cli::add_tokenizer(app);
  furious::cli::add_tokenize(app);
  furious::cli::add_bench(app);
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) std::fputs(app.help().c_str(), stdout);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "furious: %s\n", error.what());
    return 1;
  }
  return 0;
}
