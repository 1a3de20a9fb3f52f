// `furious compare`: the options in which runs differ, and their results.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/runs.h"
#include "model/checkpoint.h"
#include "model/plan.h"
#include "paper/ablation.h"
#include "report/table.h"
#include "train/options.h"
#include "train/run.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct ComparedRun {
  std::string name;
  fs::path folder;
  std::map<std::string, std::string> options;  // empty: not known
  RowRun result;
  double best_test_loss = std::nan("");
  TrainStep last;
  int64_t steps = 0;  // that it is to do; 0: not known
  int64_t parameters = 0;
};

// 0 where there is no checkpoint yet.
int64_t parameters_of(const fs::path& run) {
  const std::vector<fs::path> checkpoints = checkpoints_in(run);
  return checkpoints.empty() ? 0 : parameter_count(load_config(checkpoints.back()));
}

ComparedRun compared(const fs::path& folder, const std::string& name) {
  ComparedRun run;
  run.name = name;
  run.folder = folder;
  const RunLog log = read_log(folder);
  if (const std::optional<TrainOptions> options = options_of(folder)) {
    run.options = to_texts(*options);
    run.steps = options->steps;
  }
  run.result = row_run(0, log, std::max(run.steps, static_cast<int64_t>(log.steps.size())));
  for (const TrainStep& step : log.steps)
    if (step.test_loss) run.best_test_loss = std::fmin(run.best_test_loss, *step.test_loss);
  if (!log.steps.empty()) run.last = log.steps.back();
  run.parameters = parameters_of(folder);
  return run;
}

// A column of the table: how a value is shown, and the value.
struct Column {
  std::string name;
  std::string key;  // in JSON and CSV
  std::function<std::string(const ComparedRun&)> text;
  std::function<Json(const ComparedRun&)> value;
};

Column loss_column(const std::string& name, const std::string& key, std::function<double(const ComparedRun&)> get) {
  return {name, key,
          [get](const ComparedRun& run) { return std::isfinite(get(run)) ? fmt::format("{:.4f}", get(run)) : "-"; },
          [get](const ComparedRun& run) { return std::isfinite(get(run)) ? Json(get(run)) : Json(); }};
}

// A number that is 0 where it is not known.
Column count_column(const std::string& name, const std::string& key, std::function<double(const ComparedRun&)> get,
                    std::function<std::string(double)> shown) {
  const auto known = [get](const ComparedRun& run) { return std::isfinite(get(run)) && get(run) > 0; };
  return {name, key, [=](const ComparedRun& run) { return known(run) ? shown(get(run)) : "-"; },
          [=](const ComparedRun& run) {
            if (!known(run)) return Json();
            const double value = get(run);
            return value == std::floor(value) && value < 9e15 ? Json(static_cast<int64_t>(value)) : Json(value);
          }};
}

std::string state_of(const ComparedRun& run) {
  if (!run.result.diverged.empty()) return fmt::format("diverged at step {}", run.result.steps + 1);
  if (run.result.steps == 0) return "not started";
  if (run.steps == 0) return "-";
  return run.result.steps >= run.steps ? "done" : "unfinished";
}

std::vector<Column> result_columns() {
  const auto millions = [](double value) { return fmt::format("{:.2f}M", value / 1e6); };
  const auto whole = [](double value) { return fmt::format("{:.0f}", value); };
  return {
      loss_column("test loss", "test_loss", [](const ComparedRun& run) { return run.result.test_loss; }),
      loss_column("best test", "best_test_loss", [](const ComparedRun& run) { return run.best_test_loss; }),
      loss_column("train loss", "train_loss", [](const ComparedRun& run) { return run.result.train_loss; }),
      count_column(
          "parameters", "parameters", [](const ComparedRun& run) { return static_cast<double>(run.parameters); },
          millions),
      count_column(
          "done", "done", [](const ComparedRun& run) { return static_cast<double>(run.result.steps); }, whole),
      count_column(
          "tokens", "total_tokens", [](const ComparedRun& run) { return static_cast<double>(run.last.total_tokens); },
          millions),
      count_column(
          "tokens/s", "tokens_per_second", [](const ComparedRun& run) { return run.result.tokens_per_second; }, whole),
      count_column(
          "time", "seconds", [](const ComparedRun& run) { return run.last.seconds; }, clock_text),
      {"state", "state", state_of, [](const ComparedRun& run) { return Json(state_of(run)); }}};
}

