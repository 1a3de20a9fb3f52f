// `furious niah`, `furious recall` and `furious memory`, by running the binary.
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/run.h"
#include "data/corpus.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "decode/model_parts.h"
#include "model/checkpoint.h"
#include "paper/cache_memory.h"
#include "paper/needle.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_run;
using testing::read_file;
using testing::run;
using testing::TemporaryFolder;

class NiahCommand : public ::testing::Test {
 protected:
  NiahCommand() {
    fs::create_directories(model);
    save_model(model, LanguageModel(model_config("2mamba", "tiny", 258), 3));
    save_tokenizer(model, *load_tokenizer("byte"));
  }
  std::string niah(const std::string& more) const {
    return fmt::format("niah {} --device cpu --svg {} --json {} {}", model, folder.path("n.svg"), folder.path("n.json"),
                       more);
  }
  std::string question(const std::string& answer) const {
    return nlohmann::json{{"prompt", "The key is"}, {"answer", answer}, {"context_length", 10}, {"depth_percent", 50}}
               .dump() +
           "\n";
  }

  TemporaryFolder folder;
  std::string model = folder.path("model");
};

TEST_F(NiahCommand, GeneratedQuestions) {
  expect_run(
      fmt::format("niah --lengths 300 {} --questions 1 --depths 0 --device cpu --svg {}", model, folder.path("n.svg")),
      0, {"of 1 found"});
  expect_run(niah("--lengths 400,300 --depths 0,100 --questions 2"), 0,
             {"2mamba: ", " of 8 found", "300", "400", "100%", "characters", "All depths", "tokens (mean)",
              "heat maps:", "n.svg"});
  const auto json = nlohmann::json::parse(read_file(folder.path("n.json")));
  EXPECT_EQ(json.at("unit"), "characters");
  ASSERT_EQ(json.at("models").at(0).at("cells").size(), 4u);
  EXPECT_EQ(json.at("models").at(0).at("cells").at(1).at("length"), 400);
  EXPECT_EQ(json.at("models").at(0).at("cells").at(1).at("asked"), 2);
  EXPECT_EQ(json.at("models").at(0).at("asked"), 8);
  EXPECT_FALSE(json.contains("paper"));
  ASSERT_EQ(json.at("models").at(0).at("lengths").size(), 2u);
  const auto& length = json.at("models").at(0).at("lengths").at(0);
  EXPECT_EQ(length.at("length"), 300);
  EXPECT_EQ(length.at("asked"), 4);
  EXPECT_EQ(length.at("mean_tokens"), length.at("prompt_tokens").get<double>() / 4);
  EXPECT_GT(length.at("mean_tokens"), 100);
  EXPECT_LE(length.at("mean_tokens"), 301) << "bytes, and the mark at the beginning";
  EXPECT_NE(read_file(folder.path("n.svg")).find("class=\"heat\""), std::string::npos);
}

TEST_F(NiahCommand, QuestionsFromAFileAndSeveralModels) {
  const std::string data = folder.write("q.jsonl", question("12") + question("34") + question("56"));
  expect_run(niah("--data " + data), 0, {"2mamba", "of 3 found", "50%"});
  expect_run("niah --train --answers " + folder.path("a.jsonl"), 1, {"--train", "--answers"});
  expect_run(fmt::format("niah --train --answers {} --out {}", folder.path("a.jsonl"), folder.path("new/niah")), 1,
             {"--train", "--answers"});
  EXPECT_FALSE(fs::exists(folder.path("new"))) << "a start that was refused";
  expect_run("niah --help", 0, {"--train saves no answers"});
  fs::copy(model, folder.path("other"), fs::copy_options::recursive);
  expect_run(fmt::format("niah {} {} --data {} --device cpu --svg {}", model, folder.path("other"), data,
                         folder.path("n.svg")),
             0, {"model: ", "other: ", "heat maps:"});
  expect_run(niah("--lengths 300 --depths 50 --questions 1 --haystack " + folder.write("h.txt", "Hay is hay.\n")), 0,
             {"of 1 found"});
}

