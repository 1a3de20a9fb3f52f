// The commands of `furious`, one file each. Each function adds one to the command line, with a callback that runs it.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "furious/error.h"

namespace furious::cli {

void add_ablate(CLI::App& app);
void add_bench(CLI::App& app);
void add_bench_decode(CLI::App& bench);
void add_bench_mixer(CLI::App& bench);
void add_bench_sampling(CLI::App& bench);
void add_bench_serve(CLI::App& bench);
void add_bench_step(CLI::App& bench);
void add_chat(CLI::App& app);
void add_compare(CLI::App& app);
void add_data(CLI::App& app);
void add_demo(CLI::App& app);
void add_eval(CLI::App& app);
void add_export(CLI::App& app);
void add_generate(CLI::App& app);
void add_help(CLI::App& app);
void add_inspect(CLI::App& app);
void add_memory(CLI::App& app);
void add_niah(CLI::App& app);
void add_plot(CLI::App& app);
void add_presets(CLI::App& app);
void add_recall(CLI::App& app);
void add_scaling(CLI::App& app);
void add_serve(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_tokenizer(CLI::App& app);
void add_train(CLI::App& app);
void add_verify(CLI::App& app);
void add_watch(CLI::App& app);

// A mistake in the command line: exit code 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

// The subcommand of this name; an unknown name is a UsageError that suggests the nearest.
const CLI::App& find_command(const CLI::App& app, const std::string& name);

// The lines of `furious --version`.
std::string version_text();

}  // namespace furious::cli
