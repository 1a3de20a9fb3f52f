// Runs: folders, logs, checkpoints, stop and resume.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model/checkpoint.h"
#include "model/safetensors.h"
#include "ops/elementwise.h"
#include "train/small_run.h"
#include "train/training.h"
#include "train/training_checkpoint.h"

namespace furious {
namespace {

using namespace furious::testing;
namespace fs = std::filesystem;

class RunTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);
  TrainOptions options_for(const std::string& out) { return small_options(data, folder.path(out)); }
};

// The contents of a checkpoint without the options that name the folder.
std::map<std::string, std::string> contents(const std::string& run) {
  std::map<std::string, std::string> files = read_folder(run + "/latest");
  const auto training = files.extract("training.safetensors");
  EXPECT_FALSE(training.empty());
  const SafetensorsReader reader(run + "/latest/training.safetensors");
  for (const StoredTensor& tensor : reader.tensors())
    files[tensor.name] = std::string(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  return files;
}

std::vector<nlohmann::json> log_of(const std::string& run) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(read_file(run + "/log.jsonl"));
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST_F(RunTest, LeavesLogOptionsAndCheckpoints) {
  TrainOptions options = options_for("run");
  options.sample_every = 6;
  options.log_values = true;
  std::vector<TrainStep> seen;
  std::string messages;
  TrainObserver observer;
  observer.step = [&](const TrainStep& step) { seen.push_back(step); };
  observer.message = [&](const std::string& text) { messages += text + "\n"; };
  const TrainResult result = train(options, observer);
  EXPECT_EQ(result.steps, 12);
  EXPECT_FALSE(result.stopped);
  EXPECT_EQ(seen.size(), 12u);
  EXPECT_NE(messages.find("parameters"), std::string::npos);
  const std::vector<nlohmann::json> log = log_of(options.out);
  ASSERT_EQ(log.size(), 12u);
  for (size_t i = 0; i < log.size(); ++i) {
    EXPECT_EQ(log[i]["step"], i + 1);
    EXPECT_EQ(log[i].contains("test_loss"), (i + 1) % 5 == 0 || i + 1 == 12) << i + 1;
    EXPECT_EQ(log[i].contains("sample"), (i + 1) % 6 == 0) << i + 1;
    EXPECT_EQ(log[i].contains("value_rms"), log[i].contains("test_loss")) << i + 1;
    if (log[i].contains("value_rms")) {
      ASSERT_EQ(log[i]["value_rms"].size(), 2u);  // layers
      for (const double rms : log[i]["value_rms"]) EXPECT_GT(rms, 0);
    }
    for (const char* key : {"loss", "lr", "gradient_norm", "tokens_per_second", "mfu"})
      EXPECT_TRUE(log[i].contains(key)) << key;
  }
  EXPECT_EQ(result.checkpoint, options.out + "/step-00000012");
  EXPECT_FALSE(fs::exists(options.out + "/step-00000006"));
  EXPECT_TRUE(fs::exists(options.out + "/step-00000009"));
  EXPECT_EQ(fs::read_symlink(options.out + "/latest"), "step-00000012");
  for (const char* file : {"config.json", "model.safetensors", "tokenizer_config.json", "training.safetensors"})
    EXPECT_TRUE(fs::exists(options.out + "/latest/" + file)) << file;
  EXPECT_NE(read_file(options.out + "/run.toml").find("lr = 0.01\n"), std::string::npos);
  expect_error([&] { train(options); }, {"already holds a run", "--resume"});
}

TEST_F(RunTest, ResumesAnywhereBitForBit) {
  Random random(1);
  for (int round = 0; round < 6; ++round) {
    TrainOptions options = options_for(fmt::format("whole-{}", round));
    options.arch = random.pick<std::string>({"2mamba", "mamba2", "softmax", "mamba2s"});
    options.packing = random.pick<std::string>({"packed", "isolated", "rows"});
    options.accumulate = random.pick<int64_t>({1, 2});
    options.recompute = random.coin();
    options.clip = random.pick<double>({0, 0.5});
    options.eps = random.pick<double>({1e-8, 1e-2});
    options.optimizer = random.pick<std::string>({"adamw", "muon"});
    options.decay_on = random.pick<std::string>({"all", "matrices", "layers"});
    options.schedule = random.pick<std::string>({"constant", "linear", "cosine", "wsd"});
    options.ema = random.pick<double>({0, 0.9});
    options.z_loss = random.pick<double>({0, 1e-3});
    options.bos = options.packing == "rows" && random.coin();
    train(options);
    const auto expected = contents(options.out);
    options.out = folder.path(fmt::format("parts-{}", round));
    int64_t done = 0;
    for (options.resume = false; done < options.steps; options.resume = true) {
      TrainObserver observer;
      const int64_t stop_at = done + random.integer(1, 7);
      observer.step = [&](const TrainStep& step) { done = step.step; };
      observer.stop = [&] { return done >= stop_at; };
      const TrainResult result = train(options, observer);
      ASSERT_EQ(result.stopped, done < options.steps);
      ASSERT_EQ(result.steps, done);
      ASSERT_GT(result.steps, 0);
    }
    EXPECT_TRUE(contents(options.out) == expected) << options.arch << " " << options.packing;
    const std::vector<nlohmann::json> log = log_of(options.out);
    ASSERT_EQ(log.size(), 12u);
    for (size_t i = 0; i < 12; ++i) EXPECT_EQ(log[i]["step"], i + 1);
  }
}

TEST_F(RunTest, StepsAfterTheCheckpointAreRepeated) {
  TrainOptions options = options_for("whole");
  train(options);
  const auto expected = contents(options.out);
  options.out = folder.path("lost");
  options.resume = true;  // without a checkpoint it starts a new run
  TrainObserver observer;
  observer.step = [&](const TrainStep& step) {
    if (step.step == 8) throw Error("the power fails");
  };
  expect_error([&] { train(options, observer); }, {"the power fails"});
  EXPECT_EQ(log_of(options.out).size(), 8u);
  std::ofstream(options.out + "/log.jsonl", std::ios::app) << "{\"step\": 9, \"lo";
  const std::optional<TrainOptions> saved = options_of_run(options.out);
  ASSERT_TRUE(saved.has_value());
  train(*saved);
  EXPECT_TRUE(contents(options.out) == expected);
  EXPECT_EQ(log_of(options.out).size(), 12u);
}

TEST_F(RunTest, ResumeKeepsEps) {
  TrainOptions options = options_for("whole");
  options.eps = 1e-2;
  train(options);
  EXPECT_NE(read_file(options.out + "/run.toml").find("eps = 0.01\n"), std::string::npos);
  const auto expected = contents(options.out);
  options.out = folder.path("parts");
  TrainObserver observer;
  int64_t done = 0;
  observer.step = [&](const TrainStep& step) { done = step.step; };
  observer.stop = [&] { return done == 5; };
  ASSERT_TRUE(train(options, observer).stopped);
  const std::optional<TrainOptions> saved = options_of_run(options.out);
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->eps, 1e-2);
  train(*saved);
  EXPECT_TRUE(contents(options.out) == expected);
  options.out = folder.path("default");
  options.eps = TrainOptions().eps;
  train(options);
  EXPECT_FALSE(contents(options.out) == expected);
}

