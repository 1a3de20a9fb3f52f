// `furious train` and `furious bench step`, by running the binary.
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/run.h"
#include "cli/small_run_test.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;

class TrainCommandTest : public SmallRunTest {
 protected:
  std::vector<std::string> words(const std::string& text) const {
    std::istringstream stream(text);
    return {std::istream_iterator<std::string>(stream), {}};
  }
  int64_t logged(const std::string& out) const {
    std::ifstream file(folder.path(out) + "/log.jsonl");
    return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
  }
};

TEST_F(TrainCommandTest, TrainsAndReports) {
  expect_run(command("run", "--steps 6 --eval-every 3 --sample-every 3 --warmup 0"), 0,
             {"2mamba: 0.0", "steps 1 to 6", "test loss", "sample:", "done after 6 steps", "step-00000006"});
  expect_run("train --help", 0, {"--schedule-steps", "=0.0001", "Example: furious train"});
  const RunResult said = run(command("again", "--steps 1"));
  EXPECT_EQ(said.output.find("increase --steps to continue"), std::string::npos) << said.output;
}

TEST_F(TrainCommandTest, ConfigFileAndFlags) {
  const std::string config =
      folder.write("run.toml", fmt::format("# a run\nlr = 0.5\nsteps = 3\ndata = \"{}\"\nrecompute = true\n", data));
  expect_run(fmt::format("train --config {} --out {} {} --lr 0.25", config, folder.path("run"), small), 0, {"done"});
  const std::string resolved = read_file(folder.path("run") + "/run.toml");
  for (const char* line : {"lr = 0.25\n", "steps = 3\n", "recompute = true\n", "hidden = 32\n", "threads = 1\n"})
    EXPECT_NE(resolved.find(line), std::string::npos) << line << resolved;
  // What a run wrote is a configuration itself.
  expect_run(fmt::format("train --config {} --out {}", folder.path("run") + "/run.toml", folder.path("again")), 0,
             {"done"});
  EXPECT_EQ(read_file(folder.path("run") + "/latest/model.safetensors"),
            read_file(folder.path("again") + "/latest/model.safetensors"));
  const auto bad = [&](const std::string& text) {
    return fmt::format("train --out {} --config {}", folder.path("bad"), folder.write("bad.toml", text));
  };
  expect_run(bad("stepz = 4\n"), 1, {"bad.toml", "unknown option \"stepz\"", "\"steps\""});
  expect_run(bad("steps = \"many\"\n"), 1, {"bad.toml", "steps", "many"});
  expect_run(bad("[model]\narch = \"2mamba\"\n"), 1, {"bad.toml", "model.arch"});
  expect_run("train --config nowhere.toml", 1, {"nowhere.toml"});
  expect_run("train --config /tmp", 1, {"/tmp", "directory"});
  // Flags override the file in both directions.
  expect_run(fmt::format("train --config {} --out {} --recompute=false", folder.path("run") + "/run.toml",
                         folder.path("unset")),
             0, {"done"});
  EXPECT_NE(read_file(folder.path("unset") + "/run.toml").find("recompute = false\n"), std::string::npos);
}

TEST_F(TrainCommandTest, FlagsOverrideThePapersRecipe) {
  expect_run(command("run", "--paper --steps 3 --eval-every 3"), 0, {"test loss", "done after 3 steps"});
  const std::string toml = read_file(folder.path("run") + "/run.toml");
  for (const char* line : {"size = \"small\"\n", "hidden = 32\n", "batch = 4\n", "length = 24\n", "steps = 3\n",
                           "packing = \"rows\"\n", "bos = true\n", "eps = 1e-07\n", "warmup = 10000\n",
                           "schedule-steps = 1000000\n", "initialization = \"pytorch\"\n", "eval-batches = 0\n"})
    EXPECT_NE(toml.find(line), std::string::npos) << line << toml;
  // The run resumes with it, and giving the recipe again is the same run.
  const std::string out = folder.path("run");
  expect_run(fmt::format("train --resume --steps 4 --out {}", out), 0, {"done after 4 steps"});
  expect_run(fmt::format("train --paper --resume --steps 5 --out {} {}", out, small), 0, {"done after 5 steps"});
  EXPECT_NE(read_file(out + "/run.toml").find("eps = 1e-07\n"), std::string::npos);
  expect_run(fmt::format("train --recipe paper-long --resume --out {}", out), 1, {"--size small, not medium"});
  expect_run("train --recipe long --out x --data x", 2, {"unknown recipe \"long\"", "paper-long"});
  expect_run("train --help", 0, {"--recipe", "paper-long", "--paper", "docs/paper.md"});
  expect_run("--help", 0, {"docs/paper.md"});
  expect_run(command("bad", "--bos"), 1, {"--bos", "packing is packed"});
}

