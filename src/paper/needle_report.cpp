#include "paper/needle_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "base/json.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostCells = 1 << 20;  // of a grid

Json paper_json() {
  Json theirs = Json::array();
  for (const auto& [model, proportions] : kPaperNeedles)
    theirs.push_back({{"model", model}, {"proportions", proportions}});
  return {{"source", "github.com/gmongaras/2Mamba2Furious, niah_and_hs/niah_heatmap.py"},
          {"lengths", kPaperNeedleLengths},
          {"tokens", kPaperNeedleTokens},
          {"models", theirs}};
}

}  // namespace

std::string answer_line(const std::string& model, const NeedleRecord& record) {
  const auto& [needle, text, prompt_tokens, right] = record;
  Json line{{"model", model}, {"length", needle.length}, {"depth_percent", needle.depth}};
  if (needle.row >= 0) line["row"] = needle.row;
  line.update({{"prompt_tokens", prompt_tokens}, {"expected", needle.answer}, {"answer", text}, {"right", right}});
  return line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Table answers_table(const std::vector<NeedleRecord>& records) {
  constexpr size_t kWrong = 3, kRight = 2;
  Table table{{"length", "depth", "expected", "answer", ""}, {}};
  for (const bool right : {false, true}) {
    size_t left = right ? kRight : kWrong;
    for (const NeedleRecord& record : records) {
      if (record.right != right || left == 0) continue;
      --left;
      // Quoted, with what cannot be printed escaped or replaced.
      table.rows.push_back(
          {fmt::format("{}", record.needle.length), fmt::format("{}%", record.needle.depth), record.needle.answer,
           Json(record.text).dump(-1, ' ', false, Json::error_handler_t::replace), right ? "right" : "wrong"});
    }
  }
  return table;
}

HeatMap map_of(const NeedleResult& result, const std::string& unit) {
  const auto& [name, grid] = result;
  HeatMap map;
  const Accuracy total = grid.total();
  map.title = fmt::format("{}: {} of {} found", name, total.right, total.asked);
  map.x_label = unit;
  map.y_label = "depth";
  for (const int64_t length : grid.lengths) map.columns.push_back(std::to_string(length));
  for (const double depth : grid.depths) map.rows.push_back(fmt::format("{}%", depth));
  for (const Accuracy& cell : grid.cells) map.cells.push_back({cell.right, cell.asked});
  return map;
}

std::optional<HeatMap> map_by_tokens(const NeedleReport& report) {
  const std::vector<NeedleResult>& results = report.results;
  HeatMap map;
  map.title = "All depths";
  map.y_label = "model";
  std::map<int64_t, std::set<int64_t>> tokens;  // of each length; several where models have several tokenizers
  for (const auto& [name, grid] : results)
    for (size_t i = 0; i < grid.lengths.size(); ++i) {
      std::set<int64_t>& means = tokens[grid.lengths[i]];
      if (grid.prompt_tokens[i] > 0) means.insert(std::llround(grid.mean_tokens(i)));
    }
  const auto has = [&](size_t count) { return [count](const auto& column) { return column.second.size() == count; }; };
  if (std::ranges::all_of(tokens, has(0))) return std::nullopt;
  const bool in_tokens = std::ranges::all_of(tokens, has(1));
  map.x_label = in_tokens ? "tokens (mean)" : "characters";
  for (const auto& [length, means] : tokens) map.columns.push_back(std::to_string(in_tokens ? *means.begin() : length));
  for (const auto& [name, grid] : results) {
    map.rows.push_back(name);
    for (const auto& [length, means] : tokens) {
      const size_t column = grid.column_of(length);
      const Accuracy found = column < grid.lengths.size() ? grid.at_length(column) : Accuracy{};
      map.cells.push_back({found.right, found.asked, {}});
    }
  }
  for (const PaperNeedles& theirs : report.with_paper ? kPaperNeedles : std::vector<PaperNeedles>()) {
    map.rows.push_back(theirs.model + " (paper)");
    for (const auto& [length, means] : tokens) {
      const auto found = std::ranges::find(kPaperNeedleLengths, length);
      map.cells.emplace_back();
      if (found != kPaperNeedleLengths.end())
        map.cells.back().proportion = theirs.proportions[static_cast<size_t>(found - kPaperNeedleLengths.begin())];
    }
  }
  return map;
}

std::string to_svg(const NeedleReport& report) {
  std::vector<HeatMap> maps;
  if (const std::optional<HeatMap> by_tokens = map_by_tokens(report)) maps.push_back(*by_tokens);
  for (const NeedleResult& result : report.results) maps.push_back(map_of(result, report.unit));
  return to_svg("Needles found in a haystack, in percent", maps);
}

nlohmann::ordered_json to_json(const NeedleReport& report) {
  const bool in_characters = map_by_tokens(report).has_value();
  Json written = Json::array();
  for (const auto& [name, grid] : report.results) {
    Json cells = Json::array(), columns = Json::array();
    for (size_t i = 0; i < grid.cells.size(); ++i)
      cells.push_back({{"length", grid.lengths[i % grid.lengths.size()]},
                       {"depth_percent", grid.depths[i / grid.lengths.size()]},
                       {"right", grid.cells[i].right},
                       {"asked", grid.cells[i].asked}});
    for (size_t i = 0; i < grid.lengths.size(); ++i)
      columns.push_back({{"length", grid.lengths[i]},
                         {"prompt_tokens", grid.prompt_tokens[i]},
                         {"mean_tokens", grid.mean_tokens(i)},
                         {"right", grid.at_length(i).right},
                         {"asked", grid.at_length(i).asked}});
    written.push_back({{"model", name}, {"right", grid.total().right}, {"asked", grid.total().asked}});
    if (in_characters) written.back()["lengths"] = columns;
    written.back()["cells"] = cells;
  }
  Json all{{"unit", report.unit}, {"models", written}};
  if (report.with_paper) all["paper"] = paper_json();
  return all;
}

NeedleReport needle_report_from_json(const std::string& text, const std::string& origin) {
  NeedleReport report;
  try {
    constexpr int64_t kMost = int64_t{1} << 40;  // sums of them fit 64 bits
    const nlohmann::json parsed = parse_json(text, origin);
    const JsonValue written(parsed, origin);
    report.unit = written.at("unit").text();
    report.with_paper = written.has("paper");
    for (const JsonValue& model : written.at("models").items()) {
      std::set<int64_t> of_lengths;
      std::set<double> of_depths;
      const std::vector<JsonValue> cells = model.at("cells").items();
      for (const JsonValue& cell : cells) {
        of_lengths.insert(cell.at("length").integer(0, kMost));
        of_depths.insert(cell.at("depth_percent").number());
      }
      if (of_lengths.size() * of_depths.size() > kMostCells)
        model.at("cells").unexpected(fmt::format("at most {} lengths times depths", kMostCells));
      NeedleGrid grid({of_lengths.begin(), of_lengths.end()}, {of_depths.begin(), of_depths.end()});
      for (const JsonValue& cell : cells)
        grid.at(cell.at("depth_percent").number(), cell.at("length").integer(0, kMost)) = {
            cell.at("right").integer(0, kMost), cell.at("asked").integer(0, kMost)};
      if (model.has("lengths"))
        for (const JsonValue& column : model.at("lengths").items()) {
          const int64_t length = column.at("length").integer(0, kMost);
          if (!of_lengths.contains(length)) column.at("length").unexpected("a length of the cells");
          grid.prompt_tokens.at(grid.column_of(length)) = column.at("prompt_tokens").integer(0, kMost);
        }
      report.results.push_back({model.at("model").text(), grid});
    }
  } catch (const Error& error) {
    fail("niah: {}; --from expects a file written by --json", error.what());
  }
  return report;
}

}  // namespace furious