TEST_F(RunTest, ResumeRefusesAnotherRun) {
  TrainOptions options = options_for("run");
  train(options);
  options.resume = true;
  options.steps = 14;
  for (const auto& [change, part] : std::vector<std::pair<std::function<void(TrainOptions&)>, std::string>>{
           {[](TrainOptions& o) { o.batch = 8; }, "--batch 4, not 8"},
           {[](TrainOptions& o) { o.arch = "softmax"; }, "--arch 2mamba, not softmax"},
           {[](TrainOptions& o) { o.seed = 5; }, "--seed 123, not 5"},
           {[&](TrainOptions& o) { o.data = "synthetic:passkey"; }, "other data"}}) {
    TrainOptions changed = options;
    change(changed);
    expect_error([&] { train(changed); }, {part, "--init"});
  }
  EXPECT_EQ(train(options).steps, 14);  // more steps are allowed
  EXPECT_FALSE(options_of_run(folder.path("nowhere")).has_value());
}

TEST_F(RunTest, SaysWhyAFinishedRunGoesOnFromItsEnd) {
  TrainOptions options = options_for("wsd");
  options.schedule = "wsd";
  options.decay_steps = 4;
  train(options);
  const auto said = [&](double lr, const std::string& schedule) {
    TrainOptions more = options;
    fs::remove_all(folder.path("more"));
    fs::copy(options.out, folder.path("more"), fs::copy_options::recursive);
    more.out = folder.path("more");
    more.resume = true;
    more.steps = 40;
    more.lr = lr;
    more.schedule = schedule;
    std::string messages;
    TrainObserver observer;
    observer.message = [&](const std::string& text) { messages += text + "\n"; };
    observer.stop = [] { return true; };
    train(more, observer);
    return messages;
  };
  const std::string other_rate = said(2e-2, "wsd"), other_schedule = said(1e-2, "constant"), same = said(1e-2, "wsd");
  EXPECT_NE(other_rate.find("since that part had other rates: --lr 0.01 is now 0.02\n"), std::string::npos)
      << other_rate;
  EXPECT_NE(other_schedule.find("--schedule wsd is now constant"), std::string::npos) << other_schedule;
  for (const std::string& messages : {other_rate, other_schedule})
    EXPECT_EQ(messages.find("a run with --schedule wsd"), std::string::npos) << messages;
  EXPECT_NE(same.find("before the decay of the learning rate"), std::string::npos) << same;
  EXPECT_EQ(same.find("the loss rises"), std::string::npos) << same;
}