// In the order of the command line's help. The folder, and how a run was started, are not options of the training.
std::vector<std::string> differing_options(const std::vector<ComparedRun>& runs) {
  static const std::set<std::string> others = {"out", "resume", "log", "keep", "save-every"};
  std::vector<std::string> names;
  for (const TrainOption& option : train_options()) {
    std::set<std::string> values;
    for (const ComparedRun& run : runs)
      if (!run.options.empty()) values.insert(run.options.at(option.name));
    if (values.size() > 1 && !others.contains(option.name)) names.push_back(option.name);
  }
  return names;
}

Column option_column(const std::string& name) {
  const auto value = [name](const ComparedRun& run) { return run.options.empty() ? "?" : run.options.at(name); };
  return {name, name, value, [value](const ComparedRun& run) { return Json(value(run)); }};
}

std::string csv_cell(const Json& value) {
  if (value.is_null()) return "";
  if (!value.is_string()) return value.dump();
  std::string text = value;
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  for (size_t at = 0; (at = text.find('"', at)) != std::string::npos; at += 2) text.insert(at, 1, '"');
  return "\"" + text + "\"";
}

std::string to_csv(const std::vector<Column>& columns, const std::vector<ComparedRun>& runs) {
  std::string text;
  for (const Column& column : columns) text += (text.empty() ? "" : ",") + column.key;
  for (const ComparedRun& run : runs) {
    std::string line;
    for (const Column& column : columns) line += (&column == columns.data() ? "" : ",") + csv_cell(column.value(run));
    text += "\n" + line;
  }
  return text + "\n";
}

struct CompareCommand {
  std::vector<std::string> runs;
  std::string format = "text";

  void run() const;
};

void CompareCommand::run() const {
  const std::vector<fs::path> found = runs_in("compare", runs);
  const std::vector<std::string> names = distinguishing_names(found);
  std::vector<ComparedRun> all;
  for (size_t i = 0; i < found.size(); ++i) all.push_back(compared(found[i], names[i]));
  const std::vector<std::string> differing = differing_options(all);
  if (format == "json") {
    Json list = Json::array();
    for (const ComparedRun& run : all) {
      Json options = Json::object(), entry{{"run", run.name}, {"folder", run.folder.string()}};
      for (const std::string& name : differing) options[name] = option_column(name).value(run);
      entry["options"] = std::move(options);
      for (const Column& column : result_columns()) entry[column.key] = column.value(run);
      list.push_back(std::move(entry));
    }
    fmt::print("{}\n", list.dump(2, ' ', false, Json::error_handler_t::replace));
    return;
  }
  std::vector<Column> columns = {{"run", "run", [](const ComparedRun& run) { return run.name; },
                                  [](const ComparedRun& run) { return Json(run.name); }}};
  for (const std::string& name : differing) columns.push_back(option_column(name));
  for (Column& column : result_columns()) columns.push_back(std::move(column));
  if (format == "csv") {
    fmt::print("{}", to_csv(columns, all));
    return;
  }
  Table table;
  for (const Column& column : columns) table.header.push_back(column.name);
  for (const ComparedRun& run : all) {
    auto& cells = table.rows.emplace_back();
    for (const Column& column : columns) cells.push_back(column.text(run));
  }
  fmt::print("{}", format == "md" ? to_markdown(table) : to_text(table));
}

}  // namespace

void add_compare(CLI::App& app) {
  auto compare = std::make_shared<CompareCommand>();
  CLI::App* command = app.add_subcommand("compare", "Compare runs: options that differ, and results");
  command->add_option("runs", compare->runs, kRunsHelp)->required();
  command->add_option("--format", compare->format, "Format: text, md (Markdown), csv or json")
      ->check(CLI::IsMember({"text", "md", "csv", "json"}))
      ->capture_default_str();
  command->footer("Example: furious compare runs/2mamba runs/softmax --format md");
  command->callback([compare] { compare->run(); });
}

}  // namespace furious::cli
