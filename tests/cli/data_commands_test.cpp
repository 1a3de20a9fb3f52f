// `furious tokenize` and `furious tokenizer`, by running the binary.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/run.h"
#include "data/corpus.h"
#include "data/dataset.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_run;
using testing::json_lines;
using testing::Random;
using testing::random_documents;
using testing::read_folder;
using testing::run;
using testing::run_and_signal;
using testing::RunResult;
using testing::small_model;
using testing::TemporaryFolder;
using testing::zstd_of;

class DataCommands : public ::testing::Test {
 protected:
  std::string tokenize(const std::string& input, const std::string& out, const std::string& more = "") const {
    return fmt::format("tokenize {} --tokenizer byte --out {} {}", input, folder.path(out), more);
  }
  TemporaryFolder folder;
};

TEST_F(DataCommands, HelpHasAnExample) {
  for (const char* command : {"tokenize", "tokenizer", "tokenizer train", "tokenizer show"})
    expect_run(std::string(command) + " --help", 0, {"Example: furious tokeni"});
  for (const char* command : {"data", "data show"})
    expect_run(std::string(command) + " --help", 0, {"Example: furious data show"});
}

TEST_F(DataCommands, UsageErrors) {
  expect_run("tokenize", 2, {"input"});
  expect_run(tokenize("x.txt", "out", "--test-fraction 2"), 2, {"--test-fraction"});
  expect_run(tokenize("x.txt", "out", "--colour red"), 2, {"--colour"});
  expect_run("tokenise x.txt", 2, {"unknown command \"tokenise\"", "did you mean \"tokenize\""});
  expect_run("tokenizer trian", 2, {"did you mean \"train\""});
}

TEST_F(DataCommands, FromTextToShards) {
  Random random(1);
  const std::string text = folder.write("in/a.jsonl.zst", zstd_of(json_lines(random_documents(random, 300))));
  const std::string model = folder.path("t.model");
  expect_run(fmt::format("tokenizer train {} --vocab 400 --out {}", text, model), 0, {"vocabulary of 400"});
  expect_run(fmt::format("tokenizer show {} --text 'the snake'", model), 0,
             {"sentencepiece", "400", "fnv1a64:", "decoded: the snake"});
  const std::string out = folder.path("data");
  const std::string command =
      fmt::format("tokenize {} --tokenizer {} --out {} --test-fraction 0.1", folder.path("in"), model, out);
  expect_run(command, 0, {"train", "test", "documents", "MB/s"});
  const Dataset data(out);
  EXPECT_EQ(data.damage(), std::vector<std::string>());
  EXPECT_EQ(data.tokens(Split::train).documents() + data.tokens(Split::test).documents(), 300);
  EXPECT_GT(data.tokens(Split::test).documents(), 5);
  expect_run(command, 0, {"already complete"});
  expect_run(command + " --seed 9", 1, {"--seed was 123, now 9"});
}

TEST_F(DataCommands, BadInput) {
  expect_run(tokenize(folder.path("none.txt"), "out"), 1, {"furious: ", "none.txt", "does not exist"});
  expect_run(tokenize(folder.write("a.pdf", "x"), "out"), 1, {"a.pdf", "unknown file type"});
  expect_run(tokenize(folder.write("empty.txt", ""), "out"), 1, {"no text"});
  const std::string jsonl = folder.write("a.jsonl", "{\"text\": \"x\"}\n");
  expect_run(tokenize(jsonl, "out", "--field txt"), 1, {"a.jsonl", "line 1", "did you mean \"text\""});
  const std::string zstd = zstd_of(json_lines({std::string(1000, 'x')}));
  expect_run(tokenize(folder.write("cut.jsonl.zst", zstd.substr(0, zstd.size() - 4)), "out"), 1, {"truncated"});
  expect_run(fmt::format("tokenize {} --tokenizer {} --out {}", jsonl, jsonl, folder.path("out")), 1,
             {"not a SentencePiece model"});
  expect_run(tokenize(jsonl, "a.jsonl"), 1, {"cannot create folder"});
  expect_run("tokenizer show bite", 1, {"did you mean \"byte\""});
  expect_run(tokenize(folder.write("bad.txt", "a\xFF"), "replaced", "--test-fraction 0"), 0, {"1 broken UTF-8"});
  expect_run(tokenize(jsonl, "out", "--format yaml"), 2, {"--format", "jsonl"});
}

