// `furious eval`, by running the binary.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/run.h"
#include "data/corpus.h"
#include "data/tokenize.h"
#include "eval/test_loss.h"
#include "furious/model.h"
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

TEST_F(EvalCommand, LossByPositionOfSeveralModels) {
  const std::string svg = folder.path("p.svg"), json = folder.path("p.json");
  expect_run(eval("--batch 2 --length 24 --by-position --svg " + svg + " --json " + json), 0,
             {"tokens before", "perplexity", "17 to 24", "chart: " + svg});
  const auto places = nlohmann::json::parse(testing::read_file(json)).at("by_position");
  ASSERT_EQ(places.size(), 6u);
  EXPECT_EQ(places.at(5).at("first"), 17);
  EXPECT_EQ(places.at(5).at("last"), 24);
  const Dataset dataset(data);
  BatchOptions options;
  options.batch = 2;
  options.length = 24;
  options.order = Order::once;
  const DatasetBatches batches(dataset, Split::test, options);
  std::vector<PositionLoss> expected = position_losses(24);
  test_loss(language_model, batches, batches.steps(), nullptr, {}, &expected);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(places.at(i).at("tokens"), expected[i].tokens);
    EXPECT_NEAR(places.at(i).at("loss").get<double>(), expected[i].mean(), 1e-5);
  }

  const std::string other = folder.path("other/model");
  fs::create_directories(other);
  save_model(other, LanguageModel(model_config("softmax", "tiny", 258), 4));
  expect_run(fmt::format("eval {0} {1} --data {2} --device cpu --by-position --length 24 --svg {3} --json {4}", model,
                         other, data, svg, json),
             0, {"== model ==", "== other/model ==", "tokens before", "9 to 16", "loss/byte  bits/byte"});
  const auto both = nlohmann::json::parse(testing::read_file(json)).at("models");
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both.at(1).at("model"), "other/model");
  EXPECT_EQ(both.at(1).at("by_position").size(), 6u);
  const std::string picture = testing::read_file(svg);
  EXPECT_NE(picture.find(">other/model<"), std::string::npos);
  EXPECT_NE(picture.find("Loss by position"), std::string::npos);
  expect_run(fmt::format("eval {} --by-position --task x.jsonl", model), 1, {"--by-position", "--data"});
}

TEST_F(EvalCommand, AMixture) {
  const std::string other = folder.path("other"), json = folder.path("m.json");
  tokenized("byte", other);
  const auto tokens = [&](const std::string& more) {
    expect_run(fmt::format("eval {} --device cpu --batch 4 --length 16 --json {} --data {}", model, json, more), 0,
               {"loss"});
    return nlohmann::json::parse(testing::read_file(json)).at("tokens").get<int64_t>();
  };
  const int64_t one = Dataset(data).tokens(Split::test).size() - 1;
  EXPECT_EQ(tokens(data), one);
  EXPECT_EQ(tokens(fmt::format("{}:0.7,{}:0.3", data, other)), 2 * one);
  EXPECT_EQ(tokens(fmt::format("{}:0.7,{}:0.3 --max-batches 2", data, other)), 2 * 4 * 16);
  expect_run(fmt::format("data show {}:0.7,{}:0.3", data, other), 1, {"one folder at a time"});
}