TEST_F(RunTest, BeginsOnceBeforeTheFirstStep) {
  TrainOptions options = options_for("run");
  std::vector<int64_t> begun;
  TrainObserver observer;
  observer.begin = [&](int64_t step) { begun.push_back(step); };
  observer.step = [&](const TrainStep&) { EXPECT_EQ(begun.size(), 1u); };
  options.steps = 2;
  train(options, observer);
  options.resume = true;
  train(options, observer);  // nothing is left
  observer.step = {};
  options.steps = 3;
  train(options, observer);
  EXPECT_EQ(begun, (std::vector<int64_t>{1, 3}));
}

TEST_F(RunTest, ARunWithoutACheckpointResumesWithItsOptions) {
  TrainOptions options = options_for("run");
  options.lr = 0.125;
  TrainObserver observer;
  observer.step = [](const TrainStep&) { throw Error("the power fails"); };
  expect_error([&] { train(options, observer); }, {"the power fails"});
  const std::optional<TrainOptions> saved = options_of_run(options.out);
  ASSERT_TRUE(saved.has_value());
  EXPECT_TRUE(saved->resume);
  EXPECT_EQ(saved->lr, 0.125);
  EXPECT_EQ(train(*saved).steps, options.steps);
  fs::create_directories(folder.path("bad"));
  folder.write("bad/run.toml", "lr = many\n");
  expect_error([&] { options_of_run(folder.path("bad")); }, {"run.toml", "many", "remove it"});
}

TEST_F(RunTest, StartsFromTheWeightsOfAModel) {
  TrainOptions first = options_for("first");
  first.steps = 60;
  const double learned = *train(first).last.test_loss;
  TrainOptions second = options_for("second");
  second.init = first.out + "/latest";
  second.lr = 0;
  second.steps = 1;
  second.size = "medium";  // the model has its own
  EXPECT_NEAR(*train(second).last.test_loss, learned, 1e-9);
  second.out = folder.path("third");
  const auto other = make_sentencepiece(testing::small_model(), "test");
  save_tokenizer(first.out + "/latest", *other);
  expect_error([&] { train(second); },
               {"tokenized with byte", "was trained with " + other->fingerprint(), "with the model's tokenizer"});
  second.init = folder.path("nothing");
  expect_error([&] { train(second); }, {"nothing"});
}

TEST_F(RunTest, DivergenceNamesTheLastGoodCheckpoint) {
  TrainOptions options = options_for("run");
  options.save_every = 1;
  options.steps = 3;
  train(options);
  options.resume = true;
  options.steps = 100;
  options.lr = 50;
  // Step 4 makes the weights diverge and saves them; step 5 detects it.
  expect_error([&] { train(options); }, {"step 5", "last good checkpoint: " + options.out + "/step-00000003 (remove " +
                                                       options.out + "/step-00000004"});
  EXPECT_EQ(log_of(options.out).back()["step"], 5);
  EXPECT_NE(std::string(log_of(options.out).back()["diverged"]).find("step 5"), std::string::npos);
  fs::remove_all(options.out + "/step-00000004");
  options.lr = 1e-3;
  options.steps = 5;
  EXPECT_EQ(train(options).steps, 5);
  ASSERT_EQ(log_of(options.out).size(), 5u);
  EXPECT_FALSE(log_of(options.out).back().contains("diverged"));

  TrainOptions at_once = options_for("at once");
  at_once.lr = 50;
  at_once.warmup = 0;
  at_once.save_every = 1;
  expect_error([&] { train(at_once); }, {"step 2", "no good checkpoint"});
}

