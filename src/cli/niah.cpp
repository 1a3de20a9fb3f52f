// `furious niah`: the needle-in-a-haystack test.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/load_flags.h"
#include "cli/progress.h"
#include "cli/small_model_flags.h"
#include "data/corpus_lines.h"
#include "data/synthetic.h"
#include "decode/model_parts.h"
#include "paper/needle_report.h"
#include "tensor/device.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

struct NiahCommand {
  explicit NiahCommand(CLI::App& command);

  std::vector<std::string> models, archs, hay;
  std::vector<int64_t> lengths;
  std::vector<double> depths{0, 25, 50, 75, 100};
  std::string data, indices, save_rows, answers_file, svg, json, out = "niah", tokenizer, from;
  std::optional<uint32_t> shuffle;
  int64_t questions = 0, below = 0;
  bool train = false, paper = false, bos = false;
  SmallModelFlags flags;
  CLI::Option* heads;

  void run() const;

 private:
  std::vector<Needle> needles(uint64_t seed) const;
  std::vector<Needle> needles_of_file() const;
  std::vector<LoadOptions> loads(const TrainOptions& options) const;
  std::vector<NeedleResult> ask_models(const TrainOptions& options) const;
  std::vector<NeedleResult> ask_trained(const TrainOptions& options) const;
  std::string picture() const;
  void show(const NeedleReport& report, JsonFile& file) const;
  void report_again() const;
};

std::vector<Needle> NiahCommand::needles_of_file() const {
  require(lengths.empty() && hay.empty(),
          "niah: --lengths and --haystack apply to generated questions; leave them out with --data");
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
      "niah: --paper needs the questions of nanotron/simple_needle_in_a_hay_stack; download them as docs/retrieval.md "
      "says, and give the file with --data");
  require(!shuffle && below == 0 && indices.empty() && save_rows.empty(),
          "niah: --shuffle, --below, --indices and --save-rows select rows of a file; give it with --data");
  NeedleGridOptions options;
  if (!lengths.empty()) options.lengths = lengths;
  options.depths = depths;
  if (questions > 0) options.questions = questions;
  options.seed = seed;
  if (!hay.empty()) {
    CorpusLines lines(hay, {});
    size_t bytes = 0;  // far more than the longest haystack needs
    for (std::string text; bytes < (size_t{16} << 20) && lines.next(text); bytes += text.size())
      options.hay.push_back(text);
    require(!options.hay.empty(), "niah: --haystack {} is empty; give files with text", hay.front());
  }
  return make_needles(options);
}

