// The report of the needle-in-a-haystack test: heat maps, and JSON from which they can be drawn again.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "paper/needle.h"
#include "report/heat_map.h"
#include "report/table.h"

namespace furious {

struct NeedleResult {
  std::string name;  // of the model
  NeedleGrid grid;
};

struct NeedleReport {
  std::vector<NeedleResult> results;
  std::string unit;         // of the lengths
  bool with_paper = false;  // include the authors' results
};

// What a model answered to a question.
struct NeedleRecord {
  Needle needle;  // without its prompt
  std::string text;
  int64_t prompt_tokens = 0;
  bool right = false;
};
std::string answer_line(const std::string& model, const NeedleRecord& record);  // JSON, with a line break
// A few of the answers as a table: wrong ones, and for comparison right ones.
Table answers_table(const std::vector<NeedleRecord>& records);

HeatMap map_of(const NeedleResult& result, const std::string& unit);  // lengths by depths
// Models by tokens, as in the paper's figure; none where lengths do not count characters.
std::optional<HeatMap> map_by_tokens(const NeedleReport& report);
std::string to_svg(const NeedleReport& report);  // all maps

nlohmann::ordered_json to_json(const NeedleReport& report);
NeedleReport needle_report_from_json(const std::string& text, const std::string& origin);  // errors name the origin

}  // namespace furious
