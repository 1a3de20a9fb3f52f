// `furious plot`: loss curves of runs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/runs.h"
#include "report/chart.h"
#include "report/png.h"
#include "train/log.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostPoints = 1000;  // of a curve: more than there are pixels

struct PlotCommand {
  std::vector<std::string> runs;
  std::string out, title, curves = "both";
  int64_t smooth = -1, from = 0;
  bool log_x = false, log_y = false;

  void run() const;

 private:
  void add(Chart& chart, const std::string& name, const RunLog& log, int colour) const;
  Series training(const RunLog& log) const;
  Series test(const RunLog& log) const;
};

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

Series PlotCommand::training(const RunLog& log) const {
  Series series;
  for (const TrainStep& step : log.steps) {
    series.x.push_back(static_cast<double>(step.step));
    series.y.push_back(step.loss);
  }
  const auto steps = static_cast<int64_t>(log.steps.size());
  series.y = furious::smooth(series.y, smooth >= 0 ? smooth / 2 : steps / 100);
  const auto first = std::ranges::lower_bound(series.x, static_cast<double>(from)) - series.x.begin();
  series.x.erase(series.x.begin(), series.x.begin() + first);
  series.y.erase(series.y.begin(), series.y.begin() + first);
  thin(series);
  return series;
}

Series PlotCommand::test(const RunLog& log) const {
  Series series;
  for (const TrainStep& step : log.steps) {
    if (!step.test_loss || step.step < from) continue;
    series.x.push_back(static_cast<double>(step.step));
    series.y.push_back(*step.test_loss);
  }
  return series;
}

void PlotCommand::add(Chart& chart, const std::string& name, const RunLog& log, int colour) const {
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
}

void PlotCommand::run() const {
  const std::string extension = fs::path(out).extension().string();
  require(extension == ".svg" || extension == ".png", "plot: {}: unknown file type; use .svg or .png", out);
  if (extension == ".png") check_png();
  const std::vector<fs::path> found = runs_in("plot", runs);
  const std::vector<std::string> names = distinguishing_names(found);
  Chart chart;
  chart.title = title.empty() ? "Loss" : title;
  chart.x_label = "step";
  chart.y_label = curves == "test" ? "test loss" : curves == "train" ? "training loss" : "test loss; faint: training";
  chart.log_x = log_x;
  chart.log_y = log_y;
  int64_t points = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const RunLog log = read_log(found[i]);
    add(chart, names[i], log, static_cast<int>(i));
    for (const TrainStep& step : log.steps) points += step.step >= from && (curves != "test" || step.test_loss);
  }
  require(points > 0, "plot: nothing to draw: no run has a {} from step {} on", curves == "test" ? "test loss" : "step",
          from);
  if (extension == ".png")
    write_png(out, to_svg(chart));
  else
    write_text(out, to_svg(chart));
  fmt::print("{} run{}: {}\n", found.size(), found.size() == 1 ? "" : "s", out);
}

}  // namespace

void add_plot(CLI::App& app) {
  auto plot = std::make_shared<PlotCommand>();
  CLI::App* command = app.add_subcommand("plot", "Draw the training and test losses of runs");
  command
      ->add_option("runs", plot->runs, "Folders of runs, or folders that contain runs, as `furious ablate` writes them")
      ->required();
  command->add_option("-o,--out", plot->out, "Output file: .svg, or .png (needs rsvg-convert or inkscape)")->required();
  command->add_option("--curves", plot->curves, "Curves to draw: train, test or both")
      ->check(CLI::IsMember({"train", "test", "both"}))
      ->capture_default_str();
  command
      ->add_option("--smooth", plot->smooth,
                   "Number of steps to average training losses over; default: a fiftieth of the run; 0: none")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  command->add_option("--from", plot->from, "First step to draw")->check(at_least(0))->capture_default_str();
  command->add_flag("--log-x", plot->log_x, "Draw steps on a logarithmic axis");
  command->add_flag("--log-y", plot->log_y, "Draw losses on a logarithmic axis");
  command->add_option("--title", plot->title, "Title of the chart");
  command->footer("Example: furious plot runs/2mamba runs/softmax -o loss.svg --from 100 --log-x");
  command->callback([plot] { plot->run(); });
}

}  // namespace furious::cli