TEST_F(DataCommands, ResumesAfterKillOrStopWithTheSameBytes) {
  Random random(2);
  const std::vector<std::string> documents = random_documents(random, 1000);
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += json_lines(documents);
  const std::string input = folder.write("in.jsonl", lines);
  const std::string options = "--shard-tokens 100000 --test-fraction 0.1 --threads 1";
  ASSERT_EQ(run(tokenize(input, "whole", options)).code, 0);
  const auto expected = read_folder(folder.path("whole"));
  for (const int signal : {SIGKILL, SIGTERM, SIGINT}) {
    const std::string out = fmt::format("signal-{}", signal);
    const int status = run_and_signal({"tokenize", input, "--tokenizer", "byte", "--out", folder.path(out),
                                       "--shard-tokens", "100000", "--test-fraction", "0.1", "--threads", "1"},
                                      signal, [&] { return fs::exists(folder.path(out + "/progress.json")); });
    if (signal == SIGKILL) {
      ASSERT_TRUE(WIFSIGNALED(status)) << "it was done before it was killed";
    } else {
      ASSERT_TRUE(WIFEXITED(status));
      EXPECT_EQ(WEXITSTATUS(status), 1);
    }
    EXPECT_TRUE(fs::exists(folder.path(out + "/progress.json")));
    ASSERT_EQ(run(tokenize(input, out, options)).code, 0);
    EXPECT_TRUE(read_folder(folder.path(out)) == expected) << "signal " << signal;
  }
}

// The commands of the README on one text file.
TEST_F(DataCommands, ASingleTextFileIsEnough) {
  Random random(4);
  std::string text;
  for (const std::string& document : random_documents(random, 400)) text += document + "\n\n";
  const std::string input = folder.write("book.txt", text);
  const std::string model = folder.path("t.model"), shards = folder.path("shards"), out = folder.path("run");
  expect_run(fmt::format("tokenizer train {} --vocab 400 --out {}", input, model), 0, {"vocabulary of 400"});
  expect_run(fmt::format("tokenize {} --tokenizer {} --out {}", input, model, shards), 0,
             {"the test split is the end of", "book.txt"});
  const Dataset data(shards);
  EXPECT_EQ(data.tokens(Split::train).documents(), 1);
  EXPECT_EQ(data.tokens(Split::test).documents(), 1);
  const auto bytes = static_cast<double>(text.size());
  EXPECT_NEAR(static_cast<double>(data.tokens(Split::test).text_bytes()), 0.1 * bytes, 0.05 * bytes);
  EXPECT_EQ(data.tokens(Split::train).text_bytes() + data.tokens(Split::test).text_bytes(),
            static_cast<int64_t>(text.size()));
  expect_run(fmt::format("train --data {} --out {} --hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 2 "
                         "--length 32 --steps 2 --device cpu",
                         shards, out),
             0, {"done after 2 steps"});
  expect_run(fmt::format("eval {} --data {} --device cpu", out, shards), 0, {"per token"});
  expect_run(fmt::format("tokenize {} --tokenizer {} --out {}", input, model, shards), 0, {"already complete"});
  expect_run(fmt::format("tokenize {} --tokenizer {} --out {} --test-fraction 0.3", input, model, shards), 1,
             {"--test-fraction was 0.001, now 0.3"});
}

TEST_F(DataCommands, NoSplitIsEmptyWithoutAnError) {
  const std::string lines = folder.write("a.jsonl", json_lines({"one", "two", "three"}));
  expect_run(tokenize(lines, "out"), 1, {"of 3 documents none belongs to the test split", "use --test-fraction 0.5"});
  const std::string one = folder.write("one.jsonl", json_lines({"one"}));
  const RunResult same = run(tokenize(one, "out", "--test-fraction 0.5 --seed 1"));
  EXPECT_NE(same.output.find("of 1 document none belongs to the test split"), std::string::npos) << same.output;
  EXPECT_EQ(same.output.find("use --test-fraction"), std::string::npos) << same.output;
  expect_run(tokenize(one, "out", "--test-fraction 0.5 --seed 2"), 1, {"the only document belongs to the test split"});
  expect_run(tokenize(lines, "out", "--test-fraction 0.9999"), 1, {"none is left for training"});
  expect_run(tokenize(folder.write("x.txt", "x"), "out"), 1, {"x.txt", "too short", "--test FILE"});
  expect_run(tokenize(lines, "out", "--test " + folder.write("empty.txt", "")), 1, {"--test have no text"});
  EXPECT_FALSE(fs::exists(folder.path("out")));
  expect_run(tokenize(lines, "out", "--test-fraction 0"), 0, {"3 documents"});
}

