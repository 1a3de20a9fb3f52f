// `furious plot`: loss curves of runs.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/runs.h"
#include "report/png.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

struct PlotCommand {
  explicit PlotCommand(CLI::App& command) : curves(command) {
    command.add_option("runs", runs, kRunsHelp)->required();
    command.add_option("-o,--out", out, "Output file: .svg, or .png (needs rsvg-convert or inkscape)")->required();
    command.add_option("--title", title, "Title of the chart");
  }

  std::vector<std::string> runs;
  std::string out, title;
  CurveFlags curves;

  void run() const;
};

void PlotCommand::run() const {
  const std::string extension = fs::path(out).extension().string();
  require(extension == ".svg" || extension == ".png", "plot: {}: unknown file type; use .svg or .png", out);
  if (extension == ".png") check_png();
  const std::vector<fs::path> found = runs_in("plot", runs);
  const std::vector<std::string> names = distinguishing_names(found);
  std::vector<RunLog> logs;
  for (const fs::path& run : found) logs.push_back(read_log(run));
  require(std::ranges::any_of(logs, [&](const RunLog& log) { return curves.has_points(log); }),
          "plot: nothing to draw: no run has a {} from step {} on", curves.curves == "test" ? "test loss" : "step",
          curves.from);
  std::vector<CurveFlags::Run> named;
  for (size_t i = 0; i < logs.size(); ++i) named.push_back({names[i], logs[i]});
  Chart chart = curves.chart(named);
  if (!title.empty()) chart.title = title;
  if (extension == ".png")
    write_png(out, to_svg(chart));
  else
    write_text(out, to_svg(chart));
  fmt::print("{} run{}: {}\n", found.size(), found.size() == 1 ? "" : "s", out);
}

}  // namespace

void add_plot(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plot", "Draw the training and test losses of runs");
  auto plot = std::make_shared<PlotCommand>(*command);
  command->footer("Example: furious plot runs/2mamba runs/softmax -o loss.svg --x tokens --log-x");
  command->callback([plot] { plot->run(); });
}

}  // namespace furious::cli
