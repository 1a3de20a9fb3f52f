#include "paper/ablation_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/number.h"
#include "report/chart_page.h"
#include "report/markup.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Over the runs of a row that have ended and not diverged.
struct Statistic {
  int64_t count = 0;
  double mean = kNaN;
  double spread = kNaN;  // standard deviation of a sample; of two or more
};

template <class Get>
Statistic statistic(const RowResult& row, Get&& get) {
  std::vector<double> values;
  for (const RowRun& run : row.runs)
    if (const double value = get(run); run.finished && run.diverged.empty() && std::isfinite(value))
      values.push_back(value);
  Statistic found;
  found.count = static_cast<int64_t>(values.size());
  if (values.empty()) return found;
  double sum = 0, squares = 0;
  for (const double value : values) sum += value;
  found.mean = sum / static_cast<double>(found.count);
  for (const double value : values) squares += (value - found.mean) * (value - found.mean);
  if (found.count > 1) found.spread = std::sqrt(squares / static_cast<double>(found.count - 1));
  return found;
}

Statistic train_loss(const RowResult& row) {
  return statistic(row, [](const RowRun& run) { return run.train_loss; });
}

Statistic test_loss(const RowResult& row) {
  return statistic(row, [](const RowRun& run) { return run.test_loss; });
}

Statistic rate(const RowResult& row) {
  return statistic(row, [](const RowRun& run) { return run.tokens_per_second; });
}

// Including diverged runs, where it matters most.
double last_value(const RowResult& row) {
  double largest = kNaN;
  for (const RowRun& run : row.runs)
    if (!run.values.y.empty()) largest = std::fmax(largest, run.values.y.back());
  return largest;
}

std::string cell(const Statistic& found, int digits) {
  if (found.count == 0) return "-";
  if (found.count == 1 || digits == 0) return fmt::format("{:.{}f}", found.mean, digits);
  return fmt::format("{:.{}f} ± {:.{}f}", found.mean, digits, found.spread, digits);
}

std::string note(const RowResult& row) {
  size_t diverged = 0;
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const RowRun& run : row.runs) {
    if (run.diverged.empty()) continue;
    ++diverged;
    first = std::min(first, run.steps + 1);
  }
  if (diverged == 0) return {};
  return row.runs.size() == 1 ? fmt::format("diverged at step {}", first)
                              : fmt::format("{} of {} diverged, first at step {}", diverged, row.runs.size(), first);
}

bool any(const Ablation& ablation, auto&& of_row) {
  return std::ranges::any_of(ablation.rows, of_row);
}

// The row of a sweep with the smallest test loss, or where there is none, training loss; nullptr in other ablations.
const RowResult* best_row(const Ablation& ablation) {
  const RowResult* best = nullptr;
  const bool tested = any(ablation, [](const RowResult& row) { return test_loss(row).count > 0; });
  const auto loss = [&](const RowResult& row) { return tested ? test_loss(row) : train_loss(row); };
  if (ablation.is_sweep())
    for (const RowResult& row : ablation.rows)
      if (loss(row).count > 0 && (best == nullptr || loss(row).mean < loss(*best).mean)) best = &row;
  return best;
}

bool has_values(const Ablation& ablation) {
  return any(ablation, [](const RowResult& row) { return std::isfinite(last_value(row)); });
}

// The mean of some curves, and how far they lie apart.
Series mean_curve(const std::vector<Curve>& curves, double from) {
  std::map<double, std::vector<double>> points;
  for (const Curve& curve : curves)
    for (size_t i = 0; i < curve.x.size(); ++i)
      if (curve.x[i] >= from) points[curve.x[i]].push_back(curve.y[i]);
  Series series;
  for (const auto& [x, values] : points) {
    double sum = 0;
    for (const double value : values) sum += value;
    series.x.push_back(x);
    series.y.push_back(sum / static_cast<double>(values.size()));
    if (curves.size() < 2) continue;
    series.low.push_back(std::ranges::min(values));
    series.high.push_back(std::ranges::max(values));
  }
  return series;
}

std::string title_of(const Ablation& ablation) {
  return fmt::format("furious ablate {}", fmt::join(ablation.words, " "));
}

std::string option(const RowResult& row, const std::string& name) {
  const auto found = row.options.find(name);
  return found == row.options.end() ? "" : found->second;
}

// 0 where it was not given. In rows of this program and of a checked file it is a number.
int64_t whole_option(const RowResult& row, const std::string& name) {
  return parse_number<uint32_t>(option(row, name)).value_or(0);
}