// The same documents in every format give the same shards.
TEST_F(DataCommands, FormatsOfText) {
  Random random(5);
  const std::vector<std::string> documents = random_documents(random, 60);
  std::string csv = "n,body\r\n", objects = "[", values = "[";
  for (const std::string& document : documents) {
    const std::string line = json_lines({document});
    std::string quoted;
    for (const char c : document) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
    csv += "1,\"" + quoted + "\"\r\n";
    objects += (objects.size() > 1 ? ",\n  " : "") + line;
    const size_t colon = line.find(':') + 1;
    values += (values.size() > 1 ? "," : "") + line.substr(colon, line.rfind('}') - colon);
  }
  const auto tokens = [&](const std::string& name, const std::string& input, const std::string& more = "",
                          const std::string& before = "") {
    const RunResult result = run(tokenize(input, name, "--test-fraction 0.2 " + more), before);
    EXPECT_EQ(result.code, 0) << result.output;
    auto files = read_folder(folder.path(name));
    files.erase("manifest.json");
    return files;
  };
  const std::string jsonl = folder.write("a.jsonl", json_lines(documents));
  const auto expected = tokens("jsonl", jsonl);
  EXPECT_EQ(tokens("objects", folder.write("a.json", objects + "]")), expected);
  EXPECT_EQ(tokens("values", folder.write("b.json", values + "]")), expected);
  EXPECT_EQ(tokens("lines", folder.write("c.json", json_lines(documents))), expected);
  EXPECT_EQ(tokens("csv", folder.write("a.csv", csv), "--column body"), expected);
  EXPECT_EQ(tokens("format", folder.write("a.dump", json_lines(documents)), "--format jsonl"), expected);
  EXPECT_EQ(tokens("pipe", "-", "--format jsonl", "cat " + jsonl + " |"), expected);
  EXPECT_FALSE(fs::exists(folder.path("pipe/standard-input")));
  expect_run(tokenize("-", "pipe"), 1, {"standard input cannot be compared"});

  const std::string markdown = "# Title\n\nText & more.";
  const auto text = tokens("txt", folder.write("a.txt", markdown));
  EXPECT_EQ(tokens("md", folder.write("a.md", markdown)), text);
  EXPECT_EQ(tokens("html", folder.write("a.html", "<h1># Title</h1><p>Text &amp; more.</p>\n")), text);
  EXPECT_EQ(tokens("stdin", "-", "", "cat " + folder.path("a.txt") + " |"), text);
  expect_run(tokenize(folder.write("bad.csv", "a,text\n1,\"x\"y\n"), "bad"), 1, {"bad.csv", "line 2"});
  expect_run(tokenize(folder.write("bad.json", R"([{"text": "x"}, {"text": 1}])"), "bad"), 1, {"bad.json", "record 2"});
  expect_run(fmt::format("tokenizer train - --format json --vocab 400 --out {} < {}", folder.path("t.model"),
                         folder.path("c.json")),
             0, {"vocabulary of 400"});
}

TEST_F(DataCommands, ShowsShards) {
  Random random(6);
  const std::string input = folder.write("a.jsonl", json_lines(random_documents(random, 100)));
  ASSERT_EQ(run(tokenize(input, "data", "--test-fraction 0.2")).code, 0);
  const Dataset data(folder.path("data"));
  const std::string json = folder.path("show.json");
  expect_run(
      "data show " + folder.path("data") + " --samples 2 --json " + json, 0,
      {"byte, 258 ids, bos 256, eos 257", "fingerprint", fmt::format("{}", data.tokens(Split::train).size()),
       "lengths of the train documents", "lengths of the test documents", " to ", "█", "train document", "tokens:"});
  const auto shown = nlohmann::json::parse(testing::read_file(json));
  int64_t documents = 0, tokens = 0;
  for (const auto& bucket : shown.at("train").at("lengths")) {
    documents += bucket.at("documents").get<int64_t>();
    tokens += bucket.at("tokens").get<int64_t>();
  }
  EXPECT_EQ(documents, data.tokens(Split::train).documents());
  EXPECT_EQ(tokens, data.tokens(Split::train).size());
  expect_run("data show " + folder.path("none"), 1, {"does not exist", "furious tokenize"});
  expect_run("data shwo", 2, {"did you mean \"show\""});
}

TEST_F(DataCommands, AFailedStartLeavesNoFolder) {
  const std::string one = folder.write("one.jsonl", "{\"text\": \"x\"}\n");
  const std::string table = folder.write("t.csv", "text,n\nx,1\n");
  const auto fails = [&](const std::string& input, const std::string& more, const std::string& part) {
    expect_run(tokenize(input, "new/shards", more), 1, {part});
    EXPECT_FALSE(fs::exists(folder.path("new"))) << input << " " << more;
    fs::create_directories(folder.path("old"));
    expect_run(tokenize(input, "old", more), 1, {part});
    EXPECT_TRUE(fs::is_empty(folder.path("old"))) << input << " " << more;
  };
  fails(one, "--test-fraction 0.001", "none belongs to the test split");
  fails(folder.write("empty.txt", ""), "", "no text");
  fails(folder.write("bad.jsonl", "{\"text\": \"x\"}\n{\"text\": "), "", "broken JSON");
  fails(one, "--field txt", "did you mean");
  fails(table, "--column txt", "did you mean");
  fails(folder.write("bad.parquet", "x"), "", "bad.parquet");
  fails("- < " + folder.write("nothing", ""), "", "no text");
}

