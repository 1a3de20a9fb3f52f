// `furious memory`: what remembering a sequence takes, measured and counted.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "ops/mixer/mixer.h"
#include "paper/cache_memory.h"
#include "report/chart.h"
#include "report/table.h"

namespace furious::cli {
namespace {

struct MemoryCommand {
  int64_t dim = 64, tokens = 8192;
  std::string device = "auto", svg = "memory.svg", json;

  void run() const;
};

// Powers of two, and the lengths around the break-even.
std::vector<int64_t> lengths_of(const CacheMemory& memory) {
  std::vector<int64_t> lengths{memory.tokens()};
  for (int64_t length = 1; length <= memory.tokens(); length *= 2)
    if (length == 1 || length >= 64) lengths.push_back(length);
  for (const int64_t length : {break_even_formula(memory.dim), memory.break_even()})
    if (length >= 1 && length <= memory.tokens()) lengths.push_back(length);
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

std::string kilobytes(int64_t bytes) {
  return fmt::format("{:.1f}", static_cast<double>(bytes) / 1e3);
}

Table table_of(const CacheMemory& memory) {
  Table table{{"tokens"}, {}};
  for (const MemoryCurve& curve : memory.curves) {
    table.header.push_back(curve.name);
    table.header.push_back("(formula)");
  }
  for (const int64_t length : lengths_of(memory)) {
    auto& row = table.rows.emplace_back(1, std::to_string(length));
    for (const MemoryCurve& curve : memory.curves) {
      row.push_back(kilobytes(curve.measured[length - 1]));
      row.push_back(kilobytes(curve.formula[length - 1]));
    }
  }
  return table;
}

Chart chart_of(const CacheMemory& memory) {
  Chart chart;
  chart.title = fmt::format("What one head of {} remembers a sequence with", memory.dim);
  chart.x_label = "tokens";
  chart.y_label = "bytes, measured";
  chart.log_x = chart.log_y = true;
  std::vector<int64_t> lengths;  // a few hundred tell the steps of a cache
  for (double length = 1; length < static_cast<double>(memory.tokens()); length = std::max(length + 1, length * 1.02))
    lengths.push_back(static_cast<int64_t>(length));
  lengths.push_back(memory.tokens());
  for (const MemoryCurve& curve : memory.curves) {
    Series series{curve.name, {}, {}};
    for (const int64_t length : lengths) {
      series.x.push_back(static_cast<double>(length));
      series.y.push_back(static_cast<double>(curve.measured[length - 1]));
    }
    chart.series.push_back(std::move(series));
  }
  if (const int64_t even = memory.break_even(); even > 0)
    chart.marks.push_back({fmt::format("break-even: {} tokens (formula: {})", even, break_even_formula(memory.dim)),
                           static_cast<double>(even)});
  return chart;
}

nlohmann::ordered_json to_json(const CacheMemory& memory) {
  nlohmann::ordered_json curves = nlohmann::ordered_json::array();
  const std::vector<int64_t> lengths = lengths_of(memory);
  for (const MemoryCurve& curve : memory.curves) {
    nlohmann::ordered_json points = nlohmann::ordered_json::array();
    for (const int64_t length : lengths)
      points.push_back({{"tokens", length},
                        {"measured_bytes", curve.measured[length - 1]},
                        {"formula_bytes", curve.formula[length - 1]}});
    curves.push_back({{"name", curve.name}, {"points", points}});
  }
  return {{"dim", memory.dim},
          {"break_even_measured", memory.break_even()},
          {"break_even_formula", break_even_formula(memory.dim)},
          {"worst_of_lazy_fold", memory.worst_of_lazy()},
          {"curves", curves}};
}

void MemoryCommand::run() const {
  JsonFile file(json);
  const CacheMemory memory = measure_cache_memory(dim, tokens, usable_device(device));
  if (!svg.empty()) write_text(svg, to_svg(chart_of(memory)));
  fmt::print("KB that one head of {} holds of a sequence (f32), measured and as the paper's section 5.1 counts\n\n{}\n",
             dim, to_text(table_of(memory)));
  const int64_t even = memory.break_even();
  fmt::print("break-even of 2mamba's state and keys and values: {} measured, {} by the formula\n",
             even > 0 ? fmt::format("from {} tokens on", even) : fmt::format("not within {} tokens", tokens),
             break_even_formula(dim));
  fmt::print("with the lazy fold at most {:.3f} times what keys and values take, decays and convolution included\n",
             memory.worst_of_lazy());
  if (!svg.empty()) fmt::print("chart in {}\n", svg);
  file.write(to_json(memory));
}

}  // namespace

void add_memory(CLI::App& app) {
  auto options = std::make_shared<MemoryCommand>();
  CLI::App* command = app.add_subcommand("memory", "Measure what remembering a sequence takes, by its length");
  command->add_option("--dim", options->dim, "Dimension of the head")
      ->check(CLI::Range(kSmallestDim, kLargestDim))
      ->capture_default_str();
  command->add_option("--tokens", options->tokens, "Up to so many")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--device", options->device, "cpu, cuda, cuda:N; auto: a GPU if there is one")
      ->capture_default_str();
  command->add_option("--svg", options->svg, "Write the chart to this file; \"\": none")->capture_default_str();
  command->add_option("--json", options->json, "Write the same to this file");
  command->footer("Example: furious memory --dim 64 --tokens 8192 --svg memory.svg");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
