// `furious niah`: the needle in a haystack.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/names.h"
#include "base/parallel.h"
#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/load_flags.h"
#include "cli/progress.h"
#include "cli/small_models.h"
#include "data/corpus_lines.h"
#include "data/synthetic.h"
#include "decode/model_parts.h"
#include "paper/needle.h"
#include "report/heat_map.h"
#include "tensor/device.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kMostCells = 1 << 20;  // of a grid

struct NiahCommand {
  explicit NiahCommand(CLI::App& command);

  std::vector<std::string> models, archs, hay;
  std::vector<int64_t> lengths;
  std::vector<double> depths{0, 25, 50, 75, 100};
  std::string data, indices, save_rows, svg, json, out = "niah", tokenizer, from;
  std::optional<uint32_t> shuffle;
  int64_t questions = 0, below = 0;
  bool train = false, paper = false, bos = false;
  SmallModelFlags flags;
  CLI::Option* heads;

  void run() const;

 private:
  struct Result {
    std::string name;
    NeedleGrid grid;
  };

  std::vector<Needle> needles(uint64_t seed) const;
  std::vector<Needle> needles_of_file() const;
  std::vector<LoadOptions> loads(const TrainOptions& options) const;
  std::vector<Result> ask_models(const TrainOptions& options) const;
  std::vector<Result> ask_trained(const TrainOptions& options) const;
  static std::optional<HeatMap> map_by_tokens(const std::vector<Result>& results, bool with_paper);
  void report(const std::vector<Result>& results, const std::string& unit, bool with_paper, JsonFile& file) const;
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

// Models by tokens, as the paper's figure has it. Nothing where lengths are no texts.
std::optional<HeatMap> NiahCommand::map_by_tokens(const std::vector<Result>& results, bool with_paper) {
  HeatMap map;
  map.title = "All depths";
  map.y_label = "model";
  std::map<int64_t, std::set<int64_t>> tokens;  // of each length; several where models have several tokenizers
  for (const auto& [name, grid] : results)
    for (size_t i = 0; i < grid.lengths.size(); ++i) {
      std::set<int64_t>& means = tokens[grid.lengths[i]];
      if (grid.prompt_tokens[i] > 0) means.insert(std::llround(grid.mean_tokens(i)));
    }
  const auto has = [&](size_t count) { return [count](const auto& column) { return column.second.size() == count; }; };
  if (std::ranges::all_of(tokens, has(0))) return std::nullopt;
  const bool in_tokens = std::ranges::all_of(tokens, has(1));
  map.x_label = in_tokens ? "tokens (mean)" : "characters";
  for (const auto& [length, means] : tokens) map.columns.push_back(std::to_string(in_tokens ? *means.begin() : length));
  for (const auto& [name, grid] : results) {
    map.rows.push_back(name);
    for (const auto& [length, means] : tokens) {
      const size_t column = grid.column_of(length);
      const Accuracy found = column < grid.lengths.size() ? grid.at_length(column) : Accuracy{};
      map.cells.push_back({found.right, found.asked, {}});
    }
  }
  for (const PaperNeedles& theirs : with_paper ? kPaperNeedles : std::vector<PaperNeedles>()) {
    map.rows.push_back(theirs.model + " (paper)");
    for (const auto& [length, means] : tokens) {
      const auto found = std::ranges::find(kPaperNeedleLengths, length);
      map.cells.emplace_back();
      if (found != kPaperNeedleLengths.end())
        map.cells.back().proportion = theirs.proportions[static_cast<size_t>(found - kPaperNeedleLengths.begin())];
    }
  }
  return map;
}

Json paper_json() {
  Json theirs = Json::array();
  for (const auto& [model, proportions] : kPaperNeedles)
    theirs.push_back({{"model", model}, {"proportions", proportions}});
  return {{"source", "github.com/gmongaras/2Mamba2Furious, niah_and_hs/niah_heatmap.py"},
          {"lengths", kPaperNeedleLengths},
          {"tokens", kPaperNeedleTokens},
          {"models", theirs}};
}

std::vector<Needle> NiahCommand::needles_of_file() const {
  require(lengths.empty() && hay.empty(),
          "niah: --data brings its own questions; --lengths and --haystack are for made ones");
  NeedleRows rows = paper ? paper_needle_rows() : NeedleRows();
  if (shuffle) rows.shuffle = shuffle;
  if (below > 0) rows.below = below;
  if (questions > 0) rows.questions = questions;
  if (!indices.empty()) {
    rows.indices = read_row_numbers(indices);
    rows.shuffle.reset();
  }
  std::vector<Needle> chosen = read_needles(data, rows);
  if (!save_rows.empty()) write_text(save_rows, row_numbers(chosen));
  return chosen;
}

std::vector<Needle> NiahCommand::needles(uint64_t seed) const {
  if (!data.empty()) return needles_of_file();
  require(
      !paper,
      "niah: --paper asks questions of nanotron/simple_needle_in_a_hay_stack; get it as docs/retrieval.md says, and "
      "name its file with --data");
  require(!shuffle && below == 0 && indices.empty() && save_rows.empty(),
          "niah: --shuffle, --below, --indices and --save-rows choose rows of a file; name it with --data");
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

std::vector<LoadOptions> NiahCommand::loads(const TrainOptions& options) const {
  require(archs.size() <= 1 || archs.size() == models.size(),
          "niah: {} models, but {} architectures; name one for all, or one for each", models.size(), archs.size());
  LoadOptions load;
  load.tokenizer = tokenizer;
  load.device = name_of(usable_device(options.device));
  if (options.dtype != "auto") load.dtype = options.dtype;
  if (heads->count() > 0) load.heads = options.heads;
  load.bos = bos || paper;
  std::vector<LoadOptions> all(models.size(), load);
  for (size_t i = 0; i < all.size(); ++i)
    if (!archs.empty()) all[i].arch = archs[archs.size() == 1 ? 0 : i];
  return all;
}

std::vector<NiahCommand::Result> NiahCommand::ask_models(const TrainOptions& options) const {
  require(!models.empty(), "niah: no model; name one, or train small ones on the spot with --train");
  const std::vector<LoadOptions> load = loads(options);
  const std::vector<Needle> questions_to_ask = needles(options.seed);
  const std::vector<std::string> names = distinguishing_names({models.begin(), models.end()});
  const AnswerRule rule = paper ? AnswerRule::paper : AnswerRule::whole;
  std::vector<Result> results;
  ProgressLine line("niah");
  for (size_t i = 0; i < models.size(); ++i) {
    show_notes(models[i]);
    const Model model = Model::load(models[i], load[i]);
    check_expressible(questions_to_ask, *model.parts().tokenizer);
    const double began = line.seconds();
    const auto all = static_cast<int64_t>(questions_to_ask.size());
    const auto answerer = [&](const Needle& needle) { return answer_of(model, needle, rule); };
    const auto progress = [&](int64_t done, const NeedleGrid& so_far) {
      const double seconds = line.seconds() - began;
      const auto left = static_cast<double>(all - done);
      if (line.due())
        line.show(fmt::format("{}  question {}/{}  {} right  {:.1f}/s  {} left", names[i], done, all,
                              so_far.total().right, static_cast<double>(done) / seconds,
                              clock_text(seconds / static_cast<double>(done) * left)));
      return !stop_requested();
    };
    results.push_back(
        {models.size() == 1 ? model.arch() : names[i], ask_needles(questions_to_ask, answerer, progress, rule)});
    if (stop_requested()) break;  // what was asked by now is reported
  }
  return results;
}

std::vector<NiahCommand::Result> NiahCommand::ask_trained(const TrainOptions& base) const {
  require(
      models.empty() && data.empty() && hay.empty() && tokenizer.empty() && !paper && !bos,
      "niah: --train makes its own models and questions; models, --data, --paper, --haystack, --tokenizer and --bos "
      "do not go with it");
  const std::vector<std::string> trained_archs = archs.empty() ? kCompared : archs;
  const std::vector<int64_t> needles_hidden = lengths.empty() ? std::vector<int64_t>{4, 8, 16, 32, 64} : lengths;
  for (const int64_t count : needles_hidden) NeedleTask({.pairs = count});  // what cannot be asked is not trained for
  std::vector<SmallModel> small;
  for (const std::string& arch : trained_archs) {
    small.push_back({arch, base});
    small.back().options.arch = preset(arch).name;
  }
  const std::vector<LanguageModel> trained = train_small_models("niah", out, small);
  std::vector<Result> results;
  for (size_t i = 0; i < trained.size(); ++i)
    results.push_back({trained_archs[i], ask_small_model(trained[i], needles_hidden, depths,
                                                         questions > 0 ? questions : 100, ~base.seed)});
  return results;
}

void NiahCommand::report(const std::vector<Result>& results, const std::string& unit, bool with_paper,
                         JsonFile& file) const {
  std::vector<HeatMap> maps;
  Json written = Json::array();
  const std::optional<HeatMap> by_tokens = map_by_tokens(results, with_paper);
  if (by_tokens) maps.push_back(*by_tokens);
  for (const auto& [name, grid] : results) {
    maps.push_back(map_of(name, grid, unit));
    fmt::print("\n{}", to_text(maps.back(), shows_colours()));
    Json cells = Json::array(), columns = Json::array();
    for (size_t i = 0; i < grid.cells.size(); ++i)
      cells.push_back({{"length", grid.lengths[i % grid.lengths.size()]},
                       {"depth_percent", grid.depths[i / grid.lengths.size()]},
                       {"right", grid.cells[i].right},
                       {"asked", grid.cells[i].asked}});
    for (size_t i = 0; i < grid.lengths.size(); ++i)
      columns.push_back({{"length", grid.lengths[i]},
                         {"prompt_tokens", grid.prompt_tokens[i]},
                         {"mean_tokens", grid.mean_tokens(i)},
                         {"right", grid.at_length(i).right},
                         {"asked", grid.at_length(i).asked}});
    written.push_back({{"model", name}, {"right", grid.total().right}, {"asked", grid.total().asked}});
    if (by_tokens) written.back()["lengths"] = columns;
    written.back()["cells"] = cells;
  }
  if (by_tokens) fmt::print("\n{}", to_text(*by_tokens, shows_colours()));
  const std::string picture = !svg.empty() ? svg : train ? out + "/niah.svg" : "niah.svg";
  write_text(picture, to_svg("Needles found in a haystack, in percent", maps));
  fmt::print("\nheat map{} in {}\n", maps.size() == 1 ? "" : "s", picture);
  Json all{{"unit", unit}, {"models", written}};
  if (with_paper) all["paper"] = paper_json();
  file.write(all);
}

void NiahCommand::report_again() const {
  require(!train && models.empty() && data.empty() && !paper,
          "niah: --from asks no model; models, --data, --paper and --train do not go with it");
  std::vector<Result> results;
  std::string unit;
  bool with_paper = false;
  try {
    constexpr int64_t kMost = int64_t{1} << 40;  // sums of them fit 64 bits
    const nlohmann::json parsed = parse_json(read_input(from), from);
    const JsonValue written(parsed, from);
    unit = written.at("unit").text();
    with_paper = written.has("paper");
    for (const JsonValue& model : written.at("models").items()) {
      std::set<int64_t> of_lengths;
      std::set<double> of_depths;
      const std::vector<JsonValue> cells = model.at("cells").items();
      for (const JsonValue& cell : cells) {
        of_lengths.insert(cell.at("length").integer(0, kMost));
        of_depths.insert(cell.at("depth_percent").number());
      }
      if (of_lengths.size() * of_depths.size() > kMostCells)
        model.at("cells").unexpected(fmt::format("at most {} lengths times depths", kMostCells));
      NeedleGrid grid({of_lengths.begin(), of_lengths.end()}, {of_depths.begin(), of_depths.end()});
      for (const JsonValue& cell : cells)
        grid.at(cell.at("depth_percent").number(), cell.at("length").integer(0, kMost)) = {
            cell.at("right").integer(0, kMost), cell.at("asked").integer(0, kMost)};
      if (model.has("lengths"))
        for (const JsonValue& column : model.at("lengths").items()) {
          const int64_t length = column.at("length").integer(0, kMost);
          if (!of_lengths.contains(length)) column.at("length").unexpected("a length of the cells");
          grid.prompt_tokens.at(grid.column_of(length)) = column.at("prompt_tokens").integer(0, kMost);
        }
      results.push_back({model.at("model").text(), grid});
    }
  } catch (const Error& error) {
    fail("niah: {}; --from takes what --json writes", error.what());
  }
  JsonFile file(json);
  report(results, unit, with_paper, file);
}

void NiahCommand::run() const {
  if (!from.empty()) return report_again();
  const TrainOptions options = flags.options();
  if (train) {
    std::error_code ignored;
    fs::create_directories(out, ignored);
  }
  JsonFile file(!json.empty() ? json : train ? out + "/niah.json" : "");
  const ThreadLimit limit(static_cast<int>(options.threads));
  stop_on_signals();
  const std::vector<Result> results = train ? ask_trained(options) : ask_models(options);
  if (results.empty()) return;
  report(results, train ? "needles in the haystack" : "characters", paper, file);
}

NiahCommand::NiahCommand(CLI::App& command) : flags(command), heads(command.get_option("--heads")) {
  command.add_option("models", models, "Checkpoint directories or training runs; several stand side by side");
  command.add_option("--data", data,
                     "Questions: .jsonl or .parquet with prompt, answer, context_length, depth_percent");
  command.add_flag(
      "--paper", paper,
      "Ask --data as the paper's authors did: --shuffle 420 --below 32768 --questions 1000 --bos, ten tokens, "
      "their rule of what is right, their results beside; an option that is given replaces its part");
  CLI::Option* order =
      command.add_option("--shuffle", shuffle, "Ask rows in the order of numpy's shuffle with this seed");
  command
      .add_option("--indices", indices, "Ask the rows that this file names, one on each line from 0 on, in its order")
      ->excludes(order);
  command.add_option("--below", below, "Ask only rows with a context_length below it")->check(at_least(1));
  command.add_option("--save-rows", save_rows, "Write the rows that were asked to this file, for --indices");
  with_commas(
      command.add_option("--lengths", lengths, "Of the haystacks, with commas: characters; with --train, needles"))
      ->check(at_least(1));
  with_commas(command.add_option("--depths", depths, "Of the needle, in percent, with commas"))
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command
      .add_option(
          "--questions", questions,
          "For each length and depth; by default 10, with --train 100; with --data in all, by default every row")
      ->check(CLI::Range(1, 1 << 20));
  with_commas(command.add_option("--haystack", hay, "Text that haystacks are made of; without, sentences of our own"));
  command.add_option("--tokenizer", tokenizer, "\"byte\", a SentencePiece model, or a folder with one");
  command.add_flag("--train", train, "Train small models on the task first, and ask those");
  with_commas(command.add_option("--arch", archs,
                                 "Of weights without a config.json, one for all models or one for each with commas; "
                                 "with --train what is trained, by default softmax,2mamba,mamba2s,mamba2"));
  command.add_flag("--bos", bos, "Texts begin with bos");
  heads->description("Of models to train; without --train, of weights that do not tell it");
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
      "         furious niah softmax/ 2mamba/ --data needles.jsonl --paper --svg niah.svg\n"
      "         furious niah --train --arch softmax,2mamba,mamba2");
  niah->callback([command] { command->run(); });
}

}  // namespace furious::cli
