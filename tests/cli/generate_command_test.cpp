// `furious generate`, by running the binary.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/letter_model.h"
#include "cli/run.h"
#include "data/corpus.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_run;
using testing::run;
using testing::RunResult;
using testing::TemporaryFolder;

class GenerateCommand : public ::testing::Test {
 protected:
  GenerateCommand() { testing::save_letter_model(model); }
  std::string generate(const std::string& more) const { return fmt::format("generate {} {}", model, more); }
  // What it writes, without the rates.
  std::string text_of(const std::string& more) const {
    const RunResult result = run(generate(more));
    EXPECT_EQ(result.code, 0) << result.output;
    return result.output.substr(0, result.output.rfind("prompt: "));
  }

  TemporaryFolder folder;
  std::string model = folder.path("model");
};

TEST_F(GenerateCommand, ContinuesAPrompt) {
  expect_run(generate("--prompt 'Once upon' --tokens 12 --top-k 40"), 0,
             {"prompt: 10 tokens", "new: 12 tokens", "tokens/s", "cache: ", "at 22 tokens"});
  const std::string text = text_of("--prompt 'Once upon' --tokens 12 --seed 4");
  EXPECT_EQ(text, text_of("--prompt 'Once upon' --tokens 12 --seed 4"));
  EXPECT_NE(text, text_of("--prompt 'Once upon' --tokens 12 --seed 5"));
  const std::string file = folder.write("prompt.txt", "Once upon");
  EXPECT_EQ(text, text_of("--prompt-file " + file + " --tokens 12 --seed 4"));
  EXPECT_EQ(text, text_of("- --tokens 12 --seed 4 <" + file));
  EXPECT_EQ(text_of("--prompt '' --tokens 0"), "\n");
  expect_run(generate("--prompt '' --tokens 3 --temperature 0 --threads 1"), 0, {"prompt: 1 tokens", "new: 3 tokens"});
}

TEST_F(GenerateCommand, NumbersOutOfRange) {
  for (const char* bad : {"--threads 99999", "--tokens -1", "--temperature -1", "--repetition-penalty 0"}) {
    const RunResult result = run(generate(fmt::format("--prompt x {}", bad)));
    EXPECT_EQ(result.code, 2) << result.output;
    EXPECT_LT(result.output.size(), 200u) << result.output;
  }
  // Reported before any text is printed.
  const RunResult result = run(generate("--prompt x --tokens 1 --save-state " + folder.path("no/state")));
  EXPECT_EQ(result.code, 1);
  EXPECT_TRUE(result.output.starts_with("furious: ")) << result.output;
}

TEST_F(GenerateCommand, SeveralSequencesAndJson) {
  const std::string json = folder.path("out.json");
  expect_run(generate("--prompt x --tokens 9 --sequences 2 --json " + json), 0,
             {"=== sequence 1: 9 tokens", "=== sequence 2"});
  const auto written = nlohmann::json::parse(testing::read_file(json));
  EXPECT_EQ(written.at("prompt_tokens"), 2);
  EXPECT_EQ(written.at("tokens"), 18);
  ASSERT_EQ(written.at("sequences").size(), 2u);
  EXPECT_EQ(written.at("sequences")[0].at("ending"), "tokens");
  EXPECT_EQ(text_of("--prompt x --tokens 9 --seed 124"),
            written.at("sequences")[1].at("text").get<std::string>() + "\n");
}

TEST_F(GenerateCommand, LogProbabilities) {
  const std::string json = folder.path("out.json"), options = "--prompt x --tokens 5 --temperature 0 ";
  const std::string text = text_of(options), with = text_of(options + "--logprobs 2 --json " + json);
  ASSERT_TRUE(with.starts_with(text)) << with;
  EXPECT_EQ(std::ranges::count(with.substr(text.size()), '\n'), 5);
  const auto written = nlohmann::json::parse(testing::read_file(json)).at("sequences")[0];
  ASSERT_EQ(written.at("log_probabilities").size(), 5u);
  const auto& first = written.at("log_probabilities")[0];
  EXPECT_LT(first.at("log_probability"), 0);
  ASSERT_EQ(first.at("most_probable").size(), 2u);
  EXPECT_EQ(first.at("most_probable")[0].at("id"), first.at("id"));  // the most probable is chosen
  EXPECT_EQ(first.at("most_probable")[0].at("log_probability"), first.at("log_probability"));
  EXPECT_TRUE(with.substr(text.size()).starts_with(fmt::format("{} \"{}\" ", first.at("id").get<int>(), text[0])))
      << with;
  expect_run(generate("--prompt x --logprobs 21"), 2, {"--logprobs", "20"});
}

