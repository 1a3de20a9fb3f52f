// Schedules, optimizers, averages and dry runs of `furious train`, by running the binary.
#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/run.h"
#include "cli/small_run_test.h"
#include "model/config.h"
#include "model/plan.h"
#include "train/options.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;

class TrainOptionsCommandTest : public SmallRunTest {
 protected:
  std::vector<nlohmann::json> log_of(const std::string& out) const {
    std::vector<nlohmann::json> lines;
    std::ifstream file(folder.path(out) + "/log.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  std::string weights_of(const std::string& out) const {
    return read_file(folder.path(out) + "/latest/model.safetensors");
  }
};

TEST_F(TrainOptionsCommandTest, SchedulesAreLogged) {
  const std::string options = "--steps 10 --warmup 2 --lr 1e-2 --min-lr 1e-3 --decay-steps 4 --eval-every 0 ";
  for (const auto& [schedule, last] :
       {std::pair{"constant", 1e-2}, {"linear", 1e-3 + 9e-3 / 4}, {"wsd", 1e-3 + 9e-3 / 4}}) {
    expect_run(command(schedule, options + "--schedule " + schedule), 0, {"done after 10 steps"});
    const auto log = log_of(schedule);
    ASSERT_EQ(log.size(), 10u);
    EXPECT_DOUBLE_EQ(log[0]["lr"], 5e-3);
    EXPECT_DOUBLE_EQ(log[5]["lr"], 1e-2);
    EXPECT_NEAR(log[9]["lr"], last, 1e-12) << schedule;
  }
  expect_run(command("bad", "--schedule step"), 2, {"unknown schedule \"step\"", "cosine"});
  expect_run(command("bad", "--lr 1e-3 --min-lr 1e-2"), 1, {"min-lr is 0.01", "at most lr"});
  EXPECT_FALSE(fs::exists(folder.path("bad")));
}

TEST_F(TrainOptionsCommandTest, AFinishedWsdRunGoesOnFromBeforeItsDecay) {
  const std::string options = "--schedule wsd --decay-steps 5 --warmup 2 --lr 1e-2 --eval-every 0 --optimizer muon ";
  expect_run(command("long", options + "--steps 25"), 0, {"done after 25 steps"});
  expect_run(command("short", options + "--steps 15"), 0, {"done after 15 steps"});
  expect_run(fmt::format("train --out {} --resume --steps 25", folder.path("short")), 0,
             {"going on from", "step-00000010, before the decay", "step-00000015.set-aside", "done after 25 steps"});
  EXPECT_EQ(weights_of("short"), weights_of("long"));
}

TEST_F(TrainOptionsCommandTest, MuonZLossAndDecayGroupsTrain) {
  const std::string options = "--steps 30 --lr 1e-2 --warmup 5 --eval-every 30 --optimizer muon --z-loss 1e-4 ";
  expect_run(command("run", options + "--decay-on matrices --grad-clip 0.5"), 0, {"test loss", "done after 30 steps"});
  const std::string toml = read_file(folder.path("run") + "/run.toml");
  for (const char* line : {"optimizer = \"muon\"\n", "decay-on = \"matrices\"\n", "clip = 0.5\n", "z-loss = 0.0001\n"})
    EXPECT_NE(toml.find(line), std::string::npos) << line << toml;
  const auto log = log_of("run");
  EXPECT_LT(double(log.back()["loss"]), double(log.front()["loss"]) - 1);
  expect_run(fmt::format("train --out {} --resume --optimizer adamw", folder.path("run")), 1, {"--optimizer muon"});
}

// One default for both.
TEST_F(TrainOptionsCommandTest, GradientsAreClippedToOneByDefault) {
  for (const char* name : {"train", "ablate"}) {
    const std::string help = run(fmt::format("{} --help", name)).output;
    const size_t at = help.find("--grad-clip");
    ASSERT_NE(at, std::string::npos) << name;
    EXPECT_NE(help.substr(at, 60).find("=1 "), std::string::npos) << help.substr(at, 100);
  }
}

TEST_F(TrainOptionsCommandTest, TheAverageIsAModel) {
  expect_run(command("run", "--steps 12 --lr 1e-2 --warmup 2 --ema 0.9 --eval-every 0"), 0, {"done after 12 steps"});
  const std::string average = folder.path("run") + "/latest/ema";
  expect_run(fmt::format("eval {} --data {} --device cpu", average, data), 0, {"loss"});
  expect_run(fmt::format("generate {} --prompt a --tokens 5 --device cpu", average), 0, {});
  expect_run(fmt::format("verify {}", folder.path("run")), 0, {"ok"});
  EXPECT_NE(read_file(average + "/model.safetensors"), weights_of("run"));
  // Stopping and resuming changes neither.
  expect_run(command("parts", "--steps 5 --schedule-steps 12 --lr 1e-2 --warmup 2 --ema 0.9 --eval-every 0"), 0, {});
  expect_run(fmt::format("train --out {} --resume --steps 12", folder.path("parts")), 0, {"done after 12 steps"});
  EXPECT_EQ(read_file(folder.path("parts") + "/latest/ema/model.safetensors"),
            read_file(average + "/model.safetensors"));
}

TEST_F(TrainOptionsCommandTest, DryRunWritesNothing) {
  const std::string out = folder.path("run");
  const RunResult result = run(command("run", "--steps 1000 --dry-run --assume-gpu 80GB"));
  EXPECT_EQ(result.code, 0) << result.output;
  TrainOptions options = small_options(data, out);
  ModelConfig config = model_config(options, 258);
  std::string parameters = std::to_string(parameter_count(config));
  parameters.insert(parameters.size() - 3, ",");
  for (const std::string& part : {parameters, std::string("4 x 24 = 96 tokens"), std::string("epochs"),
                                  std::string("memory on cpu"), std::string("memory on a GPU of 80GB"),
                                  std::string("fits"), std::string("tokens/s"), std::string("for 1,000 steps")})
    EXPECT_NE(result.output.find(part), std::string::npos) << part << result.output;
  EXPECT_FALSE(fs::exists(out));
  expect_run(fmt::format("train --data {} {} --dry-run --batch 100000 --length 2000 --assume-gpu 1GB", data, small), 0,
             {"memory on a GPU of 1GB", "does not fit", "--recompute", "not measured"});
  expect_run(command("run", "--dry-run --assume-gpu 99999999999999999999TB"), 2, {"80GB"});
  expect_run(command("run", "--dry-run --assume-gpu large"), 2, {"large", "80GB"});
  expect_run(command("run", "--assume-gpu 80GB"), 2, {"--dry-run"});
}

TEST_F(TrainOptionsCommandTest, ADryRunOfAResumedRunCountsTheStepsThatAreLeft) {
  expect_run(command("run", "--steps 4 --schedule constant --eval-every 0"), 0, {"done after 4 steps"});
  expect_run(fmt::format("train --out {} --resume --steps 10 --dry-run", folder.path("run")), 0,
             {"step-00000004, 6 of 10 steps are left", "for 6 steps"});
  expect_run(fmt::format("train --out {} --resume --dry-run", folder.path("run")), 0, {"0 of 4 steps are left"});
}

TEST_F(TrainOptionsCommandTest, SaysHowLongItWillTake) {
  expect_run(command("run", "--steps 20 --eval-every 0"), 0, {"of memory", "for 16 more steps of"});
}

TEST_F(TrainOptionsCommandTest, ASignalIsAnsweredAtOnce) {
  std::istringstream stream(command("run", "--steps 1000000 --eval-every 0 --sample-every 0"));
  const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  const std::string output = folder.path("output");
  const int status = run_and_signal(
      words, SIGINT, [&] { return log_of("run").size() > 3; }, output);
  ASSERT_TRUE(WIFEXITED(status));
  const std::string text = read_file(output);
  const size_t answer = text.find("\nfinishing step "), stopped = text.find("stopped after ");
  ASSERT_NE(answer, std::string::npos) << text;
  EXPECT_NE(text.find("then saving; Ctrl-C again ends without saving"), std::string::npos) << text;
  EXPECT_LT(answer, stopped) << text;
}

TEST_F(TrainOptionsCommandTest, UnknownFlagsAndRunsAreAnsweredWithTheNearest) {
  expect_run("train --learning-rate 1e-3", 2, {"unknown flag --learning-rate; did you mean --lr?"});
  expect_run("train --batch-size=8", 2, {"did you mean --batch?"});
  expect_run("train --arhc 2mamba", 2, {"unknown flag --arhc; did you mean --arch?"});
  expect_run("ablate compare --step 3", 2, {"did you mean --steps?"});
  ASSERT_EQ(run(command("first-run", "--steps 1")).code, 0);
  expect_run(fmt::format("train --out {} --resume", folder.path("frist-run")), 1,
             {"unknown run", "did you mean \"first-run\""});
  EXPECT_FALSE(fs::exists(folder.path("frist-run")));
  expect_run(command("frist-run", "--steps 1 --resume"), 0, {"did you mean first-run?", "starting a new run"});
}

TEST_F(TrainOptionsCommandTest, FlagsOfOtherProgramsAreExplained) {
  for (const auto& [flag, words] : std::initializer_list<std::pair<const char*, const char*>>{
           {"--learning_rate 3", "unknown flag --learning_rate; did you mean --lr?"},
           {"--weight_decay 0.1", "did you mean --weight-decay?"},
           {"--max-grad-norm 1", "did you mean --grad-clip?"},
           {"--gradient_accumulation_steps 2", "did you mean --accumulate?"},
           {"--save-total-limit 2", "did you mean --keep?"},
           {"--ema-decay 0.9", "did you mean --ema?"},
           {"--log-interval 10", "every step is logged"},
           {"--epochs 3", "unknown flag --epochs: there are only --steps; `furious train --dry-run`"},
           {"--fp16", "use --dtype bf16"},
           {"--compile", "nothing needs to be compiled"},
           {"--tokenizer byte", "that of the data"},
           {"--num-workers 4", "there is no such option"},
           {"--dropout 0.1", "there is no such option"},
           {"--wandb", "there is no such option"},
           {"--xyzzy", "unknown flag --xyzzy; `furious train --help` lists all"},
           {"first second", "unexpected: first second; `furious train --help`"}}) {
    const RunResult result = run(fmt::format("train {}", flag));
    EXPECT_EQ(result.code, 2) << flag;
    EXPECT_NE(result.output.find(words), std::string::npos) << flag << ": " << result.output;
  }
  EXPECT_EQ(run("train --temp 1").output.find("did you mean"), std::string::npos);
  expect_run("bench step --arhc 2mamba", 2, {"did you mean --arch?", "`furious bench step --help`"});
  expect_run("tokenize x.txt --out o --tokenzier byte", 2, {"did you mean --tokenizer?"});
}

TEST_F(TrainOptionsCommandTest, InitialWeightsDecideWhatTheModelIs) {
  ASSERT_EQ(run(command("base", "--steps 1 --arch softmax --switches qk_norm=true")).code, 0);
  const auto from = [&](const std::string& model, const std::string& more) {
    return fmt::format("train --data {} --out {} --init {} --device cpu --steps 1 --batch 4 --length 24 {}", data,
                       folder.path("next"), folder.path(model), more);
  };
  for (const char* option : {"--hidden 128", "--layers 3", "--intermediate 64", "--qk-dim 8", "--size mini",
                             "--tie-embeddings", "--switches conv_window=3", "--arch 2mamba", "--heads 4"}) {
    const std::string flag = std::string(option).substr(0, std::string(option).find(' '));
    expect_run(from("base", option), 1, {"leave " + flag + " out"});
  }
  EXPECT_FALSE(fs::exists(folder.path("next")));

  const RunResult result = run(from("base", "--hidden 32 --arch softmax --switches qk_norm=true"));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(result.output.find("ignored"), std::string::npos) << result.output;
  ASSERT_EQ(run(fmt::format("train --out {} --resume --steps 2", folder.path("next"))).code, 0);
  const std::string toml = read_file(folder.path("next") + "/run.toml");
  for (const char* line : {"arch = \"softmax\"\n", "hidden = 32\n", "intermediate = 32\n", "heads = 2\n",
                           "layers = 2\n", "switches = \"qk_norm=true\"\n"})
    EXPECT_NE(toml.find(line), std::string::npos) << line << toml;

  // A file of options is of another model; the run can be resumed with it.
  const std::string file = folder.write("options.toml", "hidden = 128\nlr = 1e-3\n");
  fs::remove_all(folder.path("next"));
  expect_run(from("base", "--config " + file), 0, {"done after 1 step in"});
  EXPECT_NE(read_file(folder.path("next") + "/run.toml").find("hidden = 32\n"), std::string::npos);
  expect_run(from("base", "--resume --config " + file), 0, {"resumed from"});

  fs::create_directories(folder.path("bare"));
  fs::copy_file(folder.path("base") + "/latest/model.safetensors", folder.path("bare") + "/model.safetensors");
  expect_run(from("bare/model.safetensors", "--arch softmax"), 1, {"no config.json", "--init", "furious export"});
}

TEST_F(TrainOptionsCommandTest, SaysThatTheWarmUpIsLongerThanTheRun) {
  expect_run(command("run", "--steps 3 --eval-every 0"), 0,
             {"warning: the rate never reaches --lr 0.0001", "takes 100 steps and the run has 3", "1 thread,"});
  EXPECT_EQ(run(command("short", "--steps 3 --warmup 3 --eval-every 0")).output.find("never reaches"),
            std::string::npos);
}

TEST_F(TrainOptionsCommandTest, ADivergedRunSaysWhatToDoAboutTheClipping) {
  const std::string options = "--steps 60 --lr 3 --warmup 0 --eval-every 0 --schedule constant ";
  const std::string clipped = run(command("clipped", options)).output;
  EXPECT_NE(clipped.find("or a smaller --grad-clip"), std::string::npos) << clipped;
  const std::string free = run(command("free", options + "--grad-clip 0")).output;
  EXPECT_NE(free.find("or a --grad-clip such as 1"), std::string::npos) << free;
}

TEST_F(TrainOptionsCommandTest, NoRunToResume) {
  const RunResult result = run(fmt::format("train --out {} --resume", folder.path("none/sub")));
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.output.find("there is no run " + folder.path("none/sub")), std::string::npos) << result.output;
  EXPECT_EQ(result.output.find("known:"), std::string::npos) << result.output;
}

TEST_F(TrainOptionsCommandTest, InitialWeightsOfAnotherTokenizerAreRefused) {
  ASSERT_EQ(run(command("bytes", "--steps 1")).code, 0);
  const std::string text = folder.write("words.txt", read_file(folder.path("data.jsonl")));
  expect_run(fmt::format("tokenizer train {} --vocab 400 --out {}", text, folder.path("words.model")), 0, {});
  expect_run(fmt::format("tokenize {} --tokenizer {} --out {} --test-fraction 0.05", folder.path("data.jsonl"),
                         folder.path("words.model"), folder.path("words")),
             0, {"documents"});
  const std::string other = fmt::format("train --data {} --out {} --init {} --device cpu --steps 1",
                                        folder.path("words"), folder.path("other"), folder.path("bytes"));
  expect_run(other, 1, {"was tokenized with", "tokenize the text with the model's tokenizer"});
  EXPECT_FALSE(fs::exists(folder.path("other")));
  expect_run(fmt::format("train --data {} --out {} --init {} --device cpu --steps 1 --batch 4 --length 24", data,
                         folder.path("same"), folder.path("bytes")),
             0, {"weights and configuration are those of", "done after 1 step in"});
}

}  // namespace
}  // namespace furious
