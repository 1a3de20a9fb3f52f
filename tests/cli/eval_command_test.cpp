// `furious eval`, by running the binary.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/run.h"
#include "data/corpus.h"
#include "data/tokenize.h"
#include "eval/test_loss.h"
#include "model/checkpoint.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_run;
using testing::Random;
using testing::TemporaryFolder;

class EvalCommand : public ::testing::Test {
 protected:
  EvalCommand() {
    fs::create_directories(model);
    save_model(model, language_model);
    save_tokenizer(model, *load_tokenizer("byte"));
    tokenized("byte", data);
  }
  void tokenized(const std::string& tokenizer, const std::string& out) const {
    Random random(1);
    TokenizeOptions options;
    options.inputs = {folder.write("in.jsonl", testing::json_lines(testing::random_documents(random, 40)))};
    options.tokenizer = tokenizer;
    options.out = out;
    options.test_fraction = 0.3;
    tokenize_corpus(options);
  }
  std::string eval(const std::string& more = "") const {
    const bool elsewhere = more.find("--device") != std::string::npos;
    return fmt::format("eval {} --data {} {} {}", model, data, more, elsewhere ? "" : "--device cpu");
  }

  TemporaryFolder folder;
  std::string model = folder.path("model"), data = folder.path("data");
  LanguageModel language_model{model_config("2mamba", "tiny", 258), 3};
};

TEST_F(EvalCommand, PrintsTheTestLoss) {
  const Dataset dataset(data);
  BatchOptions options;
  options.batch = 4;
  options.length = 64;
  options.order = Order::once;
  const DatasetBatches batches(dataset, Split::test, options);
  const TestLoss loss = test_loss(language_model, batches, batches.steps(), dataset.tokenizer().get());
  const std::string json = folder.path("loss.json");
  expect_run(eval("--batch 4 --length 64 --json " + json), 0,
             {fmt::format("{:.5f} per token", loss.mean()), fmt::format("{:.4f}", loss.perplexity()),
              fmt::format("{} tokens, {} bytes", loss.tokens, loss.text_bytes), "per byte of text", "tokens/s"});
  const auto written = nlohmann::json::parse(testing::read_file(json));
  EXPECT_NEAR(written.at("loss").get<double>(), loss.mean(), 1e-6);
  EXPECT_NEAR(written.at("bits_per_byte").get<double>(), loss.bits_per_byte(), 1e-6);
  EXPECT_EQ(written.at("tokens"), loss.tokens);
  EXPECT_EQ(written.at("split"), "test");
}

TEST_F(EvalCommand, PartsOfTheData) {
  const auto tokens = std::to_string(Dataset(data).tokens(Split::train).size() - 1);
  expect_run(eval("--split train"), 0, {tokens + " tokens", "x 512", "train, packed"});
  expect_run(eval("--max-batches 1 --batch 1 --length 10 --packing rows"), 0, {"1 of ", "test, rows"});
  expect_run(eval("--max-batches 2 --batch 2 --length 10"), 0, {"40 tokens", "2 of "});
  expect_run(eval("--packing isolated --threads 1"), 0, {"test, isolated"});
}

TEST_F(EvalCommand, Failures) {
  expect_run(fmt::format("eval {} --data {}", folder.path("none"), data), 1, {"none"});
  expect_run(fmt::format("eval {} --data {}", model, folder.path("none")), 1, {"none"});
  expect_run(eval("--device cuda:99"), 1, {"cuda:99"});
  expect_run(eval("--arch softmax"), 1, {"2mamba", "softmax"});
  expect_run(eval("--json " + folder.path("no/loss.json")), 1, {"no/loss.json"});
  data = folder.path("other");
  tokenized(folder.write("t.model", testing::small_model()), data);
  expect_run(eval(), 1, {"tokenized with fnv1a64:", "trained with byte"});
  for (const char* name : kTokenizerFiles) fs::remove(model + "/" + name);
  expect_run(eval(), 1, {"400 token ids", "258"});
}

TEST_F(EvalCommand, Usage) {
  expect_run("eval --help", 0, {"Example: furious eval", "--packing", "--max-batches"});
  expect_run("eval", 2, {"model"});
  expect_run("eval " + model, 2, {"--data"});
  expect_run(eval("--packing loose"), 2, {"--packing"});
  expect_run(eval("--split validation"), 2, {"--split"});
  for (const char* bad : {"--length 0", "--batch 0", "--max-batches -1"})
    expect_run(eval(bad), 2, {std::string(bad).substr(0, std::string(bad).find(' '))});
}

}  // namespace
}  // namespace furious
