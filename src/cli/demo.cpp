// `furious demo`: train three small models on the same batches, from text to a comparison.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "data/corpus_lines.h"
#include "data/tokenize.h"
#include "decode/model_parts.h"
#include "model/plan.h"
#include "report/chart.h"
#include "report/table.h"
#include "train/trainer.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

// Debian's dict-gcide, gzip under another name: the dictionary of Webster, 1913, and its supplements.
constexpr const char* kDictionary = "/usr/share/dictd/gcide.dict.dz";

constexpr int64_t kBatch = 8, kLength = 256;

struct DemoCommand {
  std::vector<std::string> text;
  std::vector<std::string> archs{"2mamba", "mamba2", "softmax"};
  std::string out = "demo";
  int64_t steps = 220;
  int32_t vocabulary = 4096;

  void run() const;

 private:
  struct Candidate {
    std::string arch;
    std::unique_ptr<Trainer> trainer;
    std::vector<double> losses;
    double seconds = 0, test_loss = 0;
  };

  std::vector<std::string> inputs() const;
  std::string tokenizer(const std::vector<std::string>& from) const;
  std::string shards(const std::vector<std::string>& from, const std::string& tokenizer) const;
  TrainOptions options(const std::string& arch, const std::string& data) const;
  void train(std::vector<Candidate>& candidates) const;
  void report(const std::vector<Candidate>& candidates) const;
};

std::vector<std::string> DemoCommand::inputs() const {
  if (!text.empty()) return text;
  require(
      fs::exists(kDictionary),
      "demo: {} does not exist; install the package dict-gcide (`make demo` does), or give your own text: furious demo "
      "FILE…",
      kDictionary);
  fs::create_directories(out);
  const fs::path link = fs::path(out) / "dictionary.txt.gz";
  std::error_code ignored;
  fs::remove(link, ignored);
  fs::create_symlink(kDictionary, link);
  return {link.string()};
}

std::string DemoCommand::tokenizer(const std::vector<std::string>& from) const {
  const std::string path = out + "/tokenizer.model";
  ReaderOptions reader;
  CorpusLines lines(from, reader);
  TokenizerTraining training;
  training.vocabulary_size = vocabulary;
  training.sentences = 50000;
  training.threads = threads();
  fs::create_directories(out);
  write_text(path, train_sentencepiece(lines, training));
  fmt::print("tokenizer  vocabulary {}, from {:.1f} MB of text\n", vocabulary,
             static_cast<double>(lines.bytes()) / 1e6);
  return path;
}

std::string DemoCommand::shards(const std::vector<std::string>& from, const std::string& tokenizer) const {
  TokenizeOptions options;
  options.inputs = from;
  options.tokenizer = tokenizer;
  options.out = out + "/shards";
  options.reader.split_on_blank_line = true;
  options.test_fraction = 0.01;
  std::error_code ignored;
  fs::remove_all(options.out, ignored);
  const Manifest manifest = tokenize_corpus(options, {stop_requested, {}}).manifest;
  fmt::print("shards     {} tokens for training, {} for testing\n", manifest[Split::train].total().tokens,
             manifest[Split::test].total().tokens);
  return options.out;
}

TrainOptions DemoCommand::options(const std::string& arch, const std::string& data) const {
  TrainOptions options;
  options.arch = arch;
  options.data = data;
  options.batch = kBatch;
  options.length = kLength;
  options.steps = steps;
  options.lr = 4e-3;
  options.warmup = std::min<int64_t>(20, steps / 4);
  options.clip = 1;
  options.eval_batches = 8;
  return options;
}

void DemoCommand::train(std::vector<Candidate>& candidates) const {
  ProgressLine line("demo");
  for (int64_t step = 1; step <= steps && !stop_requested(); ++step) {
    std::string losses;
    for (Candidate& candidate : candidates) {
      const TrainStep done = candidate.trainer->step();
      candidate.losses.push_back(done.loss);
      candidate.seconds += static_cast<double>(kBatch * kLength) / done.tokens_per_second;
      losses += fmt::format("  {} {:.3f}", candidate.arch, done.loss);
    }
    const double left = line.seconds() / static_cast<double>(step) * static_cast<double>(steps - step);
    if (line.due()) line.show(fmt::format("step {}/{}  loss{}  {} left", step, steps, losses, clock_text(left)));
  }
  for (Candidate& candidate : candidates) candidate.test_loss = candidate.trainer->test_loss().value_or(NAN);
}