TEST_F(RunTest, ExcludesASecondProcess) {
  TrainOptions options = options_for("run");
  bool refused = false;
  TrainObserver observer;
  observer.step = [&](const TrainStep& step) {
    if (step.step != 3) return;
    TrainOptions second = options;
    second.resume = true;
    expect_error([&] { train(second); }, {"another process", options.out});
    refused = true;
  };
  train(options, observer);
  EXPECT_TRUE(refused);
  EXPECT_EQ(log_of(options.out).size(), 12u);
}

TEST_F(RunTest, ResumeReportsChangedOptions) {
  TrainOptions options = options_for("run");
  train(options);
  std::string messages;
  TrainObserver observer;
  observer.message = [&](const std::string& text) { messages += text + "\n"; };
  options.resume = true;
  train(options, observer);
  EXPECT_NE(messages.find("12 steps are done"), std::string::npos) << messages;
  EXPECT_EQ(messages.find("learning rate"), std::string::npos) << messages;
  options.steps = 16;
  train(options, observer);
  EXPECT_NE(messages.find("learning rate continues with 0.00333"), std::string::npos) << messages;
}

// A finished WSD run that is given more steps continues from before its decay: with the bits of a run that had them
// from the start.
TEST_F(RunTest, AnExtendedWsdRunEqualsALongerOne) {
  TrainOptions options = options_for("long");
  options.schedule = "wsd";
  options.decay_steps = 4;
  options.keep = 1;
  options.steps = 20;
  train(options);
  const auto expected = contents(options.out);
  options.out = folder.path("extended");
  options.steps = 12;
  train(options);
  EXPECT_TRUE(fs::exists(options.out + "/step-00000008")) << "kept beside the newest, for more steps";
  EXPECT_FALSE(fs::exists(options.out + "/step-00000009"));
  options.resume = true;
  train(options);  // nothing to do, nothing changes
  EXPECT_TRUE(fs::exists(options.out + "/step-00000012"));
  std::string messages;
  TrainObserver observer;
  observer.message = [&](const std::string& text) { messages += text + "\n"; };
  options.steps = 20;
  train(options, observer);
  EXPECT_NE(messages.find("20 steps instead of 12: going on from"), std::string::npos) << messages;
  EXPECT_NE(messages.find("step-00000012.set-aside"), std::string::npos) << messages;
  EXPECT_TRUE(fs::exists(options.out + "/step-00000012.set-aside"));
  fs::remove_all(options.out + "/step-00000012.set-aside");
  EXPECT_TRUE(contents(options.out) == expected);
  EXPECT_EQ(log_of(options.out).size(), 20u);
}

// Checkpoints of another schedule are not those before a decay.
TEST_F(RunTest, ARunThatBecomesWsdInItsDecayGoesOnFromTheNewest) {
  TrainOptions options = options_for("late");
  options.schedule = "linear";
  options.decay_steps = 4;
  options.keep = 9;
  options.save_every = 2;
  options.steps = 20;
  TrainObserver observer;
  observer.stop = [steps = 0]() mutable { return ++steps == 10; };
  train(options, observer);
  options.resume = true;
  options.schedule = "wsd";
  options.steps = 12;  // its decay would have begun at step 8
  train(options);
  options.steps = 16;
  const TrainResult result = train(options);
  EXPECT_EQ(result.steps, 16);
  EXPECT_TRUE(fs::exists(options.out + "/step-00000012")) << "it was set aside";
}

