// `furious niah`: the needle in a haystack.
#include <fmt/format.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/parallel.h"
#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "cli/small_models.h"
#include "data/corpus_lines.h"
#include "data/synthetic.h"
#include "eval/needle.h"
#include "infer/model_parts.h"
#include "report/heat_map.h"
#include "tensor/device.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct NiahCommand {
  explicit NiahCommand(CLI::App& command);

  std::vector<std::string> models, archs{kCompared}, hay;
  std::vector<int64_t> lengths;
  std::vector<double> depths{0, 25, 50, 75, 100};
  std::string data, svg, json, out = "niah", tokenizer, from;
  int64_t questions = 0;
  bool train = false;
  SmallModelFlags flags;

  void run() const;

 private:
  struct Result {
    std::string name;
    NeedleGrid grid;
  };

  std::vector<Needle> needles(uint64_t seed) const;
  std::vector<Result> ask_models(const TrainOptions& options) const;
  std::vector<Result> ask_trained(const TrainOptions& options) const;
  void report(const std::vector<Result>& results, const std::string& unit, JsonFile& file) const;
  void report_again() const;
};

HeatMap map_of(const std::string& name, const NeedleGrid& grid, const std::string& unit) {
  HeatMap map;
  const Accuracy total = grid.total();
  map.title = fmt::format("{}: {} of {} found", name, total.right, total.asked);
  map.x_label = unit;
  map.y_label = "depth";
  for (const int64_t length : grid.lengths) map.columns.push_back(std::to_string(length));
  for (const double depth : grid.depths) map.rows.push_back(fmt::format("{}%", depth));
  for (const Accuracy& cell : grid.cells) map.cells.push_back({cell.right, cell.asked});
  return map;
}

std::vector<Needle> NiahCommand::needles(uint64_t seed) const {
  if (!data.empty()) {
    require(lengths.empty() && hay.empty() && questions == 0,
            "niah: --data brings its own questions; --lengths, --haystack and --questions are for made ones");
    return read_needles(data);
  }
  NeedleGridOptions options;
  if (!lengths.empty()) options.lengths = lengths;
  options.depths = depths;
  if (questions > 0) options.questions = questions;
  options.seed = seed;
  if (!hay.empty()) {
    CorpusLines lines(hay, {});
    size_t bytes = 0;  // far more than the longest haystack would serve nobody
    for (std::string text; bytes < (size_t{16} << 20) && lines.next(text); bytes += text.size())
      options.hay.push_back(text);
    require(!options.hay.empty(), "niah: --haystack {} has no text", hay.front());
  }
  return make_needles(options);
}

std::vector<NiahCommand::Result> NiahCommand::ask_models(const TrainOptions& options) const {
  require(!models.empty(), "niah: no model; name one, or train small ones on the spot with --train");
  const std::vector<Needle> questions_to_ask = needles(options.seed);
  LoadOptions load;
  load.tokenizer = tokenizer;
  load.device = name_of(usable_device(options.device));
  if (options.dtype != "auto") load.dtype = options.dtype;
  std::vector<Result> results;
  ProgressLine line("niah");
  for (const std::string& path : models) {
    const Model model = Model::load(path, load);
    check_expressible(questions_to_ask, *model.parts().tokenizer);
    const double began = line.seconds();
    const auto all = static_cast<int64_t>(questions_to_ask.size());
    const auto answerer = [&](const Needle& needle) { return answer_of(model, needle); };
    results.push_back({models.size() == 1 ? model.arch() : fs::path(path).lexically_normal().filename().string(),
                       ask_needles(questions_to_ask, answerer, [&](int64_t done, const NeedleGrid& so_far) {
                         const double seconds = line.seconds() - began;
                         const auto left = static_cast<double>(all - done);
                         if (line.due())
                           line.show(fmt::format("{}  question {}/{}  {} right  {:.1f}/s  {} left", path, done, all,
                                                 so_far.total().right, static_cast<double>(done) / seconds,
                                                 clock_text(seconds / static_cast<double>(done) * left)));
                         return !stop_requested();
                       })});
    if (stop_requested()) break;  // what was asked by now is reported
  }
  return results;
}

std::vector<NiahCommand::Result> NiahCommand::ask_trained(const TrainOptions& base) const {
  require(models.empty() && data.empty() && hay.empty() && tokenizer.empty(),
          "niah: --train makes its own models and questions; models, --data, --haystack and --tokenizer do not go with "
          "it");
  const std::vector<int64_t> needles_hidden = lengths.empty() ? std::vector<int64_t>{4, 8, 16, 32, 64} : lengths;
  for (const int64_t count : needles_hidden) NeedleTask({.pairs = count});  // what cannot be asked is not trained for
  std::vector<SmallModel> small;
  for (const std::string& arch : archs) {
    small.push_back({arch, base});
    small.back().options.arch = preset(arch).name;
  }
  const std::vector<LanguageModel> trained = train_small_models("niah", out, small);
  std::vector<Result> results;
  for (size_t i = 0; i < trained.size(); ++i)
    results.push_back(
        {archs[i], ask_small_model(trained[i], needles_hidden, depths, questions > 0 ? questions : 100, ~base.seed)});
  return results;
}