TEST_F(NiahCommand, RowsOfAFileAndThePapersProcedure) {
  std::string lines;
  for (int i = 0; i < 10; ++i)
    lines += nlohmann::json{{"prompt", "The key is"},
                            {"answer", i},
                            {"context_length", i % 2 == 0 ? 1024 : 32768},
                            {"depth_percent", i}}
                 .dump() +
             "\n";
  const std::string data = folder.write("q.jsonl.gz", testing::gzip_of(lines)), rows = folder.path("rows.txt");
  const auto used = [&](const std::string& more, const std::string& expected) {
    expect_run(niah(fmt::format("--data {} --save-rows {} {}", data, rows, more)), 0, {"heat maps:"});
    EXPECT_EQ(read_file(rows), expected) << more;
  };
  used("--below 32768 --questions 2", "0\n2\n");
  used("--shuffle 420 --questions 4", "5\n7\n0\n4\n");
  used("--indices " + folder.write("order.txt", "9\n0\n4\n"), "9\n0\n4\n");

  const std::string other = folder.path("other");
  fs::copy(model, other, fs::copy_options::recursive);
  expect_run(niah(fmt::format("{} --paper --data {} --save-rows {}", other, data, rows)), 0,
             {"model: ", "of 5 found", "All depths", "Mamba-2 (paper)", "94%", "Softmax (paper)", "2Mamba (paper)"});
  EXPECT_EQ(read_file(rows), "0\n4\n2\n6\n8\n");
  const auto first = nlohmann::json::parse(read_file(folder.path("n.json")));
  EXPECT_EQ(first.at("paper").at("models").at(2).at("proportions").at(4), 0.95);
  EXPECT_EQ(first.at("paper").at("tokens").at(4), 4497);
  EXPECT_EQ(first.at("models").at(1).at("model"), "other");
  EXPECT_EQ(first.at("models").at(1).at("lengths").at(0).at("mean_tokens"), 11) << "10 bytes and bos";
  const std::string svg = read_file(folder.path("n.svg"));
  EXPECT_NE(svg.find("tokens (mean) 11, model Mamba-2 (paper): 94%"), std::string::npos);

  // The same from the file of rows; and drawn again.
  expect_run(niah(fmt::format("{} --paper --data {} --indices {}", other, data, rows)), 0, {"of 5 found"});
  EXPECT_EQ(nlohmann::json::parse(read_file(folder.path("n.json"))), first);
  expect_run(fmt::format("niah --from {0}/n.json --svg {0}/again.svg --json {0}/again.json", folder.path("")), 0,
             {"2Mamba (paper)"});
  EXPECT_EQ(nlohmann::json::parse(read_file(folder.path("again.json"))), first);
  EXPECT_EQ(read_file(folder.path("again.svg")), svg);
  expect_run(niah(fmt::format("--paper --questions 2 --data {}", data)), 0, {"of 2 found"});
}

TEST_F(NiahCommand, LabelsDistinguishModels) {
  for (const char* arch : {"2mamba", "softmax", "mamba2"}) {
    fs::create_directories(folder.path(fmt::format("runs/{}", arch)));
    fs::copy(model, folder.path(fmt::format("runs/{}/seed-123", arch)), fs::copy_options::recursive);
  }
  const auto result = run(fmt::format(
      "niah {0}/2mamba/seed-123 {0}/softmax/seed-123 {0}/mamba2/seed-123 --lengths 300 --depths 0 --questions "
      "1 --device cpu --svg {1}",
      folder.path("runs"), folder.path("n.svg")));
  EXPECT_EQ(result.code, 0);
  for (const char* label : {"\n2mamba: ", "\nsoftmax: ", "\nmamba2: "})
    EXPECT_NE(result.output.find(label), std::string::npos) << result.output;
  EXPECT_EQ(result.output.find("seed-123"), std::string::npos) << result.output;
}