void DemoCommand::report(const std::vector<Candidate>& candidates) const {
  Chart chart;
  chart.title = "Training loss, side by side";
  chart.x_label = "step";
  chart.y_label = "loss";
  Table table{{"model", "parameters", "test loss", "tokens/s", "KB at 1k", "KB at 8k", "KB at 64k"}, {}};
  for (const Candidate& candidate : candidates) {
    const ModelConfig& config = candidate.trainer->model().config();
    const auto kilobytes = [&](int64_t length) {
      return fmt::format("{:.0f}", static_cast<double>(cache_numbers(config, length) * 4) / 1e3);
    };
    const auto tokens = static_cast<double>(kBatch * kLength * static_cast<int64_t>(candidate.losses.size()));
    table.rows.push_back({candidate.arch, fmt::format("{:.2f}M", static_cast<double>(parameter_count(config)) / 1e6),
                          fmt::format("{:.3f}", candidate.test_loss), fmt::format("{:.0f}", tokens / candidate.seconds),
                          kilobytes(1 << 10), kilobytes(8 << 10), kilobytes(64 << 10)});
    Series series{candidate.arch, {}, smooth(candidate.losses, 8)};
    for (size_t i = 0; i < series.y.size(); ++i) series.x.push_back(static_cast<double>(i + 1));
    chart.series.push_back(std::move(series));
  }
  fmt::print("\n{}\nKB: cache memory of one sequence after 1k, 8k and 64k tokens\n", to_text(table));
  write_text(out + "/loss.svg", to_svg(chart));
}

std::vector<Text> samples_of(const Trainer& trainer, int sequences) {
  const auto tokenizer = trainer.data().dataset->tokenizer();
  Session session(Model(std::make_shared<Model::Parts>(trainer.model(), tokenizer, false)), sequences);
  session.read("");
  WriteOptions options;
  options.tokens = 80;
  options.sampling.temperature = 0.7;
  return session.write(options);
}

void DemoCommand::run() const {
  stop_on_signals();
  const std::vector<std::string> from = inputs();
  const std::string data = shards(from, tokenizer(from));
  std::vector<Candidate> candidates;
  for (const std::string& arch : archs)
    candidates.push_back({arch, std::make_unique<Trainer>(options(arch, data)), {}, 0, 0});
  fmt::print("training   {} steps of {} x {} tokens, {} threads\n", steps, kBatch, kLength, threads());
  std::fflush(stdout);
  train(candidates);
  report(candidates);
  for (const Candidate& candidate : candidates)
    replace_directory(fs::path(out) / candidate.arch,
                      [&](const fs::path& directory) { candidate.trainer->save(directory); });
  fmt::print("\nFour samples of {}:\n\n", candidates.front().arch);
  for (const Text& written : samples_of(*candidates.front().trainer, 4)) fmt::print("{}\n\n", written.text);
  fmt::print("chart: {0}/loss.svg; generate more: furious generate {0}/{1} --prompt \"Mamba\"\n", out,
             candidates.front().arch);
}

}  // namespace

void add_demo(CLI::App& app) {
  auto demo = std::make_shared<DemoCommand>();
  CLI::App* command = app.add_subcommand("demo", "Train three small models side by side, from text to a comparison");
  command->add_option("text", demo->text,
                      "Text files as for `furious tokenize`; default: the dictionary of the package dict-gcide");
  command->add_option("--out", demo->out, "Folder for tokenizer, shards, models and chart")->capture_default_str();
  with_commas(command->add_option("--arch", demo->archs, "Architectures to train, with commas"))->capture_default_str();
  command->add_option("--steps", demo->steps, "Number of training steps")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--vocab", demo->vocabulary, "Vocabulary size of the tokenizer")
      ->check(CLI::Range(260, 1 << 16))
      ->capture_default_str();
  command->footer("Example: furious demo my-notes.txt --out demo");
  command->callback([demo] { demo->run(); });
}

}  // namespace furious::cli