TEST_F(TrainCommandTest, EvalFindsTheTestLossOfTraining) {
  const RunResult trained = run(command("run", "--steps 2 --eval-every 2 --eval-batches 0 --packing rows"));
  const size_t at = trained.output.find("test loss ");
  ASSERT_NE(at, std::string::npos) << trained.output;
  expect_run(fmt::format("eval {} --data {}", folder.path("run"), data), 0,
             {"loss            " + trained.output.substr(at + 10, 5), "x 24 (test, rows)"});
}

TEST_F(TrainCommandTest, Usage) {
  expect_run("train --steps none", 2, {"--steps", "none"});
  expect_run("train --batch 0", 2, {"batch is 0"});
  expect_run("train --dtype f33", 2, {"f32"});
  expect_run("train --arhc 2mamba", 2, {"--arhc"});
  expect_run("train --out x", 2, {"--data"});
  expect_run("train --data x", 2, {"--out"});
  expect_run(command("run", "--arch 2mambo"), 1, {"2mambo", "did you mean \"2mamba\""});
  expect_run(command("run", "--device cuda:99"), 1, {"cuda:99"});
  expect_run("train --data /nowhere --out " + folder.path("run"), 1, {"/nowhere"});
  expect_run(command("run", "--length 100000000"), 2, {"length"});
  expect_run(command("run", "--length 1000000"), 1, {"length"});
  expect_run(command("run", "--batch 100000 --length 2000"), 1, {"GiB", "are free"});
}

TEST_F(TrainCommandTest, ResumesBitForBitAfterKillOrStop) {
  const std::string options = "--steps 60 --save-every 7 --eval-every 20";
  ASSERT_EQ(run(command("whole", options)).code, 0);
  const std::string expected = read_file(folder.path("whole") + "/latest/model.safetensors");
  for (const int signal : {SIGKILL, SIGTERM, SIGINT}) {
    const std::string out = fmt::format("signal-{}", signal);
    const int status = run_and_signal(words(command(out, options)), signal, [&] { return logged(out) >= 17; });
    if (signal == SIGKILL) {
      ASSERT_TRUE(WIFSIGNALED(status)) << "it was done before it was killed";
    } else {
      ASSERT_TRUE(WIFEXITED(status));
      EXPECT_EQ(WEXITSTATUS(status), 0);
      ASSERT_LT(logged(out), 60) << "it was done before the signal";
    }
    expect_run(fmt::format("train --resume --out {}", folder.path(out)), 0, {"resumed from", "done after 60 steps"});
    EXPECT_EQ(read_file(folder.path(out) + "/latest/model.safetensors"), expected) << "signal " << signal;
    EXPECT_EQ(logged(out), 60);
  }
}

TEST_F(TrainCommandTest, ASignalInTheFirstStep) {
  for (const int signal : {SIGTERM, SIGKILL}) {
    const std::string out = fmt::format("first-{}", signal), output = folder.path(out + ".txt");
    using Clock = std::chrono::steady_clock;
    std::optional<Clock::time_point> announced;
    const auto in_first_step = [&] {
      if (!announced && fs::exists(output) && read_file(output).find("of memory") != std::string::npos)
        announced = Clock::now();
      return announced && Clock::now() - *announced > std::chrono::milliseconds(300);
    };
    const std::string slow = "--steps 2 --eval-every 0 --sample-every 0 --batch 128 --length 512";
    const int status = run_and_signal(words(command(out, slow)), signal, in_first_step, output);
    const std::string text = read_file(output), resume = fmt::format("train --resume --out {}", folder.path(out));
    if (signal == SIGTERM) {
      ASSERT_TRUE(WIFEXITED(status)) << text;
      for (const char* part : {"finishing step 1,", "stopped after 1 step", "--resume"})
        EXPECT_NE(text.find(part), std::string::npos) << text;
      expect_run(resume, 0, {"resumed from", "done after 2 steps"});
    } else {  // the options are those of run.toml
      ASSERT_TRUE(WIFSIGNALED(status)) << text;
      expect_run(resume + " --steps 1", 0,
                 {"has no checkpoint", "run.toml", "starting a new run", "done after 1 step"});
      EXPECT_NE(read_file(folder.path(out) + "/run.toml").find("batch = 128\n"), std::string::npos);
    }
  }
}

TEST_F(TrainCommandTest, ASignalEndsTheBuildingOfAModel) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string out = fmt::format("large-{}", signal);
    const int status = run_and_signal(words(command(out, "--steps 1000 --layers 4096")), signal,
                                      [&] { return fs::exists(folder.path(out)); });
    ASSERT_TRUE(WIFSIGNALED(status)) << "it went on until a step was done";
    EXPECT_EQ(WTERMSIG(status), signal);
  }
}

