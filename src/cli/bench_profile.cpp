#include "cli/bench_profile.h"

#include <fmt/format.h>

#include <algorithm>

#include "report/table.h"

namespace furious::cli {

StepProfile::StepProfile(const std::vector<Profiler::Row>& rows, const std::vector<WorkCost>& costs, double seconds,
                         const StepRates& rates)
    : seconds_(seconds), other_(seconds), rates_(rates) {
  for (const Profiler::Row& time : rows) {
    Row& row = rows_.emplace_back(Row{time, {time.label, time.pass}});
    const auto same = [&](const WorkCost& cost) { return cost.label == time.label && cost.pass == time.pass; };
    if (const auto found = std::ranges::find_if(costs, same); found != costs.end()) row.cost = *found;
    row.floor = std::max(row.cost.flops / rates.flops, row.cost.bytes / rates.bytes);
    other_ -= time.seconds;
  }
}

std::string StepProfile::text(double unprofiled_seconds) const {
  const auto number = [](double value) {
    const bool small = value > 0 && value < 0.1;
    return fmt::format("{:.{}f}", value, small ? 4 : value < 10 ? 2 : value < 1000 ? 1 : 0);
  };
  const auto share = [&](double seconds) { return fmt::format("{:.1f} %", 100 * seconds / seconds_); };
  Table table{{"role", "operation", "pass", "ms", "share", "GFLOP", "GB", "floor ms", "times floor"}, {}};
  for (const Row& row : rows_) {
    table.rows.push_back({std::string(row.time.label.role), std::string(row.time.label.operation),
                          std::string(name_of(row.time.pass)), number(1e3 * row.time.seconds), share(row.time.seconds),
                          number(row.cost.flops / 1e9), number(row.cost.bytes / 1e9), number(1e3 * row.floor),
                          row.floor > 0 ? number(row.time.seconds / row.floor) : ""});
  }
  table.rows.push_back({"other", "", "", number(1e3 * other_), share(other_), "", "", "", ""});
  table.rows.push_back({"step", "", "", number(1e3 * seconds_), share(seconds_), "", "", "", ""});
  return fmt::format(
      "{}\nfloor: the larger of GFLOP at {:.0f} GFLOP/s and GB at {:.0f} GB/s; a step without the profiler takes {} ms",
      to_text(table), rates_.flops / 1e9, rates_.bytes / 1e9, number(1e3 * unprofiled_seconds));
}

nlohmann::ordered_json StepProfile::json() const {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows_) {
    list.push_back({{"role", row.time.label.role},
                    {"operation", row.time.label.operation},
                    {"pass", name_of(row.time.pass)},
                    {"calls", row.time.calls},
                    {"ms", 1e3 * row.time.seconds},
                    {"share", row.time.seconds / seconds_},
                    {"flops", row.cost.flops},
                    {"bytes", row.cost.bytes},
                    {"floor_ms", 1e3 * row.floor}});
    if (row.floor > 0) list.back()["ratio"] = row.time.seconds / row.floor;
  }
  return {{"step_ms", 1e3 * seconds_},         {"other_ms", 1e3 * other_},
          {"other_share", other_ / seconds_},  {"matrix_gflops", rates_.flops / 1e9},
          {"copy_gbytes", rates_.bytes / 1e9}, {"operations", list}};
}

}  // namespace furious::cli
