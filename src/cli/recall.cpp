// `furious recall`: multi-query associative recall, by number of pairs and size of the state.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "cli/small_models.h"
#include "data/synthetic.h"
#include "eval/accuracy.h"
#include "report/heat_map.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct RecallCommand {
  explicit RecallCommand(CLI::App& command);

  std::vector<std::string> archs{kCompared};
  std::vector<int64_t> dims{16, 32, 64}, pairs{4, 8, 16, 32};
  int64_t rows = 64;
  std::string out = "recall", svg, json;
  SmallModelFlags flags;

  void run() const;

 private:
  std::vector<SmallModel> models(const TrainOptions& base) const;
  RecallTask task(int64_t count, uint64_t seed) const;
};

std::vector<SmallModel> RecallCommand::models(const TrainOptions& base) const {
  std::vector<SmallModel> models;
  for (const std::string& arch : archs)
    for (const int64_t dim : dims) {
      require(base.hidden % dim == 0,
              "recall: a width of {} is not a multiple of the head dimension {}; change --hidden or --dims",
              base.hidden, dim);
      models.push_back({fmt::format("{}-{}", preset(arch).name, dim), base});
      models.back().options.arch = arch;
      models.back().options.heads = base.hidden / dim;
    }
  return models;
}

RecallTask RecallCommand::task(int64_t count, uint64_t seed) const {
  RecallOptions options;
  options.batch = rows;
  options.pairs = count;
  options.length = 4 * count;  // no filler: the pairs, then each key once more
  options.vocabulary_size = LookupOptions().vocabulary_size;
  options.seed = seed;
  return RecallTask(options);
}

// The cache memory of a sequence after the longest of these texts.
std::string memory_text(const ModelConfig& config, int64_t length) {
  const auto bytes = static_cast<double>(cache_numbers(config, length)) * sizeof(float);
  return fmt::format("d {} ({:.1f} KB)", config.head_dim, bytes / 1e3);
}

void RecallCommand::run() const {
  const TrainOptions base = flags.options();
  std::error_code ignored;
  fs::create_directories(out, ignored);
  JsonFile file(!json.empty() ? json : out + "/recall.json");
  const ThreadLimit limit(static_cast<int>(base.threads));
  stop_on_signals();
  for (const int64_t count : pairs) task(count, 0);  // invalid options fail before the training
  const std::vector<LanguageModel> trained = train_small_models("recall", out, models(base));
  if (trained.empty()) return;

  const int64_t longest = 4 * *std::max_element(pairs.begin(), pairs.end());
  std::vector<HeatMap> maps;
  Json written = Json::array();
  for (size_t i = 0; i < trained.size(); ++i) {
    const ModelConfig& config = trained[i].config();
    if (i % dims.size() == 0) {
      maps.push_back({config.arch, "pairs", "state", {}, {}, {}});
      for (const int64_t count : pairs) maps.back().columns.push_back(std::to_string(count));
    }
    maps.back().rows.push_back(memory_text(config, longest));
    for (const int64_t count : pairs) {
      const Accuracy found = accuracy(trained[i], task(count, ~base.seed), 1);
      maps.back().cells.push_back({found.right, found.asked});
      written.push_back({{"arch", config.arch},
                         {"head_dim", config.head_dim},
                         {"sequence_bytes", cache_numbers(config, longest) * static_cast<int64_t>(sizeof(float))},
                         {"pairs", count},
                         {"right", found.right},
                         {"asked", found.asked}});
    }
  }
  for (const HeatMap& map : maps) fmt::print("\n{}", to_text(map, shows_colours()));
  const std::string picture = svg.empty() ? out + "/recall.svg" : svg;
  write_text(picture, to_svg("Values recalled by their keys, in percent", maps));
  fmt::print("\nheat map{}: {}\n", maps.size() == 1 ? "" : "s", picture);
  file.write(Json{{"steps", base.steps}, {"cells", written}});
}

RecallCommand::RecallCommand(CLI::App& command) : flags(command, false) {
  with_commas(command.add_option("--arch", archs, "Architectures to train, with commas"))->capture_default_str();
  with_commas(command.add_option("--dims", dims, "Head dimensions, with commas; they determine the size of the state"))
      ->check(CLI::Range(kSmallestDim, kLargestDim))
      ->capture_default_str();
  with_commas(command.add_option("--pairs", pairs, "Numbers of key-value pairs, with commas"))
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command.add_option("--rows", rows, "Number of texts for each number of pairs; each asks for all of its pairs")
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
