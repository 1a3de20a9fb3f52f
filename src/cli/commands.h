// The commands of `furious`, one file each. Each adds itself to the command line; its work runs when it is called.
#pragma once

#include <CLI/CLI.hpp>

namespace furious::cli {

void add_ablate(CLI::App& app);
void add_bench(CLI::App& app);
void add_bench_decode(CLI::App& bench);
void add_bench_sampling(CLI::App& bench);
void add_bench_step(CLI::App& bench);
void add_demo(CLI::App& app);
void add_eval(CLI::App& app);
void add_generate(CLI::App& app);
void add_memory(CLI::App& app);
void add_niah(CLI::App& app);
void add_plot(CLI::App& app);
void add_presets(CLI::App& app);
void add_recall(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_tokenizer(CLI::App& app);
void add_train(CLI::App& app);
void add_verify(CLI::App& app);

// The lines of `furious --version`.
std::string version_text();

}  // namespace furious::cli
