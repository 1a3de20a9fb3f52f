// `furious recall`: multi-query associative recall, by number of pairs and size of the state.
#include "paper/recall.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "cli/small_model_flags.h"

namespace furious::cli {
namespace {

struct RecallCommand {
  explicit RecallCommand(CLI::App& command);

  RecallStudy study;
  std::string out = "recall", svg, json;
  SmallModelFlags flags;

  void run();
};

void RecallCommand::run() {
  study.base = flags.options();
  std::error_code ignored;
  std::filesystem::create_directories(out, ignored);
  JsonFile file(!json.empty() ? json : out + "/recall.json");
  const ThreadLimit limit(static_cast<int>(study.base.threads));
  stop_on_signals();
  const std::vector<LanguageModel> trained = train_with_progress("recall", out, recall_models(study));
  if (trained.empty()) return;
  const std::vector<RecallCell> cells = recall_cells(study, trained);
  const std::vector<HeatMap> maps = recall_maps(study, cells);
  for (const HeatMap& map : maps) fmt::print("\n{}", to_text(map, shows_colours()));
  const std::string picture = svg.empty() ? out + "/recall.svg" : svg;
  write_text(picture, to_svg("Values recalled by their keys, in percent", maps));
  fmt::print("\nheat map{}: {}\n", maps.size() == 1 ? "" : "s", picture);
  file.write(recall_json(study, cells));
}

RecallCommand::RecallCommand(CLI::App& command) : flags(command, false) {
  with_commas(command.add_option("--arch", study.archs, "Architectures to train, with commas"))->capture_default_str();
  with_commas(
      command.add_option("--dims", study.dims, "Head dimensions, with commas; they determine the size of the state"))
      ->check(CLI::Range(kSmallestDim, kLargestDim))
      ->capture_default_str();
  with_commas(command.add_option("--pairs", study.pairs, "Numbers of key-value pairs, with commas"))
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command.add_option("--rows", study.rows, "Number of texts for each number of pairs; each asks for all of its pairs")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command.add_option("--out", out, "Folder of the models; a second run reuses them")->capture_default_str();
  command.add_option("--svg", svg, "Write the heat maps to this file; default: recall.svg in --out");
  add_json(command, json, "Write the counts to this JSON file; default: recall.json in --out");
}

}  // namespace

void add_recall(CLI::App& app) {
  CLI::App* recall = app.add_subcommand("recall", "Train small models on associative recall, by size of the state");
  auto command = std::make_shared<RecallCommand>(*recall);
  recall->footer("Example: furious recall --arch 2mamba,mamba2s --dims 8,16 --steps 400");
  recall->callback([command] { command->run(); });
}

}  // namespace furious::cli
