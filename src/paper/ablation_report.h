// The report of an ablation: a table, charts, a self-contained page, and JSON from which all of them can be rebuilt.
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

std::string ablation_notes(const Ablation& ablation);  // explains the columns of the table
std::string ablation_page(const Ablation& ablation);   // HTML

std::string ablation_to_json(const Ablation& ablation);
Ablation ablation_from_json(const std::string& text, const std::string& origin);  // errors name the origin

// report.html, table.md, results.json and the charts.
void write_ablation_report(const std::filesystem::path& folder, const Ablation& ablation);

}  // namespace furious
