// `furious scaling`: loss against parameters, tokens and floating-point operations, with fitted power laws.
#include "paper/scaling.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/runs.h"

namespace furious::cli {
namespace {

struct ScalingCommand {
  std::vector<std::string> runs;
  std::string out = "scaling", json, loss = "test";
  bool without_embedding = false, best = false;

  void run() const;
};

void ScalingCommand::run() const {
  JsonFile file(json);
  const std::vector<std::filesystem::path> folders = runs_in("scaling", runs);
  const std::vector<std::string> names = distinguishing_names(folders);
  std::vector<ScalingRun> found;
  for (size_t i = 0; i < folders.size(); ++i) {
    try {
      found.push_back(scaling_run(folders[i], {loss == "train", without_embedding}));
      found.back().name = names[i];
    } catch (const Error& error) {
      fmt::print(stderr, "left out: {}\n", error.what());
    }
  }
  require(!found.empty(), "scaling: none of the {} runs can be used", folders.size());
  const Scaling scaling = scaling_of(best ? best_runs(found) : std::move(found));
  const Table all = runs_table(scaling), laws = laws_table(scaling);
  fmt::print("{}\nloss = E + A x^-α\n\n{}\n", to_text(all), to_text(laws));
  std::filesystem::create_directories(out);
  write_text(std::filesystem::path(out) / "table.md",
             fmt::format("{}\nloss = E + A x^-α\n\n{}", to_markdown(all), to_markdown(laws)));
  for (const ScalingAxis axis : kScalingAxes) {
    const std::optional<Chart> chart = scaling_chart(scaling, axis, loss + " loss");
    const std::filesystem::path picture = std::filesystem::path(out) / (name_of(axis) + ".svg");
    if (chart) write_text(picture, to_svg(*chart));
    fmt::print("{}\n",
               chart ? "chart: " + picture.string()
                     : fmt::format("no chart by {}: no runs of one architecture differ in it alone", name_of(axis)));
  }
  file.write(to_json(scaling));
}

}  // namespace

void add_scaling(CLI::App& app) {
  auto scaling = std::make_shared<ScalingCommand>();
  CLI::App* command =
      app.add_subcommand("scaling", "Fit power laws to the losses of runs of several sizes or lengths of training");
  command
      ->add_option("runs", scaling->runs,
                   "Folders of runs, or folders that contain runs, as `furious ablate` writes them")
      ->required();
  command->add_option("-o,--out", scaling->out, "Folder of the charts and of table.md")->capture_default_str();
  command
      ->add_option("--loss", scaling->loss,
                   "test: the last test loss; train: the mean training loss of the last twentieth of the steps")
      ->check(CLI::IsMember({"test", "train"}))
      ->capture_default_str();
  command->add_flag("--without-embedding", scaling->without_embedding,
                    "Count parameters without those of embedding and output matrix");
  command->add_flag(
      "--best", scaling->best,
      "Of runs with equal parameters and tokens use the one with the lowest loss, after a sweep of learning rates");
  add_json(*command, scaling->json, "Write points and fits to this JSON file");
  command->footer(
      "Every architecture gets a curve of its own; a fit needs 4 runs that differ in size, or in tokens. By FLOPs the\n"
      "runs count that no other one of their architecture beats with fewer. docs/ablations.md has an example.\n"
      "Example: furious ablate 2mamba softmax --grid hidden=32,48,64,96 --data data/stories --out sizes\n"
      "         furious scaling sizes");
  command->callback([scaling] { scaling->run(); });
}

}  // namespace furious::cli
