// `furious tokenize` and `furious tokenizer`, by running the binary.
#include <signal.h>
#include <sys/wait.h>

#include <filesystem>

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
  expect_run(tokenize(folder.write("bad.txt", "a\xFF"), "replaced"), 0, {"1 broken UTF-8"});
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

// A limit on file sizes simulates a full disk: writes fail the same way.
TEST_F(DataCommands, ReportsAFullDiskAndLosesNothing) {
  Random random(3);
  const std::vector<std::string> documents = random_documents(random, 3000);
  const std::string input = folder.write("in.jsonl", json_lines(documents));
  ASSERT_EQ(run(tokenize(input, "whole")).code, 0);
  const RunResult limited = run(tokenize(input, "full"), "trap '' XFSZ; ulimit -f 100;");
  EXPECT_EQ(limited.code, 1);
  EXPECT_NE(limited.output.find("cannot write"), std::string::npos) << limited.output;
  EXPECT_FALSE(fs::exists(folder.path("full/manifest.json")));
  ASSERT_EQ(run(tokenize(input, "full")).code, 0);
  EXPECT_TRUE(read_folder(folder.path("full")) == read_folder(folder.path("whole")));
}

}  // namespace
}  // namespace furious