TEST_F(NiahCommand, ShowsAndSavesAnswers) {
  const std::string data = folder.write("q.jsonl", question("12") + question("34"));
  const std::string saved = folder.path("n-answers.jsonl");
  expect_run(niah("--data " + data), 0,
             {"2mamba: some answers", "expected", "12", "34", "wrong", "all answers: " + saved + "\n"});
  expect_run(niah("--data " + data), 0, {"all answers: " + saved + " (those of an earlier test were replaced"});
  LoadOptions options;
  options.device = "cpu";
  const Model loaded = Model::load(model, options);
  std::istringstream lines(read_file(saved));
  int64_t count = 0;
  for (std::string text; std::getline(lines, text); ++count) {
    const auto line = nlohmann::json::parse(text);
    const Needle needle{"The key is", count == 0 ? "12" : "34", 10, 50, count};
    EXPECT_EQ(line.at("model"), "2mamba");
    EXPECT_EQ(line.at("expected"), needle.answer);
    EXPECT_EQ(line.at("row"), count);
    EXPECT_EQ(line.at("depth_percent"), 50);
    EXPECT_EQ(line.at("prompt_tokens"), 11);
    const std::string answer = answer_of(loaded, needle).text;
    if (valid_utf8_prefix(answer) == answer.size()) {
      EXPECT_EQ(line.at("answer"), answer);  // otherwise with characters replaced
    }
    EXPECT_EQ(line.at("right"), answers(answer, needle.answer));
  }
  EXPECT_EQ(count, 2);
  expect_run(niah("--data " + data + " --answers " + folder.path("mine.jsonl")), 0, {"mine.jsonl"});
  EXPECT_EQ(read_file(folder.path("mine.jsonl")), read_file(saved));
}

TEST_F(NiahCommand, WeightsWithoutAConfig) {
  const std::string asked = " --lengths 300 --depths 0 --questions 1";
  fs::remove(model + "/config.json");
  expect_run(niah("--arch 2mmba" + asked), 1, {"2mmba", "did you mean \"2mamba\""});
  expect_run(niah("--arch 2mamba,softmax" + asked), 1, {"1 models", "2 architectures"});
  expect_run(niah("--arch 2mamba --heads 4" + asked), 0, {"2mamba: ", "of 1 found"});
  expect_run(niah("--arch 2mamba --heads 2" + asked), 1, {"4 heads, not 2"});
}

// A model that answers with a letter after bos, and with something else after eos.
TEST_F(NiahCommand, TextsBeginWithBosOnRequest) {
  const auto tokenizer = load_tokenizer("byte");
  Needle needle{"The key is", "x", 10, 50};
  const ModelConfig config = model_config("2mamba", "tiny", 258);
  for (uint64_t seed = 70;; ++seed) {  // about one in a hundred is such a model
    ASSERT_LT(seed, 300u);
    const LanguageModel candidate(config, seed);
    const auto says = [&](bool bos) {
      return answer_of(Model(std::make_shared<Model::Parts>(candidate, tokenizer, bos)), needle).text;
    };
    const std::string text = says(true);
    if (text.empty() || std::isalnum(static_cast<unsigned char>(text[0])) == 0) continue;
    needle.answer = text.substr(0, 1);
    if (!answers(text, needle.answer) || answers(says(false), needle.answer)) continue;
    save_model(model, candidate);
    break;
  }
  const std::string data = folder.write("q.jsonl", question(needle.answer));
  expect_run(niah("--data " + data), 0, {"0 of 1 found"});
  expect_run(niah("--bos --data " + data), 0, {"1 of 1 found"});
  expect_run("niah --train --bos --out " + folder.path("t"), 1, {"--bos"});
}