TEST_F(DataCommands, CountsRecordsWithoutText) {
  const std::string table = folder.write("t.csv", "n,text\n1,x\n2,\n3,\"\"\n\n4,y\n");
  expect_run(tokenize(table, "csv", "--test-fraction 0"), 0, {"2 documents", "2 empty"});
  const std::string lines = folder.write("l.jsonl", json_lines({"a", "", "b"}));
  expect_run(tokenize(lines, "jsonl", "--test-fraction 0"), 0, {"2 documents", "1 empty"});
  const RunResult full = run(tokenize(folder.write("f.jsonl", json_lines({"a"})), "full", "--test-fraction 0"));
  EXPECT_EQ(full.output.find("empty"), std::string::npos) << full.output;
}

// A mixture is resumed with the same bits, and is no other mixture.
TEST_F(DataCommands, TrainsOnAMixture) {
  Random random(7);
  for (const char* name : {"a", "b:c"}) {  // a colon in a name is one
    const std::string input = folder.write("in.jsonl", json_lines(random_documents(random, 60)));
    ASSERT_EQ(run(tokenize(input, name, "--test-fraction 0.2")).code, 0);
    fs::remove(input);
  }
  const std::string a = folder.path("a"), b = folder.path("b:c");
  const auto train = [&](const std::string& data, const std::string& out, const std::string& more) {
    return fmt::format(
        "train --data {} --out {} --hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 4 --length 24 --threads 1 "
        "--device cpu --shuffle-window 50 {}",
        data, folder.path(out), more);
  };
  const std::string mixed = a + ":0.7," + b + ":0.3";
  expect_run(train(mixed, "whole", "--steps 8 --warmup 4 --schedule-steps 100 --eval-every 4"), 0,
             {"done after 8 steps", "test loss"});
  expect_run(train(mixed, "parts", "--steps 5 --warmup 4 --schedule-steps 100 --eval-every 4"), 0,
             {"done after 5 steps"});
  expect_run("train --resume --steps 8 --out " + folder.path("parts"), 0, {"resumed from", "done after 8 steps"});
  const auto weights = [&](const std::string& out) {
    return testing::read_file(folder.path(out) + "/latest/model.safetensors");
  };
  EXPECT_TRUE(weights("whole") == weights("parts"));
  expect_run(train(a + ":0.5," + b + ":0.5", "other", "--steps 8 --warmup 4 --schedule-steps 100"), 0, {"done"});
  EXPECT_FALSE(weights("whole") == weights("other"));
  expect_run(fmt::format("train --resume --steps 9 --out {} --data {}:0.6,{}:0.4", folder.path("parts"), a, b), 1,
             {"other data"});
  expect_run(train(b, "alone", "--steps 1"), 0, {"done"});
  expect_run(train(a + "," + b, "sizes", "--steps 1"), 0, {"done"});
  expect_run(train(a + ":0.7," + b, "bad", "--steps 1"), 1, {"some folders", "have a share"});
  expect_run(train(a + ":much," + b + ":0.3", "bad", "--steps 1"), 1, {":much", "FOLDER:SHARE"});
  const std::string model = folder.write("t.model", small_model());
  const std::string input = folder.write("in.jsonl", json_lines(random_documents(random, 60)));
  ASSERT_EQ(
      run(fmt::format("tokenize {} --tokenizer {} --out {} --test-fraction 0.2", input, model, folder.path("c"))).code,
      0);
  expect_run(train(a + ":0.5," + folder.path("c") + ":0.5", "bad", "--steps 1"), 1,
             {"mixes two tokenizers", "same --tokenizer"});
}

// A limit on file sizes simulates a full disk: writes fail the same way.
TEST_F(DataCommands, ReportsAFullDiskAndLosesNothing) {
  Random random(3);
  const std::vector<std::string> documents = random_documents(random, 3000);
  const std::string input = folder.write("in.jsonl", json_lines(documents));
  ASSERT_EQ(run(tokenize(input, "whole", "--test-fraction 0.01")).code, 0);
  const RunResult limited = run(tokenize(input, "full", "--test-fraction 0.01"), "trap '' XFSZ; ulimit -f 100;");
  EXPECT_EQ(limited.code, 1);
  EXPECT_NE(limited.output.find("cannot write"), std::string::npos) << limited.output;
  EXPECT_FALSE(fs::exists(folder.path("full/manifest.json")));
  ASSERT_EQ(run(tokenize(input, "full", "--test-fraction 0.01")).code, 0);
  EXPECT_TRUE(read_folder(folder.path("full")) == read_folder(folder.path("whole")));
}

}  // namespace
}  // namespace furious