void NiahCommand::report(const std::vector<Result>& results, const std::string& unit, JsonFile& file) const {
  std::vector<HeatMap> maps;
  Json written = Json::array();
  for (const auto& [name, grid] : results) {
    maps.push_back(map_of(name, grid, unit));
    fmt::print("\n{}", to_text(maps.back(), shows_colours()));
    Json cells = Json::array();
    for (size_t i = 0; i < grid.cells.size(); ++i)
      cells.push_back({{"length", grid.lengths[i % grid.lengths.size()]},
                       {"depth_percent", grid.depths[i / grid.lengths.size()]},
                       {"right", grid.cells[i].right},
                       {"asked", grid.cells[i].asked}});
    written.push_back(
        {{"model", name}, {"right", grid.total().right}, {"asked", grid.total().asked}, {"cells", cells}});
  }
  const std::string picture = !svg.empty() ? svg : train ? out + "/niah.svg" : "niah.svg";
  write_text(picture, to_svg("Needles found in a haystack, in percent", maps));
  fmt::print("\nheat map{} in {}\n", maps.size() == 1 ? "" : "s", picture);
  file.write(Json{{"unit", unit}, {"models", written}});
}

void NiahCommand::report_again() const {
  require(!train && models.empty() && data.empty(),
          "niah: --from asks no model; models, --data and --train do not go with it");
  std::vector<Result> results;
  std::string unit;
  try {
    const Json written = Json::parse(read_input(from));
    unit = written.at("unit");
    for (const Json& model : written.at("models")) {
      std::set<int64_t> of_lengths;
      std::set<double> of_depths;
      for (const Json& cell : model.at("cells")) {
        of_lengths.insert(cell.at("length").get<int64_t>());
        of_depths.insert(cell.at("depth_percent").get<double>());
      }
      NeedleGrid grid({of_lengths.begin(), of_lengths.end()}, {of_depths.begin(), of_depths.end()});
      for (const Json& cell : model.at("cells"))
        grid.at(cell.at("depth_percent"), cell.at("length")) = {cell.at("right"), cell.at("asked")};
      results.push_back({model.at("model"), grid});
    }
  } catch (const Json::exception& error) {
    fail("niah: {} is not what --json writes: {}", from, error.what());
  }
  JsonFile file(json);
  report(results, unit, file);
}

void NiahCommand::run() const {
  if (!from.empty()) return report_again();
  const TrainOptions options = flags.options();
  if (train) {
    std::error_code ignored;
    fs::create_directories(out, ignored);
  }
  JsonFile file(!json.empty() ? json : train ? out + "/niah.json" : "");
  if (options.threads > 0) set_threads(static_cast<int>(options.threads));
  stop_on_signals();
  const std::vector<Result> results = train ? ask_trained(options) : ask_models(options);
  if (results.empty()) return;
  report(results, train ? "needles in the haystack" : "characters", file);
}

NiahCommand::NiahCommand(CLI::App& command) : flags(command) {
  command.add_option("models", models, "Checkpoint directories or training runs; several stand side by side");
  command.add_option("--data", data,
                     "Questions: .jsonl or .parquet with prompt, answer, context_length, depth_percent");
  with_commas(
      command.add_option("--lengths", lengths, "Of the haystacks, with commas: characters; with --train, needles"))
      ->check(at_least(1));
  with_commas(command.add_option("--depths", depths, "Of the needle, in percent, with commas"))
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command.add_option("--questions", questions, "For each length and depth; by default 10, with --train 100")
      ->check(CLI::Range(1, 1 << 20));
  with_commas(command.add_option("--haystack", hay, "Text that haystacks are made of; without, sentences of our own"));
  command.add_option("--tokenizer", tokenizer, "\"byte\", a SentencePiece model, or a folder with one");
  command.add_flag("--train", train, "Train small models on the task first, and ask those");
  with_commas(command.add_option("--arch", archs, "Their architectures, with commas"))->capture_default_str();
  command.add_option("--out", out, "Their folder; a second run with it asks what is there")->capture_default_str();
  command.add_option("--svg", svg, "The heat maps; by default niah.svg, with --train in its folder");
  command.add_option("--from", from, "Ask nothing: draw the heat maps again from this file of --json");
  command.add_option("--json", json, "Write the counts to this file; with --train also without, to its folder");
}

}  // namespace

void add_niah(CLI::App& app) {
  CLI::App* niah = app.add_subcommand("niah", "Ask for pass keys hidden in long texts, over lengths and depths");
  auto command = std::make_shared<NiahCommand>(*niah);
  niah->footer(
      "Example: furious niah runs/stories --lengths 1024,4096,16384\n"
      "         furious niah --train --arch softmax,2mamba,mamba2");
  niah->callback([command] { command->run(); });
}

}  // namespace furious::cli