TEST_F(RunTest, OtherSchedulesSayWhatMoreStepsChange) {
  for (const char* schedule : {"constant", "linear", "cosine"}) {
    TrainOptions options = options_for(schedule);
    options.schedule = schedule;
    train(options);
    std::string messages;
    TrainObserver observer;
    observer.message = [&](const std::string& text) { messages += text + "\n"; };
    options.resume = true;
    options.steps = 24;
    train(options, observer);
    const bool jumps = messages.find("the finished run ended with a rate of") != std::string::npos;
    EXPECT_EQ(jumps, schedule != std::string("constant")) << messages;
    EXPECT_EQ(messages.find("learning rate continues with") != std::string::npos, jumps) << messages;
  }
  TrainOptions options = options_for("over");
  options.schedule_steps = 12;
  train(options);
  std::string messages;
  TrainObserver observer;
  observer.message = [&](const std::string& text) { messages += text + "\n"; };
  options.resume = true;
  options.steps = 14;
  train(options, observer);
  EXPECT_NE(messages.find("the learning rate is 0 from here on"), std::string::npos) << messages;
  EXPECT_NE(messages.find("--min-lr"), std::string::npos) << messages;
}

TEST_F(RunTest, StatesOfAnotherOptimizerAreRefused) {
  TrainOptions options = options_for("run");
  train(options);
  options.resume = true;
  options.optimizer = "muon";
  expect_error([&] { train(options); }, {"--optimizer adamw, not muon"});
  options.optimizer = "adamw";
  options.ema = 0.9;
  expect_error([&] { train(options); }, {"--ema 0, not 0.9"});
}

TEST_F(RunTest, AFailedStartLeavesNoFolders) {
  TrainOptions options = options_for("run");
  options.out = folder.path("a/b/run");
  options.init = "/nowhere";
  expect_error([&] { train(options); }, {"/nowhere"});
  EXPECT_FALSE(fs::exists(folder.path("a")));
  fs::create_directories(folder.path("a/b"));
  expect_error([&] { train(options); }, {"/nowhere"});
  EXPECT_TRUE(fs::exists(folder.path("a/b")));
  EXPECT_FALSE(fs::exists(options.out));
}

TEST_F(RunTest, CleansUpAfterAKilledRun) {
  TrainOptions options = options_for("run");
  train(options);
  // The link is made after the checkpoint; lines of the log may be anything.
  fs::remove(options.out + "/latest");
  fs::create_directory_symlink("step-00000009", options.out + "/latest");
  std::ofstream(options.out + "/log.jsonl", std::ios::app) << "{\"step\": \"x\"}\n[1]\n";
  const std::string half = options.out + "/step-00000013.tmp-furious-0123abcd";
  fs::create_directory(half);
  std::ofstream(half + "/model.safetensors") << "half";
  options.resume = true;
  train(options);
  EXPECT_FALSE(fs::exists(half));
  EXPECT_EQ(fs::read_symlink(options.out + "/latest"), "step-00000012");
  EXPECT_EQ(log_of(options.out).size(), 12u);
  // Names grow by a digit after step 99,999,999.
  fs::rename(options.out + "/step-00000009", options.out + "/step-100000000");
  fs::remove(options.out + "/step-100000000/training.safetensors");
  expect_error([&] { options_of_run(options.out); }, {"step-100000000"});
}

TEST_F(RunTest, DamagedMetadataIsNamed) {
  TrainOptions options = options_for("run");
  train(options);
  const std::string file = options.out + "/latest/training.safetensors";
  const std::string good = read_file(file);
  for (const auto& [from, to] : {std::pair{R"(\"step\":12)", R"(\"stop\":12)"}, {R"(\"step\":12)", R"(\"step\":[])"}}) {
    std::string bad = good;
    ASSERT_NE(bad.find(from), std::string::npos);
    bad.replace(bad.find(from), std::string(from).size(), to);
    std::ofstream(file, std::ios::binary) << bad;
    options.resume = true;
    expect_error([&] { train(options); }, {"training.safetensors", "header or metadata differs from its checksum"});
    bad.replace(bad.find("furious.checksums"), 7, "another");  // a file without checksums
    std::ofstream(file, std::ios::binary) << bad;
    expect_error([&] { train(options); }, {"training.safetensors", "metadata is damaged"});
  }
}