TEST_F(EvalCommand, Tasks) {
  const auto line = [](const std::string& context, const std::vector<std::string>& choices, int answer) {
    return nlohmann::json{{"context", context}, {"choices", choices}, {"answer", answer}}.dump() + "\n";
  };
  const std::string choose = folder.write("choose.jsonl", line("The sky is", {"blue", "a very long answer"}, 0) +
                                                              line("Two and two are", {"five", "four", "three"}, 1) +
                                                              "\n" + line("Grass is", {"red", "green"}, 1));
  const std::string complete = folder.write(
      "complete.jsonl.gz", testing::gzip_of(line("one two", {"three"}, 0) + line("four five", {"six"}, 0)));
  const std::string json = folder.path("t.json"), examples = folder.path("t.jsonl");
  const std::string tasks = fmt::format("--task {} --task {}", choose, complete);
  expect_run(fmt::format("eval {} --device cpu {} --json {} --out {}", model, tasks, json, examples), 0,
             {"acc_norm %", "acc_token %", "choose", "3", " ± ", "complete", "perplexity"});
  const auto written = nlohmann::json::parse(testing::read_file(json)).at("tasks");
  ASSERT_EQ(written.size(), 2u);
  EXPECT_EQ(written.at(0).at("task"), "choose");
  EXPECT_EQ(written.at(0).at("examples"), 3);
  EXPECT_FALSE(written.at(1).contains("acc_norm"));
  LoadOptions options;
  options.device = "cpu";
  const Model loaded = Model::load(model, options);
  double loss = 0;
  std::istringstream lines(testing::read_file(examples));
  int64_t count = 0;
  for (std::string text; std::getline(lines, text); ++count) {
    const auto example = nlohmann::json::parse(text);
    if (example.at("task") == "complete") {
      EXPECT_TRUE(example.at("greedy").is_boolean());
      loss -= example.at("choices").at(0).at("log_likelihood").get<double>() / 2;
    }
    if (count > 0) continue;
    double sum = 0;
    for (const TokenLogProbability& token : loaded.text_scores("The sky is blue")) sum += token.log_probability;
    for (const TokenLogProbability& token : loaded.text_scores("The sky is")) sum -= token.log_probability;
    EXPECT_NEAR(example.at("choices").at(0).at("log_likelihood").get<double>(), sum, 1e-3);
    EXPECT_EQ(example.at("choices").at(0).at("tokens"), 5);
    EXPECT_EQ(example.at("choices").at(0).at("bytes"), 4);
  }
  EXPECT_EQ(count, 5);
  EXPECT_NEAR(written.at(1).at("perplexity").at("value").get<double>(), std::exp(loss), 1e-3 * std::exp(loss));

  const std::string other = folder.path("other");
  fs::copy(model, other, fs::copy_options::recursive);
  expect_run(fmt::format("eval {} {} --device cpu {}", model, other, tasks), 0, {"model", "other"});
  expect_run(eval(tasks), 0, {"per byte of text", "acc_norm"});  // both at once
}

TEST_F(EvalCommand, BadTasks) {
  const std::string bad = folder.write("bad.jsonl", "{\"context\": \"a\", \"choices\": [\"b\", \"c\"]}\n");
  expect_run(fmt::format("eval {} --task {}", model, bad), 1,
             {"bad.jsonl", "line 1", "answer", "expected a line such"});
  expect_run(fmt::format("eval {} --task {}", model, folder.path("none.jsonl")), 1, {"none.jsonl"});
  expect_run(eval("--out x.jsonl"), 1, {"--out", "--task"});
  const std::string good =
      folder.write("good.jsonl", "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n");
  const std::string task = fmt::format(" --device cpu --task {}", good);
  expect_run("eval " + model + task + " --out " + folder.path("no/x.jsonl"), 1, {"no/x.jsonl"});
  for (const char* name : kTokenizerFiles) fs::remove(model + "/" + name);
  expect_run("eval " + model + task, 1, {"has no tokenizer beside it", "--tokenizer"});
  expect_run("eval " + model + "/model.safetensors" + task, 1, {"model.safetensors has no tokenizer", "--tokenizer"});
  expect_run("eval " + model + task + " --tokenizer byte", 0, {"good"});
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
  expect_run("eval " + model, 2, {"--data", "--task"});
  expect_run(eval("--packing loose"), 2, {"--packing"});
  expect_run(eval("--split validation"), 2, {"--split"});
  for (const char* bad : {"--length 0", "--batch 0", "--max-batches -1"})
    expect_run(eval(bad), 2, {std::string(bad).substr(0, std::string(bad).find(' '))});
}

}  // namespace
}  // namespace furious