std::vector<LoadOptions> NiahCommand::loads(const TrainOptions& options) const {
  require(archs.size() <= 1 || archs.size() == models.size(),
          "niah: {} models, but {} architectures; give one for all models, or one for each", models.size(),
          archs.size());
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

std::vector<NeedleResult> NiahCommand::ask_models(const TrainOptions& options) const {
  require(!models.empty(), "niah: no model; give one, or train small ones with --train");
  const std::vector<LoadOptions> load = loads(options);
  const std::vector<Needle> questions_to_ask = needles(options.seed);
  const std::vector<std::string> names = distinguishing_names({models.begin(), models.end()});
  const AnswerRule rule = paper ? AnswerRule::paper : AnswerRule::whole;
  std::vector<NeedleResult> results;
  const std::string saved =
      !answers_file.empty() ? answers_file : fs::path(picture()).replace_extension().string() + "-answers.jsonl";
  const bool replaces = fs::exists(saved);
  AtomicFile file(saved);
  std::string shown;
  ProgressLine line("niah");
  for (size_t i = 0; i < models.size(); ++i) {
    const Model model = load_and_show("niah", models[i], load[i]);
    check_expressible(questions_to_ask, *model.parts().tokenizer);
    const double began = line.seconds();
    const auto all = static_cast<int64_t>(questions_to_ask.size());
    const std::string name = models.size() == 1 ? model.arch() : names[i];
    std::vector<NeedleRecord> records;
    const auto answerer = [&](const Needle& needle) {
      NeedleAnswer answer = answer_of(model, needle, rule);
      records.push_back({{"", needle.answer, needle.length, needle.depth, needle.row},
                         answer.text,
                         answer.prompt_tokens,
                         answers(answer.text, needle.answer, rule)});
      file.write(answer_line(name, records.back()));
      return answer;
    };
    const auto progress = [&](int64_t done, const NeedleGrid& so_far) {
      const double seconds = line.seconds() - began;
      const auto left = static_cast<double>(all - done);
      if (line.due())
        line.show(fmt::format("{}  question {}/{}  {} right  {:.1f}/s  {} left", names[i], done, all,
                              so_far.total().right, static_cast<double>(done) / seconds,
                              clock_text(seconds / static_cast<double>(done) * left)));
      return !stop_requested();
    };
    results.push_back({name, ask_needles(questions_to_ask, answerer, progress, rule)});
    shown += fmt::format("\n{}: some answers\n{}", name, to_text(answers_table(records)));
    if (stop_requested()) break;  // the questions asked so far are reported
  }
  line.clear();
  file.commit();
  fmt::print("{}\nall answers: {}{}\n", shown, saved,
             replaces ? " (those of an earlier test were replaced; --answers gives another file)" : "");
  return results;
}

std::vector<NeedleResult> NiahCommand::ask_trained(const TrainOptions& base) const {
  require(
      models.empty() && data.empty() && hay.empty() && tokenizer.empty() && answers_file.empty() && !paper && !bos,
      "niah: --train makes its own models and questions, whose answers are counted and not saved; leave out models, "
      "--data, --paper, --haystack, --tokenizer, --answers and --bos");
  const std::vector<std::string> trained_archs = archs.empty() ? kCompared : archs;
  const std::vector<int64_t> needles_hidden = lengths.empty() ? std::vector<int64_t>{4, 8, 16, 32, 64} : lengths;
  for (const int64_t count : needles_hidden) NeedleTask({.pairs = count});  // invalid options fail before the training
  std::vector<SmallModel> small;
  for (const std::string& arch : trained_archs) {
    small.push_back({arch, base});
    small.back().options.arch = preset(arch).name;
  }
  const std::vector<LanguageModel> trained = train_with_progress("niah", out, small);
  std::vector<NeedleResult> results;
  for (size_t i = 0; i < trained.size(); ++i)
    results.push_back({trained_archs[i], ask_small_model(trained[i], needles_hidden, depths,
                                                         questions > 0 ? questions : 100, ~base.seed)});
  return results;
}

std::string NiahCommand::picture() const {
  return !svg.empty() ? svg : train ? out + "/niah.svg" : "niah.svg";
}

void NiahCommand::show(const NeedleReport& report, JsonFile& file) const {
  const std::optional<HeatMap> by_tokens = map_by_tokens(report);
  for (const NeedleResult& result : report.results)
    fmt::print("\n{}", to_text(map_of(result, report.unit), shows_colours()));
  if (by_tokens) fmt::print("\n{}", to_text(*by_tokens, shows_colours()));
  write_text(picture(), to_svg(report));
  fmt::print("\nheat map{}: {}\n", report.results.size() + (by_tokens ? 1 : 0) == 1 ? "" : "s", picture());
  file.write(to_json(report));
}

void NiahCommand::report_again() const {
  require(!train && models.empty() && data.empty() && !paper,
          "niah: --from asks no model; leave out models, --data, --paper and --train");
  const NeedleReport report = needle_report_from_json(read_input(from), from);
  JsonFile file(json);
  show(report, file);
}

void NiahCommand::run() const {
  if (!from.empty()) return report_again();
  const TrainOptions options = flags.options();
  std::optional<DirectoryToFill> filled;
  if (train) filled.emplace(out);
  JsonFile file(!json.empty() ? json : train ? out + "/niah.json" : "");
  const ThreadLimit limit(static_cast<int>(options.threads));
  stop_on_signals();
  const std::vector<NeedleResult> results = train ? ask_trained(options) : ask_models(options);
  if (results.empty()) return;
  show({results, train ? "needles in the haystack" : "characters", paper}, file);
}

NiahCommand::NiahCommand(CLI::App& command) : flags(command), heads(command.get_option("--heads")) {
  command.add_option("models", models, "Checkpoint directories or training runs to compare");
  command.add_option(
      "--data", data,
      "Read questions from this .jsonl or .parquet file with prompt, answer, context_length, depth_percent");
  command.add_flag("--paper", paper,
                   "Ask --data as the paper's authors did: --shuffle 420 --below 32768 --questions 1000 --bos, answers "
                   "of ten tokens, "
                   "their rule for a right answer, their results in the table; explicit options override these");
  CLI::Option* order =
      command.add_option("--shuffle", shuffle, "Shuffle the rows of --data as numpy does with this seed");
  command.add_option("--indices", indices, "Ask the rows whose numbers are in this file, one per line, counted from 0")
      ->excludes(order);
  command.add_option("--below", below, "Ask only rows with a context_length below this number")->check(at_least(1));
  command.add_option("--save-rows", save_rows,
                     "Write the numbers of the rows that were asked to this file, for --indices");
  with_commas(command.add_option("--lengths", lengths,
                                 "Lengths of the haystacks, with commas: in characters; with --train, in needles"))
      ->check(at_least(1));
  with_commas(command.add_option("--depths", depths, "Depths of the needle in percent, with commas"))
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command
      .add_option("--questions", questions,
                  "Number of questions for each length and depth (default 10, with --train 100); with --data in total "
                  "(default all "
                  "rows)")
      ->check(CLI::Range(1, 1 << 20));
  with_commas(command.add_option("--haystack", hay,
                                 "Text files to make the haystacks of, with commas; default: built-in sentences"));
  command.add_option("--tokenizer", tokenizer,
                     "Tokenizer to use instead of that of the checkpoint: a SentencePiece model, a tokenizer.json, a "
                     "folder with one, or \"byte\"");
  command.add_flag("--train", train, "Train small models on the task first, and ask those");
  with_commas(
      command.add_option("--arch", archs,
                         "Architecture of weights without a config.json, one for all models or one for each, with "
                         "commas; with --train the architectures to train (default "
                         "softmax,2mamba,mamba2s,mamba2)"));
  command.add_flag("--bos", bos, "Begin every text with bos");
  heads->description(
      "Number of heads of models to train; without --train, of weights whose shapes do not determine it");
  command.add_option("--out", out, "Folder of the models that --train makes; a second run reuses them")
      ->capture_default_str();
  command.add_option("--svg", svg, "Write the heat maps to this file; default: niah.svg, with --train in --out");
  command.add_option("--from", from, "Draw the heat maps from a file written by --json, without asking a model");
  command.add_option(
      "--answers", answers_file,
      "Write every answer to this .jsonl file; default: beside the heat maps, niah-answers.jsonl. --train saves "
      "no answers");
  add_json(command, json, "Write the counts to this JSON file; default with --train: niah.json in --out");
}

}  // namespace

void add_niah(CLI::App& app) {
  CLI::App* niah = app.add_subcommand("niah", "Run the needle-in-a-haystack test over lengths and depths");
  auto command = std::make_shared<NiahCommand>(*niah);
  niah->footer(
      "Example: furious niah runs/stories --lengths 1024,4096,16384\n"
      "         furious niah softmax/ 2mamba/ --data needles.jsonl --paper --svg niah.svg\n"
      "         furious niah --train --arch softmax,2mamba,mamba2");
  niah->callback([command] { command->run(); });
}

}  // namespace furious::cli
