#include "paper/demo.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/parallel.h"
#include "data/corpus_lines.h"
#include "data/tokenize.h"
#include "decode/model_parts.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

// Debian's dict-gcide, gzip under another name: the dictionary of Webster, 1913, and its supplements.
constexpr const char* kDictionary = "/usr/share/dictd/gcide.dict.dz";

// A link to the dictionary with a name that the reader knows as compressed text.
std::string dictionary_link(const std::string& out) {
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
  return link.string();
}

std::string tokenizer_path(const std::string& out) {
  return out + "/tokenizer.model";
}

std::string shards_path(const std::string& out) {
  return out + "/shards";
}

}  // namespace

Demo::Demo(DemoOptions options) : options_(std::move(options)), inputs_(options_.text) {
  if (inputs_.empty()) inputs_ = {dictionary_link(options_.out)};
}

int64_t Demo::train_tokenizer() {
  ReaderOptions reader;
  CorpusLines lines(inputs_, reader);
  TokenizerTraining training;
  training.vocabulary_size = options_.vocabulary;
  training.sentences = 50000;
  training.threads = threads();
  fs::create_directories(options_.out);
  write_text(tokenizer_path(options_.out), train_sentencepiece(lines, training));
  return lines.bytes();
}

Manifest Demo::tokenize(const std::function<bool()>& stop) {
  TokenizeOptions options;
  options.inputs = inputs_;
  options.tokenizer = tokenizer_path(options_.out);
  options.out = shards_path(options_.out);
  options.reader.split_on_blank_line = true;
  options.test_fraction = 0.01;
  std::error_code ignored;
  fs::remove_all(options.out, ignored);
  return tokenize_corpus(options, {stop, {}}).manifest;
}

void Demo::make_models() {
  TrainOptions options;
  options.data = shards_path(options_.out);
  options.batch = kBatch;
  options.length = kLength;
  options.steps = options_.steps;
  options.lr = 4e-3;
  options.warmup = std::min<int64_t>(20, options_.steps / 4);
  options.eval_batches = 8;
  for (const std::string& arch : options_.archs) {
    options.arch = arch;
    models_.push_back({arch, std::make_unique<Training>(options), {}, 0, 0});
  }
}

void Demo::step() {
  for (Model& model : models_) {
    const TrainStep done = model.trainer->step();
    model.losses.push_back(done.loss);
    model.seconds += static_cast<double>(kBatch * kLength) / done.tokens_per_second;
  }
}

void Demo::evaluate() {
  for (Model& model : models_) model.test_loss = model.trainer->test_loss().value_or(NAN);
}

void Demo::save() {
  write_text(options_.out + "/loss.svg", to_svg(demo_chart(*this)));
  for (const Model& model : models_)
    replace_directory(fs::path(options_.out) / model.arch,
                      [&](const fs::path& directory) { model.trainer->save(directory); });
}

std::vector<Text> Demo::samples(int count) const {
  const Training& trainer = *models_.front().trainer;
  const auto tokenizer = trainer.data().dataset->tokenizer();
  Session session(furious::Model(std::make_shared<furious::Model::Parts>(trainer.model(), tokenizer, false)), count);
  session.read("");
  WriteOptions options;
  options.tokens = 80;
  options.sampling.temperature = 0.7;
  return session.write(options);
}

Table demo_table(const Demo& demo) {
  Table table{{"model", "parameters", "test loss", "tokens/s", "KB at 1k", "KB at 8k", "KB at 64k"}, {}};
  for (const Demo::Model& model : demo.models()) {
    const ModelConfig& config = model.trainer->model().config();
    const auto kilobytes = [&](int64_t length) {
      return fmt::format("{:.0f}", static_cast<double>(cache_numbers(config, length) * 4) / 1e3);
    };
    const auto tokens = static_cast<double>(Demo::kBatch * Demo::kLength * static_cast<int64_t>(model.losses.size()));
    table.rows.push_back({model.arch, fmt::format("{:.2f}M", static_cast<double>(parameter_count(config)) / 1e6),
                          fmt::format("{:.3f}", model.test_loss), fmt::format("{:.0f}", tokens / model.seconds),
                          kilobytes(1 << 10), kilobytes(8 << 10), kilobytes(64 << 10)});
  }
  return table;
}

Chart demo_chart(const Demo& demo) {
  Chart chart;
  chart.title = "Training loss, side by side";
  chart.x_label = "step";
  chart.y_label = "loss";
  for (const Demo::Model& model : demo.models()) {
    Series series{model.arch, {}, smooth(model.losses, 8)};
    for (size_t i = 0; i < series.y.size(); ++i) series.x.push_back(static_cast<double>(i + 1));
    chart.series.push_back(std::move(series));
  }
  return chart;
}

}  // namespace furious