// Test loss over length, a line for each architecture; without series where all rows have one length.
Chart length_chart(const Ablation& ablation) {
  Chart chart;
  chart.title = "Test loss by length";
  chart.x_label = "tokens in a sequence";
  chart.y_label = "test loss";
  chart.log_x = true;
  std::set<std::string> lengths;
  for (const RowResult& row : ablation.rows) {
    lengths.insert(option(row, "length"));
    const std::string arch = option(row, "arch");
    auto series = std::ranges::find(chart.series, arch, &Series::name);
    if (series == chart.series.end()) series = chart.series.insert(series, Series{arch, {}, {}});
    const Statistic loss = test_loss(row);
    if (loss.count == 0) continue;
    series->x.push_back(static_cast<double>(whole_option(row, "length")));
    series->y.push_back(loss.mean);
  }
  if (lengths.size() < 2) chart.series.clear();
  return chart;
}

Chart curves(const Ablation& ablation, const std::string& title, const std::string& y_label, Curve RowRun::*curve,
             double from = 0) {
  Chart chart;
  chart.title = title;
  chart.x_label = "step";
  chart.y_label = y_label;
  int colour = 0;
  for (const RowResult& row : ablation.rows) {
    // Diverged runs would distort the mean: they are separate lines.
    std::vector<Curve> kept, diverged;
    for (const RowRun& run : row.runs) (run.diverged.empty() ? kept : diverged).push_back(run.*curve);
    if (kept.empty()) kept.swap(diverged);
    const auto add = [&](Series series, const std::string& name) {
      series.name = name;
      series.colour = colour;
      series.faint = name.empty();
      chart.series.push_back(std::move(series));
    };
    add(mean_curve(kept, from), row.label);
    for (const Curve& one : diverged) add(mean_curve({one}, from), "");
    ++colour;
  }
  return chart;
}

// JSON has no NaN.
Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

Json curve_to_json(const Curve& curve) {
  Json y = Json::array();
  for (const double value : curve.y) y.push_back(number_or_null(value));
  return {{"step", curve.x}, {"value", y}};
}

Curve curve_from_json(const JsonValue& json) {
  Curve curve{json.at("step").numbers(), json.at("value").numbers()};
  if (curve.x.size() != curve.y.size()) json.unexpected(fmt::format("as many values as the {} steps", curve.x.size()));
  return curve;
}

Json statistic_to_json(const Statistic& found) {
  return {{"mean", number_or_null(found.mean)}, {"spread", number_or_null(found.spread)}, {"runs", found.count}};
}

Json run_to_json(const RowRun& run) {
  Json json{{"seed", run.seed},
            {"steps", run.steps},
            {"finished", run.finished},
            {"train_loss", number_or_null(run.train_loss)},
            {"test_loss", number_or_null(run.test_loss)},
            {"tokens_per_second", number_or_null(run.tokens_per_second)}};
  if (!run.diverged.empty()) json["diverged"] = run.diverged;
  json["training"] = curve_to_json(run.training);
  json["test"] = curve_to_json(run.test);
  if (!run.values.x.empty()) json["value_rms"] = curve_to_json(run.values);
  return json;
}

RowRun run_from_json(const JsonValue& json) {
  RowRun run;
  run.seed = json.at("seed").whole();
  run.steps = json.at("steps").integer(0, kMost);
  run.finished = json.at("finished").flag();
  run.train_loss = json.at("train_loss").number_or_nan();
  run.test_loss = json.at("test_loss").number_or_nan();
  run.tokens_per_second = json.at("tokens_per_second").number_or_nan();
  if (json.has("diverged")) run.diverged = json.at("diverged").text();
  run.training = curve_from_json(json.at("training"));
  run.test = curve_from_json(json.at("test"));
  if (json.has("value_rms")) run.values = curve_from_json(json.at("value_rms"));
  return run;
}

Json row_to_json(const RowResult& row) {
  Json json{{"name", row.name}, {"label", row.label}};
  if (row.paper)
    json["paper"] = {
        {"table", row.paper->table},   {"label", row.paper->label},           {"size", row.paper->size},
        {"length", row.paper->length}, {"train_loss", row.paper->train_loss}, {"test_loss", row.paper->test_loss}};
  json["parameters"] = row.parameters;
  json["state_bytes"] = row.state_bytes;
  json["train_loss"] = statistic_to_json(train_loss(row));
  json["test_loss"] = statistic_to_json(test_loss(row));
  json["options"] = row.options;
  json["runs"] = Json::array();
  for (const RowRun& run : row.runs) json["runs"].push_back(run_to_json(run));
  return json;
}