TEST_F(GenerateCommand, StopsBeforeAStopString) {
  const std::string options = "--prompt abc --tokens 40 --temperature 0 ";
  const std::string text = text_of(options);
  const std::string stop = text.substr(6, 3);
  EXPECT_EQ(text_of(options + "--stop Never --stop " + stop), text.substr(0, text.find(stop)) + "\n");
}

TEST_F(GenerateCommand, ABareFileWithoutATokenizer) {
  const std::string bare = folder.path("bare/weights.safetensors");
  fs::create_directories(folder.path("bare"));
  fs::copy_file(model + "/model.safetensors", bare);
  fs::copy_file(model + "/config.json", folder.path("bare/config.json"));
  const std::string command = fmt::format("generate {} --prompt abc --tokens 2 --device cpu", bare);
  expect_run(command, 1, {"weights.safetensors", "has no tokenizer", "--tokenizer"});
  expect_run(command + " --tokenizer byte", 0, {});
}

// Its configuration and tokenizer are beside it, as with "./" before its name.
TEST_F(GenerateCommand, AFileOfTheWorkingDirectory) {
  const std::string task =
      folder.write("task.jsonl", R"({"context": "a", "choices": ["b", "c"], "answer": 0})" + std::string("\n"));
  const auto here = [&](const std::string& command) {
    const RunResult result = run(command + " --device cpu", fmt::format("cd '{}';", model));
    EXPECT_EQ(result.code, 0) << command << result.output;
  };
  here("generate model.safetensors --prompt abc --tokens 2");
  here("eval model.safetensors --task " + task);
  fs::remove(model + "/config.json");
  here("generate model.safetensors abc --tokens 2 --arch 2mamba --heads 4");
  here("eval model.safetensors --arch 2mamba --heads 4 --task " + task);
}

TEST_F(GenerateCommand, AFolderOfRunsIsNoModel) {
  const std::string runs = folder.path("runs");
  fs::create_directories(runs + "/first");
  fs::rename(model, runs + "/first/latest");
  for (const std::string& command : {"generate " + runs + " hi", "niah " + runs, "inspect " + runs})
    expect_run(command, 1, {"is a folder that contains runs", "such as " + runs + "/first"});
  fs::create_directories(folder.path("empty"));
  expect_run(fmt::format("generate {} hi", folder.path("empty")), 1, {"is not a model"});
}

// A state belongs to the ids of one tokenizer.
TEST_F(GenerateCommand, AStateOfAnotherTokenizerIsRefused) {
  const std::string state = folder.path("state");
  text_of("--prompt abc --tokens 2 --save-state " + state);
  const std::string other = folder.write("other/tokenizer.json", R"({"added_tokens": [{"id": 2, "content": "<s>",
      "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
      "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
      "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})");
  folder.write("other/tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "<s>"})");
  expect_run(generate(fmt::format("--load-state {} --tokenizer {} --tokens 2", state, other)), 1,
             {"another tokenizer"});
}

