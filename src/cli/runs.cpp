#include "cli/runs.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/file.h"
#include "cli/flags.h"
#include "train/options.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostPoints = 1000;  // of a curve: more than there are pixels

void find_runs(const fs::path& folder, std::vector<fs::path>& found) {
  if (fs::is_regular_file(folder / kLogFile)) {
    found.push_back(folder);
    return;
  }
  std::vector<fs::path> inside;
  std::error_code ignored;  // of a folder that may not be read, or that is removed at the moment
  for (fs::directory_iterator at(folder, ignored), end; !ignored && at != end; at.increment(ignored))
    if (std::error_code none; at->is_directory(none) && !at->is_symlink(none)) inside.push_back(at->path());
  std::ranges::sort(inside);
  for (const fs::path& one : inside) find_runs(one, found);
}

// Every n-th point, and the last.
void thin(Series& series) {
  const size_t stride = (series.x.size() + kMostPoints - 1) / kMostPoints;
  if (stride < 2) return;
  Series kept{series.name, {}, {}};
  for (size_t i = (series.x.size() - 1) % stride; i < series.x.size(); i += stride) {
    kept.x.push_back(series.x[i]);
    kept.y.push_back(series.y[i]);
  }
  series = std::move(kept);
}

double x_of(const TrainStep& step, const std::string& axis) {
  if (axis == "tokens") return static_cast<double>(step.total_tokens);
  if (axis == "time") return step.seconds;
  if (axis == "flops") return step.total_flops;
  return static_cast<double>(step.step);
}

// Seconds as a unit of which an axis has few.
std::string use_large_unit(Chart& chart) {
  double longest = 0;
  for (const Series& series : chart.series)
    if (!series.x.empty()) longest = std::max(longest, series.x.back());
  const double unit = longest >= 2 * 3600 ? 3600 : longest >= 2 * 60 ? 60 : 1;
  for (Series& series : chart.series)
    for (double& x : series.x) x /= unit;
  return unit == 1 ? "seconds" : unit == 60 ? "minutes" : "hours";
}

}  // namespace

fs::path run_folder(const std::string& place) {
  fs::path path = fs::path(place).lexically_normal();
  if (path.filename().empty() || path.filename() == kLogFile) path = path.parent_path();  // "run/", "run/log.jsonl"
  return path.empty() ? "." : path;
}

std::vector<fs::path> runs_below(const std::string& place) {
  std::vector<fs::path> found;
  if (const fs::path folder = run_folder(place); fs::is_directory(folder)) find_runs(folder, found);
  return found;
}

std::vector<fs::path> runs_in(const std::string& command, const std::vector<std::string>& places) {
  std::vector<fs::path> all;
  for (const std::string& place : places) {
    const fs::path folder = run_folder(place);
    require(fs::exists(folder), "{}: {} does not exist; give the folder of a run", command, place);
    require(fs::is_directory(folder), "{}: {} is not a folder; give a run of `furious train`", command, place);
    const std::vector<fs::path> found = runs_below(place);
    require(!found.empty(), "{}: {} contains no run; no folder in it has a {}", command, place, kLogFile);
    for (const fs::path& run : found)
      if (std::ranges::find(all, run) == all.end()) all.push_back(run);
  }
  return all;
}

std::optional<TrainOptions> options_of(const fs::path& run) {
  try {
    return from_toml(read_text(run / "run.toml"));
  } catch (const Error&) {
    return {};
  }
}

CurveFlags::CurveFlags(CLI::App& command) {
  command.add_option("--x", x, "Horizontal axis: step, tokens, time (in training), flops")
      ->check(CLI::IsMember({"step", "tokens", "time", "flops"}))
      ->capture_default_str();
  command.add_option("--curves", curves, "Curves to draw: train, test or both")
      ->check(CLI::IsMember({"train", "test", "both"}))
      ->capture_default_str();
  command
      .add_option("--smooth", smooth,
                  "Number of steps to average training losses over; default: a fiftieth of the run; 0: none")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  command.add_option("--from", from, "First step to draw")->check(at_least(0))->capture_default_str();
  command.add_flag("--log-x", log_x, "Use a logarithmic horizontal axis");
  command.add_flag("--log-y", log_y, "Draw losses on a logarithmic axis");
}

bool CurveFlags::has_points(const RunLog& log) const {
  return std::ranges::any_of(
      log.steps, [&](const TrainStep& step) { return step.step >= from && (curves != "test" || step.test_loss); });
}

Series CurveFlags::training(const RunLog& log) const {
  std::vector<double> losses;
  for (const TrainStep& step : log.steps) losses.push_back(step.loss);
  const auto steps = static_cast<int64_t>(log.steps.size());
  losses = furious::smooth(losses, smooth >= 0 ? smooth / 2 : steps / 100);
  Series series;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (log.steps[i].step < from) continue;
    series.x.push_back(x_of(log.steps[i], x));
    series.y.push_back(losses[i]);
  }
  thin(series);
  return series;
}

Series CurveFlags::test(const RunLog& log) const {
  Series series;
  for (const TrainStep& step : log.steps) {
    if (!step.test_loss || step.step < from) continue;
    series.x.push_back(x_of(step, x));
    series.y.push_back(*step.test_loss);
  }
  return series;
}

Chart CurveFlags::chart(const std::vector<Run>& runs) const {
  Chart chart;
  chart.title = "Loss";
  chart.y_label = curves == "test" ? "test loss" : curves == "train" ? "training loss" : "test loss; faint: training";
  chart.log_x = log_x;
  chart.log_y = log_y;
  int colour = 0;
  for (const auto& [name, log] : runs) {
    require(log.steps.empty() || x_of(log.steps.back(), x) > 0,
            "{}: its log has no {}, which earlier versions of furious did not write; use --x step", name, x);
    const auto labelled = [&](Series series) {
      series.colour = colour;
      if (!series.y.empty()) series.name = fmt::format("{} {:.3f}", name, series.y.back());
      return series;
    };
    const Series tested = labelled(test(log));
    const bool with_test = curves != "train" && !tested.x.empty();
    if (curves != "test") {
      Series trained = labelled(training(log));
      trained.faint = with_test;
      if (with_test) trained.name.clear();
      chart.series.push_back(std::move(trained));
    }
    if (with_test) chart.series.push_back(tested);
    ++colour;
  }
  if (x == "time")
    chart.x_label = use_large_unit(chart) + " of training";
  else
    chart.x_label = x == "flops" ? "FLOPs" : x;
  return chart;
}

}  // namespace furious::cli