RowResult row_from_json(const JsonValue& json) {
  RowResult row;
  row.name = json.at("name").text();
  row.label = json.at("label").text();
  if (json.has("paper")) {
    const JsonValue paper = json.at("paper");
    row.paper = {paper.at("table").text(),
                 paper.at("label").text(),
                 row.name.substr(0, row.name.find(':')),
                 paper.at("train_loss").number(),
                 paper.at("test_loss").number(),
                 paper.has("size") ? paper.at("size").text() : "small",
                 paper.has("length") ? paper.at("length").integer(0, kMost) : int64_t{2048}};
  }
  row.parameters = json.at("parameters").integer(0, kMost);
  row.state_bytes = json.at("state_bytes").integer(0, kMost);
  row.options = json.at("options").texts();
  for (const char* name : {"length", "batch", "hidden", "intermediate", "heads", "layers"})
    if (row.options.contains(name) && !parse_number<uint32_t>(row.options[name]))
      json.at("options").at(name).unexpected("an integer");
  for (const JsonValue& run : json.at("runs").items()) row.runs.push_back(run_from_json(run));
  return row;
}

struct Order {
  int64_t pairs = 0, agreeing = 0;
};

// How many pairs of rows the paper puts in an order, by test loss, and how many of them we do in the same. Losses of
// other models or texts have no order.
Order order_of_the_paper(const Ablation& ablation) {
  Order order;
  for (const RowResult& a : ablation.rows)
    for (const RowResult& b : ablation.rows) {
      if (!a.paper || !b.paper || a.paper->test_loss >= b.paper->test_loss) continue;
      if (a.paper->setting() != b.paper->setting()) continue;
      const Statistic ours_a = test_loss(a), ours_b = test_loss(b);
      if (ours_a.count == 0 || ours_b.count == 0) continue;
      ++order.pairs;
      order.agreeing += ours_a.mean < ours_b.mean;
    }
  return order;
}

// Empty where the rows differ.
std::string shared_option(const Ablation& ablation, const std::string& name) {
  const std::string value = option(ablation.rows.front(), name);
  return any(ablation, [&](const RowResult& row) { return option(row, name) != value; }) ? "" : value;
}

// Options that all rows share and that are set.
Table options_table(const Ablation& ablation) {
  Table table{{"option", "value"}, {}};
  for (const auto& [name, ignored] : ablation.rows.front().options)
    if (const std::string value = shared_option(ablation, name); !value.empty() && value != "0" && value != "false")
      table.rows.push_back({name, value});
  return table;
}

Table runs_table(const Ablation& ablation) {
  Table table{{"row", "preset and changes", "seed", "steps", "train loss", "test loss", "tokens/s", ""}, {}};
  const auto text = [](double value, int digits) {
    return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : std::string("-");
  };
  for (const RowResult& row : ablation.rows)
    for (const RowRun& run : row.runs)
      table.rows.push_back({row.label, row.name, fmt::format("{}", run.seed), fmt::format("{}", run.steps),
                            text(run.train_loss, 4), text(run.test_loss, 4), text(run.tokens_per_second, 0),
                            run.diverged});
  return table;
}

constexpr const char* kPageStyle =
    "<style>\n"
    ":root{color-scheme:light dark}\n"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;"
    "background:#fff}\n"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}\n"
    "th,td{padding:.25rem .75rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}\n"
    "th{border-bottom:2px solid #777}\n"
    ".number{text-align:right;white-space:nowrap}\n"
    ".wide{overflow-x:auto}\n"
    "svg{max-width:100%;height:auto}\n"
    "@media (prefers-color-scheme:dark){body{color:#ccc;background:#15181c}th,td{border-color:#33383e}}\n"
    "</style>\n";

std::string paragraphs(const std::string& lines) {
  std::string html;
  for (size_t begin = 0; begin < lines.size();) {
    const size_t end = std::min(lines.find('\n', begin), lines.size());
    html += fmt::format("<p>{}</p>\n", escape_markup(lines.substr(begin, end - begin)));
    begin = end + 1;
  }
  return html;
}

std::string folded(const std::string& title, const Table& table) {
  return fmt::format("<details>\n<summary>{}</summary>\n<div class=\"wide\">{}</div>\n</details>\n",
                     escape_markup(title), to_html(table));
}

// Those that the paper's losses are of, with the tables and figures they come from.
std::map<std::string, std::set<std::string>> paper_settings(const Ablation& ablation) {
  std::map<std::string, std::set<std::string>> settings;
  for (const RowResult& row : ablation.rows)
    if (row.paper) settings[row.paper->setting()].insert(row.paper->table);
  return settings;
}

