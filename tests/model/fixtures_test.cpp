// Checkpoints with the logits that other programs compute from them, in a directory that FURIOUS_FIXTURES names. Each
// folder is a model as its program saves it, with ids.json ({"sequences": [[token, …], …]}) and logits.safetensors
// (logits.N, f32 [tokens, vocabulary], of sequence N; grouped_norm.logits.N where they are those of mamba_ssm).
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "cuda.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"
#include "furious/train.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;

constexpr double kTolerance = 1e-4;

Tensor expected_logits(const SafetensorsReader& reader, size_t i) {
  const std::string name = fmt::format("logits.{}", i), grouped = "grouped_norm." + name;
  return reader.load(reader.find(grouped) ? grouped : name);
}

// Prefill of half of the tokens, then one by one, from memory that was read back from a file's contents on the way.
std::vector<double> decoded(const LanguageModel& model, const std::vector<int32_t>& tokens, std::vector<double>& rows) {
  Decoder decoder(model, 2);
  int32_t slot = decoder.start();
  const size_t half = tokens.size() / 2;
  decoder.read(slot, std::span(tokens).first(half));
  for (size_t t = half; t < tokens.size(); ++t) {
    if (t == half + 1) {
      const SlotContents contents = decoder.contents(slot);
      decoder.stop(slot);
      slot = decoder.start();
      decoder.restore(slot, contents);
    }
    decoder.read_token({&slot, 1}, int_tensor_of({tokens[t]}, {1, 1}));
    const std::vector<double> row = to_doubles(to_device(decoder.logits(slot), Device{}));
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

std::vector<int64_t> best_tokens(const Tensor& logits) {  // [tokens, vocabulary]
  std::vector<int64_t> best;
  for (int64_t t = 0; t < logits.size(0); ++t) {
    const float* const row = logits.data<float>() + t * logits.size(1);
    best.push_back(std::max_element(row, row + logits.size(1)) - row);
  }
  return best;
}

// The most probable token again and again, after half of the tokens.
std::vector<int32_t> written(const LanguageModel& model, const std::vector<int32_t>& tokens, int count) {
  Decoder decoder(model, 1);
  const int32_t slot = decoder.start();
  decoder.read(slot, std::span(tokens).first((tokens.size() + 1) / 2));
  decoder.set_sampling(slot, {.temperature = 0, .top_p = 1});
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(decoder.step({&slot, 1}).wait()[0]);
  return ids;
}

// The same from full passes over ever longer texts.
std::vector<int32_t> chosen(const LanguageModel& model, const std::vector<int32_t>& tokens, int count) {
  std::vector<int32_t> text(tokens.begin(), tokens.begin() + static_cast<int64_t>((tokens.size() + 1) / 2)), ids;
  for (int i = 0; i < count; ++i) {
    const auto length = static_cast<int64_t>(text.size());
    ids.push_back(
        static_cast<int32_t>(best_tokens(model.logits(int_tensor_of(text, {1, length})).select(0, 0)).back()));
    text.push_back(ids.back());
  }
  return ids;
}

struct Fixture {
  fs::path folder;
  std::vector<std::vector<int32_t>> sequences;
  std::vector<Tensor> expected;

  explicit Fixture(const fs::path& path) : folder(path) {
    const SafetensorsReader reader(folder / "logits.safetensors");
    const auto all = nlohmann::json::parse(read_text(folder / "ids.json"));
    for (const auto& ids : all.at("sequences")) {
      expected.push_back(expected_logits(reader, sequences.size()));
      sequences.push_back(ids.get<std::vector<int32_t>>());
    }
  }
};

constexpr int kWritten = 12;

// Returns the largest relative error of a sequence's logits.
double check_logits(const Fixture& fixture, const LanguageModel& model, double tolerance, bool same_best) {
  double worst = 0;
  for (size_t i = 0; i < fixture.sequences.size(); ++i) {
    const std::vector<int32_t>& tokens = fixture.sequences[i];
    const auto length = static_cast<int64_t>(tokens.size());
    const Tensor logits = model.logits(int_tensor_of(tokens, {1, length})).select(0, 0);
    const RelativeError error = relative_error(logits, fixture.expected[i]);
    EXPECT_LE(error.all, tolerance) << "sequence " << i;
    EXPECT_LE(error.worst, 3 * tolerance) << "sequence " << i << ", token " << error.row;
    worst = std::max(worst, error.all);
    if (same_best) {
      EXPECT_EQ(best_tokens(logits), best_tokens(fixture.expected[i])) << "sequence " << i;
    }
    std::vector<double> rows;
    decoded(model, tokens, rows);
    const Tensor later = logits.slice(0, length / 2, length - length / 2);
    EXPECT_LE(relative_error(rows, to_doubles(later)), tolerance) << "decode, sequence " << i;
  }
  return worst;
}

void check_on_cpu(const Fixture& fixture) {
  for (const WeightDType weights : {WeightDType::f32, WeightDType::as_stored}) {
    const LanguageModel model = load_model(fixture.folder, "", {}, 0, {}, weights);
    const double worst = check_logits(fixture, model, kTolerance, true);
    EXPECT_EQ(written(model, fixture.sequences[0], kWritten), chosen(model, fixture.sequences[0], kWritten));
    fmt::print("{}: {} parameters, relative error {:.1e}\n", fixture.folder.filename().string(),
               parameter_count(model.config()), worst);
  }
  TemporaryDirectory copy;  // what we save of it is the same model
  const LanguageModel model = load_model(fixture.folder);
  save_model(copy.path(), model);
  EXPECT_EQ(load_model(copy.path()).config(), model.config());
}

void check_on_gpu(const Fixture& fixture) {
  const LanguageModel here = load_model(fixture.folder);
  LanguageModel exact = load_model(fixture.folder, "", kGpu);
  exact.set_compute(compute_in(DType::f32, kGpu));
  const double worst = check_logits(fixture, exact, 5 * kTolerance, true);
  for (const std::vector<int32_t>& tokens : fixture.sequences)
    EXPECT_EQ(written(exact, tokens, kWritten), written(here, tokens, kWritten));
  LanguageModel rounded = load_model(fixture.folder, "", kGpu, 0, {}, WeightDType::bf16);
  rounded.set_compute(compute_in(DType::bf16, kGpu));
  const double worst_rounded = check_logits(fixture, rounded, 2e-2, false);
  EXPECT_EQ(written(rounded, fixture.sequences[0], kWritten).size(), static_cast<size_t>(kWritten));
  fmt::print("{}: relative error {:.1e} in f32, {:.1e} in bf16\n", fixture.folder.filename().string(), worst,
             worst_rounded);
}

// Six steps on one of its sequences.
void check_training(const Fixture& fixture) {
  TrainOptions options;
  options.init = fixture.folder;
  options.device = "cpu";
  options.batch = 1;
  options.length = static_cast<int64_t>(fixture.sequences[0].size());
  options.steps = 6;
  options.warmup = 0;
  options.lr = 3e-3;
  Trainer trainer(options);
  const TokenBatch batch{1, options.length, fixture.sequences[0]};
  const double before = trainer.evaluate(batch);
  for (int64_t i = 0; i < options.steps; ++i) trainer.step(batch);
  EXPECT_LT(trainer.evaluate(batch), 0.95 * before);
}

// A prompt is what upstream's tokenizer makes of a text, with the tokens that it adds.
void check_prompts(const fs::path& folder) {
  LoadOptions options;
  options.device = "cpu";
  const Model model = Model::load(folder, options);
  for (const auto& one : nlohmann::json::parse(read_text(folder / "tokens.json"))) {
    const auto text = one["text"].get<std::string>();
    auto ids = one["ids_with_special"].get<std::vector<int32_t>>();
    if (ids.empty() && text.empty()) ids = {model.eos()};  // something to go on from
    EXPECT_EQ(model.prompt(text), ids) << text;
  }
}

// Calls f for each folder that holds such a file.
void for_each_folder(const char* file, auto&& f) {
  const char* const root = std::getenv("FURIOUS_FIXTURES");
  if (root == nullptr) GTEST_SKIP() << "FURIOUS_FIXTURES names no directory of checkpoints";
  int checked = 0;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (!fs::exists(entry.path() / file) || !fs::exists(entry.path() / "ids.json")) continue;
    SCOPED_TRACE(entry.path().filename().string());
    try {
      f(entry.path());
      ++checked;
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  EXPECT_GT(checked, 0);
}

TEST(Fixtures, LogitsAreThoseOfOtherPrograms) {
  for_each_folder("logits.safetensors", [](const fs::path& folder) { check_on_cpu(Fixture(folder)); });
}

TEST(Fixtures, TrainFurther) {
  for_each_folder("logits.safetensors", [](const fs::path& folder) { check_training(Fixture(folder)); });
}

TEST(Fixtures, PromptsAreThoseOfTheirTokenizers) {
  for_each_folder("tokens.json", check_prompts);
}

TEST(FixturesCuda, LogitsAreThoseOfOtherPrograms) {
  SKIP_WITHOUT_GPU();
  for_each_folder("logits.safetensors", [](const fs::path& folder) { check_on_gpu(Fixture(folder)); });
}

}  // namespace
}  // namespace furious