TEST_F(NiahCommand, Failures) {
  expect_run("niah", 1, {"no model", "--train"});
  expect_run(fmt::format("niah {}", folder.path("none")), 1, {"none"});
  expect_run(niah("--lengths 20"), 1, {"length of 20"});
  expect_run(niah("--data " + folder.path("none.jsonl")), 1, {"none.jsonl"});
  expect_run(niah("--data " + folder.write("bad.jsonl", question("1") + "{\"prom")), 1,
             {"bad.jsonl", "line 2", "damaged"});
  expect_run(niah("--lengths 300 --data " + folder.write("q.jsonl", question("1"))), 1, {"--data", "--lengths"});
  expect_run(niah("--paper"), 1, {"--paper", "simple_needle_in_a_hay_stack", "--data"});
  expect_run(niah("--below 5"), 1, {"--below", "--data"});
  expect_run(
      niah(fmt::format("--indices {} --data {}", folder.write("rows", "1\n"), folder.write("q.jsonl", question("1")))),
      1, {"row 1", "has 1"});
  expect_run(niah("--indices x --shuffle 1"), 2, {"--shuffle"});
  expect_run(niah("--haystack " + folder.write("empty.txt", "\n")), 1, {"is empty"});
  expect_run(niah("--train"), 1, {"--train makes its own"});
  expect_run("niah --train --arch 2mamba,mambo2 --out " + folder.path("t"), 1, {"mambo2", "did you mean \"mamba2\""});
  expect_run(niah("--device cuda:99"), 1, {"cuda:99"});
  expect_run(niah("--from nowhere.json"), 1, {"--from asks no model"});
  expect_run("niah --from nowhere.json", 1, {"nowhere.json"});
  expect_run("niah --from " + folder.write("bad.json", "{\"unit\": \"needles\"}"), 1, {"bad.json", "models"});
  for (const char* name : kTokenizerFiles) fs::remove(model + "/" + name);
  expect_run(niah(""), 1, {"tokenizer"});
  for (const char* bad : {"--depths 101", "--lengths 0", "--questions 0"})
    expect_run(niah(bad), 2, {std::string(bad).substr(0, std::string(bad).find(' '))});
  expect_run("niah --help", 0, {"Example: furious niah", "--haystack", "context_length"});
}

const std::string kTiny = " --steps 3 --hidden 16 --batch 2 --length 20 --device cpu";

TEST(NiahTrain, ReusesATrainedModel) {
  const TemporaryFolder folder;
  const std::string command =
      "niah --train --arch softmax,2mamba --lengths 2,8 --depths 0,100 --questions 5 --out " + folder.path("t") + kTiny;
  expect_run(command, 0, {"softmax", "2mamba", "3 steps", "of 20 found", "needles in the haystack", "niah.svg"});
  const std::string first = read_file(folder.path("t/niah.json"));
  expect_run(command, 0, {"softmax    is already trained", "2mamba     is already trained", "of 20 found"});
  EXPECT_EQ(read_file(folder.path("t/niah.json")), first);
  expect_run(fmt::format("niah --from {0}/t/niah.json --svg {0}/again.svg --json {0}/again.json", folder.path("")), 0,
             {"softmax", "of 20 found"});
  EXPECT_EQ(read_file(folder.path("again.json")), first);
  EXPECT_EQ(read_file(folder.path("again.svg")), read_file(folder.path("t/niah.svg")));
  EXPECT_EQ(nlohmann::json::parse(first).at("models").size(), 2u);
  expect_run(command + " --layers 1", 1, {"--layers 2, not 1"});
  expect_run(command + " --lengths 400", 1, {"400 pairs"});
}