// The paper's losses for a row. Where rows have them from several settings, one that differs from the row's is named.
std::string paper_cell(const RowResult& row, double PaperRow::*loss, bool several) {
  if (!row.paper) return "-";
  const PaperRow& paper = *row.paper;
  std::string text = fmt::format("{:.2f}", paper.*loss);
  if (several && (paper.size != option(row, "size") || fmt::format("{}", paper.length) != option(row, "length")))
    text += fmt::format(" ({} {})", paper.size, paper.length);
  return text;
}

}  // namespace

Table ablation_table(const Ablation& ablation) {
  const std::map<std::string, std::set<std::string>> settings = paper_settings(ablation);
  const bool paper = !settings.empty();
  const RowResult* best = best_row(ablation);
  const auto note_of = [&](const RowResult& row) {
    return &row != best ? note(row) : note(row).empty() ? "best" : "best; " + note(row);
  };
  const bool notes = any(ablation, [&](const RowResult& row) { return !note_of(row).empty(); });
  const bool values = has_values(ablation);
  Table table{{"row", "train loss", "test loss"}, {}};
  if (paper) table.header.insert(table.header.end(), {"paper train", "paper test"});
  table.header.insert(table.header.end(), {"parameters", "tokens/s", fmt::format("KB at {}k", kStateTokens >> 10)});
  if (values) table.header.push_back("value RMS");
  if (notes) table.header.push_back("note");
  for (const RowResult& row : ablation.rows) {
    auto& cells = table.rows.emplace_back();
    cells = {row.label, cell(train_loss(row), 3), cell(test_loss(row), 3)};
    if (paper) {
      cells.push_back(paper_cell(row, &PaperRow::train_loss, settings.size() > 1));
      cells.push_back(paper_cell(row, &PaperRow::test_loss, settings.size() > 1));
    }
    cells.push_back(fmt::format("{:.2f}M", static_cast<double>(row.parameters) / 1e6));
    cells.push_back(cell(rate(row), 0));
    cells.push_back(fmt::format("{:.0f}", static_cast<double>(row.state_bytes) / 1e3));
    if (values) cells.push_back(std::isfinite(last_value(row)) ? fmt::format("{:.3g}", last_value(row)) : "-");
    if (notes) cells.push_back(note_of(row));
  }
  return table;
}

std::vector<NamedChart> ablation_charts(const Ablation& ablation) {
  double steps = 0;
  for (const RowResult& row : ablation.rows)
    for (const RowRun& run : row.runs) steps = std::max(steps, static_cast<double>(run.steps));
  std::vector<NamedChart> charts;
  if (any(ablation, [](const RowResult& row) { return test_loss(row).count > 0; }))
    charts.push_back({"test-loss", curves(ablation, "Test loss", "test loss", &RowRun::test)});
  // The first drop of the loss is alike in all models and would fill most of the height.
  Chart training = curves(ablation, "Training loss, without the first tenth", "training loss", &RowRun::training,
                          std::floor(steps / 10));
  for (Series& series : training.series)
    for (std::vector<double>* line : {&series.y, &series.low, &series.high})
      *line = smooth(*line, static_cast<int64_t>(line->size() / 50));
  charts.push_back({"training-loss", std::move(training)});
  if (Chart chart = length_chart(ablation); !chart.series.empty()) charts.push_back({"lengths", std::move(chart)});
  if (has_values(ablation)) {
    Chart chart = curves(ablation, "Magnitude of the values", "RMS of the values, in the layer where it is largest",
                         &RowRun::values);
    chart.log_y = true;
    charts.push_back({"values", std::move(chart)});
  }
  return charts;
}