TEST_F(TrainCommandTest, RefusesImpossibleSizesImmediately) {
  expect_run(command("run", "--size medium --hidden 0 --heads 0 --layers 65536"), 1,
             {"needs about", "GiB", "are free"});
  expect_run(command("run", "--hidden 1048576 --intermediate 1048576 --heads 65536 --layers 65536"), 1,
             {"needs about", "GiB", "are free"});
  expect_run(command("run", "--batch 16777216 --length 67108864 --data synthetic:recall"), 1, {"GiB", "are free"});
}

// Paths are bytes: names that are not UTF-8 work, too.
TEST_F(TrainCommandTest, PathsOfAnyBytes) {
  const std::string odd = "\xff\x01 %\xc3";
  fs::rename(data, data + odd);
  data += odd;
  const std::string out = folder.path("run" + odd);
  const auto quoted = [](const std::string& text) { return "'" + text + "'"; };
  expect_run(fmt::format("train --data {} --out {} {} --steps 4 --save-every 2", quoted(data), quoted(out), small), 0,
             {"done after 4 steps"});
  // The same paths are read back: the data is found, and the run resumes.
  expect_run(fmt::format("train --resume --steps 6 --out {}", quoted(out)), 0, {"resumed from", "done after 6 steps"});
  expect_run(fmt::format("train --config {} --out {}", quoted(out + "/run.toml"), folder.path("again")), 0,
             {"done after 6 steps"});
  expect_run(fmt::format("eval {} --data {}", quoted(out), quoted(data)), 0, {"loss"});
  expect_run(fmt::format("niah {} --lengths 300 --questions 1 --depths 0 --device cpu --svg {} --json {}", quoted(out),
                         quoted(folder.path("svg" + odd)), quoted(folder.path("json" + odd))),
             0, {});
  expect_run(fmt::format("verify {} {}", quoted(out), quoted(data)), 0, {"ok"});
  const std::string text = folder.write("in" + odd + ".txt", "some text");
  expect_run(fmt::format("tokenize {} --tokenizer byte --test-fraction 0 --out {}", quoted(text),
                         quoted(folder.path("out" + odd))),
             0, {"documents"});
}

TEST_F(TrainCommandTest, ContinuesWhenItsOutputIsClosed) {
  for (const char* reader : {"| head -1", "2>&1 | head -1", ">/dev/full", ">/dev/full 2>/dev/full"}) {
    const std::string out = fmt::format("unread-{}", std::string(reader).size());
    run(command(out, fmt::format("--steps 40 --eval-every 2 {}", reader)));
    EXPECT_TRUE(fs::exists(folder.path(out) + "/step-00000040")) << reader;
  }
  EXPECT_EQ(run("presets >/dev/full").code, 1);
}

TEST_F(TrainCommandTest, AFullDiskLeavesTheLastCheckpoint) {
  // The first checkpoint is as large as the second: the limit falls between two runs, not between two files.
  ASSERT_EQ(run(command("run", "--steps 2")).code, 0);
  const std::string before = read_file(folder.path("run") + "/latest/model.safetensors");
  const std::string more = fmt::format("train --resume --steps 4 --out {}", folder.path("run"));
  const RunResult limited = run(more, "trap '' XFSZ; ulimit -f 60;");
  EXPECT_EQ(limited.code, 1);
  for (const char* part : {"cannot be written", "last good checkpoint", "step-00000002"})
    EXPECT_NE(limited.output.find(part), std::string::npos) << limited.output;
  EXPECT_EQ(read_file(folder.path("run") + "/latest/model.safetensors"), before);
  expect_run(more, 0, {"done after 4 steps"});
}

TEST_F(TrainCommandTest, BenchStep) {
  const std::string json = folder.path("step.json");
  expect_run(fmt::format("bench step {} --vocab 100 --steps 2 --preset mamba2 --json {}", small, json), 0,
             {"tokens/s", "peak"});
  const auto result = nlohmann::json::parse(read_file(json));
  EXPECT_EQ(result["preset"], "mamba2");
  EXPECT_EQ(result["size"], "32/32/2/2");
  EXPECT_EQ(result["length"], 24);
  EXPECT_EQ(result["batch"], 4);
  for (const char* key : {"tokens_per_second", "mfu", "peak_bytes"}) EXPECT_GT(double(result[key]), 0) << key;
  expect_run("bench step --batch 4 --accumulate 3", 1, {"3 micro-batches"});
  expect_run("bench step --size huge", 1, {"unknown size \"huge\""});
}

}  // namespace
}  // namespace furious