TEST_F(GenerateCommand, StateFiles) {
  const std::string state = folder.path("state");
  const std::string whole = text_of("--prompt 'some words' --tokens 20");
  const std::string first = text_of("--prompt 'some words' --tokens 8 --save-state " + state);
  const std::string second = text_of("--load-state " + state + " --tokens 12");
  EXPECT_EQ(testing::read_file(state).find("some words"), std::string::npos);
  EXPECT_EQ(whole, first.substr(0, first.size() - 1) + second);
  expect_run(generate("--load-state " + state + " --prompt ' more' --tokens 2"), 0, {"prompt: 5 tokens"});

  const std::string other = folder.path("other");
  fs::create_directories(other);
  save_model(other, LanguageModel(model_config("2mamba", "tiny", 258), 9));
  save_tokenizer(other, *load_tokenizer("byte"));
  expect_run(fmt::format("generate {} --load-state {}", other, state), 1, {"state", "another model"});
  expect_run(generate("--load-state " + model + "/model.safetensors"), 1, {"not a state file"});
  expect_run(generate("--load-state " + folder.path("none")), 1, {"none"});
  expect_run(generate("--prompt x --tokens 1 --save-state " + folder.path("no/such/folder")), 1, {"no/such/folder"});
}

TEST_F(GenerateCommand, Failures) {
  expect_run("generate " + folder.path("none") + " --prompt x", 1, {"furious: ", "none"});
  expect_run(generate("--prompt-file " + folder.path("none.txt")), 1, {"none.txt"});
  expect_run(generate("--prompt x --device cuda"), 1, {"cuda", "\"cpu\""});
  expect_run(generate("--prompt x --device gpu"), 2, {"gpu"});
  expect_run(generate("--prompt x --tokenizer bite"), 1, {"did you mean \"byte\""});
  expect_run(generate("--prompt x --arch softmax"), 1, {"2mamba", "softmax"});
  expect_run(generate("--prompt x --stop ''"), 1, {"stop string is empty"});
  const std::string large = folder.write("t.model", testing::small_model());
  expect_run(generate("--prompt x --tokenizer " + large), 1, {"400 token ids", "258"});
  for (const char* name : kTokenizerFiles) fs::remove(model + "/" + name);
  expect_run(generate("--prompt x"), 1, {"has no tokenizer beside it", "--tokenizer", "\"byte\""});
  expect_run(generate("--prompt x --tokens 1 --tokenizer byte"), 0, {});
}

// A bias so large that its token is always chosen whatever the penalties, and a banned token.
TEST_F(GenerateCommand, SamplingOptions) {
  const std::string options =
      "--prompt x --tokens 4 --temperature 1 --min-p 0.1 --frequency-penalty 0.5 "
      "--presence-penalty 0.5 --logit-bias ";
  expect_run(generate(options + "65=1000"), 0, {"AAAA"});
  expect_run(generate(options + "65=1000,66=2000"), 0, {"BBBB"});
  expect_run(generate(options + "65=1000,65=2000"), 1, {"two logit biases for token 65"});
  expect_run(generate(options + "99999=1"), 1, {"token 99999", "expected ids of 0 to"});
}

TEST_F(GenerateCommand, Usage) {
  expect_run("generate --help", 0, {"Example: furious generate", "--load-state", "eos", "--bos"});
  expect_run("generate", 2, {"model"});
  expect_run(generate("--prompt x --temp 1"), 2, {"unknown flag --temp; did you mean --temperature?"});
  expect_run(generate("--prompt x --max_new_tokens 9"), 2, {"did you mean --tokens?"});
  expect_run(generate(""), 2, {"--prompt", "--load-state"});
  expect_run(generate("--prompt x --prompt-file y"), 2, {"--prompt"});
  expect_run(generate("--prompt x y"), 2, {"--prompt"});
  expect_run(generate("--prompt x --top-p 0"), 2, {"--top-p", "0 is not above 0", "--temperature 0"});
  EXPECT_EQ(text_of("'some words' --tokens 5"), text_of("--prompt 'some words' --tokens 5"));
  for (const char* bad : {"--temperature -1", "--top-k -1", "--top-p 0", "--top-p 1.1", "--repetition-penalty 0",
                          "--sequences 0", "--tokens -1", "--seed x", "--threads -1", "--min-p 2", "--logit-bias 65",
                          "--logit-bias x=1", "--frequency-penalty x"})
    expect_run(generate(std::string("--prompt x ") + bad), 2, {std::string(bad).substr(0, std::string(bad).find(' '))});
}

}  // namespace
}  // namespace furious