TEST(NiahTrain, ResumesAfterASignal) {
  const TemporaryFolder folder;
  const std::string out = folder.path("t"), log = out + "/2mamba/log.jsonl";
  const auto command = [&](int steps) {
    return std::vector<std::string>{
        "niah",        "--train", "--arch",    "2mamba", "--out",    out,  "--steps",  std::to_string(steps),
        "--hidden",    "16",      "--batch",   "2",      "--length", "20", "--device", "cpu",
        "--questions", "5",       "--lengths", "4"};
  };
  const auto logged = [&] {
    if (!fs::exists(log)) return int64_t{0};
    const std::string lines = read_file(log);
    return static_cast<int64_t>(std::count(lines.begin(), lines.end(), '\n'));
  };
  const int status = testing::run_and_signal(command(1000000), SIGINT, [&] { return logged() >= 5; });
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(fs::exists(out + "/niah.json"));
  const int64_t before = logged();
  std::string again;
  for (const std::string& word : command(static_cast<int>(before) + 2)) again += word + " ";
  expect_run(again, 0, {fmt::format("{} steps", before + 2), "of 25 found"});
  EXPECT_EQ(logged(), before + 2);
}

TEST(RecallCommand, OneHeatMapPerArchitectureOneRowPerDimension) {
  const TemporaryFolder folder;
  const std::string command =
      "recall --arch 2mamba,linear --dims 8,16 --pairs 2,4 --rows 3 --out " + folder.path("r") + kTiny;
  expect_run(command, 0, {"2mamba-8", "linear-16", "d 8 (", "d 16 (", "pairs", "/6", "/12", "recall.svg"});
  const auto json = nlohmann::json::parse(read_file(folder.path("r/recall.json")));
  ASSERT_EQ(json.at("cells").size(), 8u);
  EXPECT_EQ(json.at("cells").at(1).at("asked"), 12);
  EXPECT_EQ(json.at("cells").at(1).at("head_dim"), 8);
  EXPECT_EQ(json.at("cells").at(7).at("arch"), "linear");
  expect_run(command, 0, {"is already trained"});
  expect_run("recall --arch sofmax --out " + folder.path("x"), 1, {"sofmax", "did you mean \"softmax\""});
  expect_run("recall --dims 24 --out " + folder.path("x"), 1, {"width of 64", "24"});
  expect_run("recall --pairs 4,500 --out " + folder.path("x"), 1, {"500 pairs", "vocabulary"});
  EXPECT_FALSE(fs::exists(folder.path("x/softmax-16")));
  expect_run("recall --dims 4", 2, {"--dims"});
}

TEST(MemoryCommand, TableChartAndJson) {
  const TemporaryFolder folder;
  const std::string svg = folder.path("m.svg"), json = folder.path("m.json");
  expect_run(fmt::format("memory --dim 16 --tokens 300 --device cpu --svg {} --json {}", svg, json), 0,
             {"softmax", "linear", "2mamba, lazy fold", "(formula)", "break-even", "74 by the formula", "chart:"});
  const CacheMemory memory = measure_cache_memory(16, 300);
  const auto written = nlohmann::json::parse(read_file(json));
  EXPECT_EQ(written.at("break_even_formula"), 74);
  EXPECT_EQ(written.at("break_even_measured"), memory.break_even());
  for (size_t i = 0; i < memory.curves.size(); ++i) {
    EXPECT_EQ(written.at("curves").at(i).at("name"), memory.curves[i].name);
    for (const auto& point : written.at("curves").at(i).at("points")) {
      const int64_t tokens = point.at("tokens");
      EXPECT_EQ(point.at("measured_bytes"), memory.curves[i].measured[tokens - 1]);
      EXPECT_EQ(point.at("formula_bytes"), memory.curves[i].formula[tokens - 1]);
    }
  }
  EXPECT_NE(read_file(svg).find(fmt::format("break-even: {} tokens", memory.break_even())), std::string::npos);
  expect_run("memory --dim 16 --tokens 2 --device cpu --svg \"\"", 0, {"not within 2 tokens"});
  expect_run("memory --dim 4", 2, {"--dim"});
  expect_run("memory --tokens 0", 2, {"--tokens"});
  expect_run("memory --tokens 2 --json " + folder.path("no/m.json"), 1, {"no/m.json"});
}

}  // namespace
}  // namespace furious