TEST_F(RunTest, FilesOfACheckpointBelongTogether) {
  TrainOptions options = options_for("run");
  train(options);
  options.resume = true;
  options.steps = 14;
  const std::string newest = options.out + "/step-00000012";
  const auto refused = [&](const std::string& file, const std::string& content, std::vector<std::string> parts) {
    const std::string good = read_file(file);
    std::ofstream(file, std::ios::binary) << content;
    expect_error([&] { train(options); }, parts);
    std::ofstream(file, std::ios::binary) << good;
  };
  const std::string good_one = "step-00000009 is undamaged; resume from it with --resume=previous";
  const std::string config = newest + "/config.json", toml = options.out + "/run.toml";
  refused(config, read_file(config) + " ", {config, "is not the file that was saved with the weights", good_one});
  refused(newest + "/tokenizer_config.json", "{}", {"tokenizer_config.json", "is not the file"});
  refused(newest + "/model.safetensors", read_file(options.out + "/step-00000009/model.safetensors"),
          {"model.safetensors: was not saved together with training.safetensors", good_one});
  std::string text = read_file(toml);
  text.replace(text.find("batch = 4"), 9, "batch = 6");
  refused(toml, text, {toml, "batch is 6", "trained with 4", "remove it"});
  refused(toml, "batch\n", {toml, "\"batch\" is not an option"});
  // For inference an edited configuration causes a note.
  EXPECT_TRUE(load_notes(newest).empty());
  std::ofstream(config, std::ios::app) << " ";
  ASSERT_EQ(load_notes(newest).size(), 1u);
  EXPECT_NE(load_notes(newest)[0].find("config.json: is not the file"), std::string::npos);
  load_model(newest);
  fs::remove(newest + "/tokenizer_config.json");
  EXPECT_NE(load_notes(newest).back().find("tokenizer_config.json: is missing"), std::string::npos);
}

// A checkpoint with any flipped bit is refused, or loads exactly what was saved.
TEST_F(RunTest, DetectsEveryFlippedBit) {
  Random random(7);
  TrainOptions options = options_for("run");
  train(options);
  const fs::path checkpoint = options.out + "/step-00000012";
  const auto loaded = [&] {
    const std::string out = folder.path("loaded");
    fs::remove_all(out);
    fs::create_directory(out);
    Training(options, checkpoint).save(out);
    return read_folder(out);
  };
  const auto expected = loaded();
  for (const auto& [name, content] : read_folder(checkpoint)) {
    int accepted = 0;
    for (int i = 0; i < 40; ++i) {
      std::string bad = content;
      // Half of them in the first bytes: of a header.
      const size_t most = random.coin() ? std::min<size_t>(2000, bad.size()) : bad.size();
      bad[static_cast<size_t>(random.integer(0, static_cast<int64_t>(most) - 1))] ^=
          static_cast<char>(1 << random.integer(0, 7));
      std::ofstream(checkpoint / name, std::ios::binary) << bad;
      try {
        EXPECT_TRUE(loaded() == expected) << name;
        ++accepted;
      } catch (const Error&) {
      }
    }
    EXPECT_LT(accepted, 5) << name;
    std::ofstream(checkpoint / name, std::ios::binary) << content;
  }
}

TEST_F(RunTest, BadInput) {
  TrainOptions options = options_for("run");
  const auto refused = [&](const std::function<void(TrainOptions&)>& change, const std::vector<std::string>& parts) {
    TrainOptions changed = options;
    change(changed);
    expect_error([&] { train(changed); }, parts);
  };
  refused([](TrainOptions& o) { o.data.clear(); }, {"--data"});
  refused([](TrainOptions& o) { o.out.clear(); }, {"--out"});
  refused([](TrainOptions& o) { o.accumulate = 0; }, {"accumulate is 0"});
  refused([](TrainOptions& o) { o.lr = std::nan(""); }, {"lr is nan"});
  refused([](TrainOptions& o) { o.data = "/nowhere/at/all"; }, {"/nowhere/at/all"});
  refused([](TrainOptions& o) { o.length = 1 << 25; }, {"length"});
  refused([](TrainOptions& o) { o.arch = "2mambo"; }, {"2mambo", "2mamba"});
  refused([](TrainOptions& o) { o.device = "tpu"; }, {"tpu"});
  refused([&](TrainOptions& o) { o.out = folder.write("file", "x") + "/run"; }, {"cannot create folder"});
}

}  // namespace
}  // namespace furious
