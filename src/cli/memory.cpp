// `furious memory`: the memory of a cache by sequence length, measured and by formula.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/file.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "ops/mixer/mixer.h"
#include "paper/cache_memory_report.h"

namespace furious::cli {
namespace {

struct MemoryCommand {
  int64_t dim = 64, tokens = 8192;
  std::string device = "auto", svg = "memory.svg", json;

  void run() const;
};

void MemoryCommand::run() const {
  JsonFile file(json);
  const CacheMemory memory = measure_cache_memory(dim, tokens, usable_device(device));
  if (!svg.empty()) write_text(svg, to_svg(chart_of(memory)));
  fmt::print(
      "Cache of one head of dimension {} in KB (f32), measured and by the formulas of the paper's section 5.1\n\n{}\n",
      dim, to_text(table_of(memory)));
  const int64_t even = memory.break_even();
  fmt::print("break-even of the 2mamba state and a KV cache: {} measured, {} by the formula\n",
             even > 0 ? fmt::format("from {} tokens on", even) : fmt::format("not within {} tokens", tokens),
             break_even_formula(dim));
  fmt::print("with the lazy fold at most {:.3f} times the KV cache, decays and convolution included\n",
             memory.worst_of_lazy());
  if (!svg.empty()) fmt::print("chart: {}\n", svg);
  file.write(to_json(memory));
}

}  // namespace

void add_memory(CLI::App& app) {
  auto options = std::make_shared<MemoryCommand>();
  CLI::App* command = app.add_subcommand("memory", "Measure the cache memory of a sequence by its length");
  command->add_option("--dim", options->dim, "Dimension of the head")
      ->check(CLI::Range(kSmallestDim, kLargestDim))
      ->capture_default_str();
  command->add_option("--tokens", options->tokens, "Longest sequence in tokens")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  add_device(*command, options->device);
  command->add_option("--svg", options->svg, "Write the chart to this file; \"\": no chart")->capture_default_str();
  add_json(*command, options->json, "Write the results to this JSON file");
  command->footer("Example: furious memory --dim 64 --tokens 8192 --svg memory.svg");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
