#include "paper/cache_memory_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace furious {
namespace {

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

}  // namespace

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
  chart.title = fmt::format("Cache memory of one head of dimension {}", memory.dim);
  chart.x_label = "tokens";
  chart.y_label = "bytes, measured";
  chart.log_x = chart.log_y = true;
  std::vector<int64_t> lengths;  // a few hundred show the steps of a cache
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

}  // namespace furious