std::string ablation_notes(const Ablation& ablation) {
  size_t seeds = 1;
  for (const RowResult& one : ablation.rows) seeds = std::max(seeds, one.runs.size());
  const auto shared = [&](const std::string& name) { return shared_option(ablation, name); };
  const RowResult& row = ablation.rows.front();
  const auto number = [&](const char* name) { return whole_option(row, name); };
  const auto tokens = [](const RowResult& one) { return whole_option(one, "batch") * whole_option(one, "length"); };
  std::string text = shared("steps").empty() ? "Different numbers of steps of " : shared("steps") + " steps of ";
  if (any(ablation, [&](const RowResult& one) { return tokens(one) != tokens(row); }))
    text += fmt::format("{} sequences", shared("batch"));
  else
    text += fmt::format("{} tokens", tokens(row));
  if (!shared("length").empty()) text += fmt::format(" ({} x {})", shared("batch"), shared("length"));
  const bool own_size = number("hidden") + number("intermediate") + number("heads") + number("layers") > 0;
  if (!own_size && !shared("size").empty()) text += ", size " + shared("size");
  text += ", " + shared("data");
  if (!shared("dtype").empty()) text += ", " + shared("dtype");
  if (const std::string mixer = shared("mixer-precision"); !mixer.empty() && mixer != "auto")
    text += fmt::format(" (mixer {})", mixer);
  text += fmt::format(" on {}, {}.\n", shared("device"),
                      seeds == 1 ? "1 seed" : fmt::format("{} seeds (mean ± standard deviation)", seeds));
  text += fmt::format(
      "Train loss: mean of the last twentieth of the steps. KB at {}k: cache memory of one sequence after {} tokens, "
      "in "
      "f32.\n",
      kStateTokens >> 10, kStateTokens);
  std::vector<std::string> sources;
  for (const auto& [setting, tables] : paper_settings(ablation))
    sources.push_back(fmt::format("{} ({})", fmt::join(tables, ", "), setting));
  if (!sources.empty())
    text += fmt::format("Paper: {}. Compare differences between rows, not losses.\n", fmt::join(sources, "; "));
  if (const auto [pairs, agreeing] = order_of_the_paper(ablation); pairs > 0)
    text += fmt::format("Of {} pair{} of rows whose test losses differ in the paper, {} {} the same order here.\n",
                        pairs, pairs == 1 ? "" : "s", agreeing, agreeing == 1 ? "has" : "have");
  if (const RowResult* best = best_row(ablation)) text += fmt::format("Best row: {}.\n", best->label);
  if (has_values(ablation))
    text +=
        "Value RMS: root mean square of the values that enter the mixer, of the layer where it is largest, at the "
        "end.\n";
  if (!ablation.finished()) text += "Not all rows are finished.\n";
  return text;
}

std::string ablation_page(const Ablation& ablation) {
  const std::string title = escape_markup(title_of(ablation));
  std::string html = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width\">\n";
  html +=
      fmt::format("<title>{}</title>\n{}{}</head>\n<body>\n<h1>{}</h1>\n", title, kPageStyle, chart_page_head(), title);
  html += fmt::format("<div class=\"wide\">{}</div>\n", to_html(ablation_table(ablation)));
  html += paragraphs(ablation_notes(ablation));
  for (const NamedChart& named : ablation_charts(ablation)) html += to_html(named.chart);
  html += folded("Every run", runs_table(ablation));
  html += folded("Options that all rows share", options_table(ablation));
  return html + chart_page_end() + "</body>\n</html>\n";
}

std::string ablation_to_json(const Ablation& ablation) {
  // A line for each row: changes of one can be seen.
  std::vector<std::string> rows;
  for (const RowResult& row : ablation.rows)
    rows.push_back(row_to_json(row).dump(-1, ' ', false, Json::error_handler_t::replace));
  return fmt::format("{{\n\"words\": {},\n\"finished\": {},\n\"rows\": [\n{}\n]\n}}\n",
                     Json(ablation.words).dump(-1, ' ', false, Json::error_handler_t::replace), ablation.finished(),
                     fmt::join(rows, ",\n"));
}

Ablation ablation_from_json(const std::string& text, const std::string& origin) {
  Ablation ablation;
  try {
    const nlohmann::json parsed = parse_json(text, origin);
    const JsonValue json(parsed, origin);
    for (const JsonValue& word : json.at("words").items()) ablation.words.push_back(word.text());
    ablation.stopped = !json.at("finished").flag();
    for (const JsonValue& row : json.at("rows").items()) ablation.rows.push_back(row_from_json(row));
    require(!ablation.rows.empty(), "{}: has no rows", origin);
  } catch (const Error& error) {
    fail("{}; expected the results.json of an ablation", error.what());
  }
  return ablation;
}

void write_ablation_report(const std::filesystem::path& folder, const Ablation& ablation) {
  write_text(folder / "results.json", ablation_to_json(ablation));
  write_text(folder / "table.md", fmt::format("# {}\n\n{}\n{}", title_of(ablation),
                                              to_markdown(ablation_table(ablation)), ablation_notes(ablation)));
  for (const NamedChart& named : ablation_charts(ablation))
    write_text(folder / (named.name + ".svg"), to_svg(named.chart));
  write_text(folder / "report.html", ablation_page(ablation));
}

}  // namespace furious
