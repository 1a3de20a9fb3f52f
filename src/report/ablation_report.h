// What an ablation found, for people and programs: a table, charts, a page that needs no network, and JSON that all of
// them can be made from again.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "paper/ablation.h"
#include "report/chart.h"
#include "report/table.h"

namespace furious {

Table ablation_table(const Ablation& ablation);

struct NamedChart {
  std::string name;  // of its file, without .svg
  Chart chart;
};
std::vector<NamedChart> ablation_charts(const Ablation& ablation);

std::string ablation_notes(const Ablation& ablation);  // how the numbers of the table came about, in a few lines
std::string ablation_page(const Ablation& ablation);   // HTML

std::string ablation_to_json(const Ablation& ablation);
Ablation ablation_from_json(const std::string& text, const std::string& origin);  // errors name the origin

// report.html, table.md, results.json and the charts.
void write_ablation_report(const std::filesystem::path& folder, const Ablation& ablation);

}  // namespace furious
