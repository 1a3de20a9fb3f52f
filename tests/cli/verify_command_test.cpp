// `furious verify`, and errors of training on damaged files, by running the binary.
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cli/run.h"
#include "train/small_run.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;

void flip(const std::string& file, size_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(stream.get() ^ 0x10);
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(byte);
  ASSERT_TRUE(stream.good()) << file;
}

std::string weights_of(const std::string& run) {
  return read_file(run + "/latest/model.safetensors");
}

class VerifyCommandTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);
  std::string run_folder = folder.path("run");
  std::string small =
      "--hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 4 --length 24 --threads 1 --device cpu --eval-every "
      "0";

  std::string command(const std::string& out, const std::string& more) const {
    return fmt::format("train --data {} --out {} {} {}", data, out, small, more);
  }
  void train() { ASSERT_EQ(run(command(run_folder, "--steps 6 --save-every 2 --keep 3")).code, 0); }
};

TEST_F(VerifyCommandTest, IntactFilesAreOk) {
  train();
  const std::string state = folder.path("text.state");
  ASSERT_EQ(run(fmt::format("generate {} --prompt abc --tokens 2 --save-state {}", run_folder, state)).code, 0);
  expect_run(fmt::format("verify {} {} {} {}/latest/model.safetensors {}/train-00000.tokens", run_folder, data, state,
                         run_folder, data),
             0,
             {"ok       " + run_folder + "/step-00000002: checkpoint\n", "step-00000004: checkpoint\n",
              "step-00000006: checkpoint\n", "ok       " + run_folder + "/run.toml", "ok       " + data + ": 2 shards",
              "text.state: state of a session", "model.safetensors: ", "train-00000.tokens: part of a shard"});
  expect_run("verify --help", 0, {"Example: furious verify", "exit code is 1"});
  expect_run("verify", 2, {"path"});
  expect_run("verify " + folder.path("nothing"), 1, {"damaged  ", "no such file"});
  expect_run("verify " + folder.path(""), 1, {"damaged  ", "not a tokenized corpus"});
}

TEST_F(VerifyCommandTest, DamageIsNamed) {
  train();
  const std::string state = folder.path("text.state");
  ASSERT_EQ(run(fmt::format("generate {} --prompt abc --tokens 2 --save-state {}", run_folder, state)).code, 0);
  const std::string tensors = run_folder + "/step-00000004/training.safetensors";
  flip(tensors, fs::file_size(tensors) - 1000);
  flip(data + "/train-00000.tokens", 64 + 100);
  flip(state, fs::file_size(state) - 10);
  expect_run("verify " + run_folder, 1,
             {"ok       " + run_folder + "/step-00000002", "damaged  " + run_folder + "/step-00000004: " + tensors,
              "tensor \"", "differs from its checksum", "ok       " + run_folder + "/step-00000006", "1 damaged"});
  expect_run("verify " + data, 1, {"train-00000.tokens\" is damaged: bytes 64 to "});
  expect_run("verify " + data + "/train-00000.tokens", 1, {"bytes 64 to "});
  expect_run("verify " + data + "/train-00000.documents", 0, {"ok"});
  expect_run("verify " + state, 1, {"differs from its checksum"});
  const std::string toml = read_file(run_folder + "/run.toml");
  flip(run_folder + "/step-00000002/config.json", 30);
  flip(run_folder + "/run.toml", toml.find("heads = 2") + 8);  // 2 becomes "
  expect_run("verify " + run_folder, 1, {"step-00000002/config.json: is not the file", "run.toml", "3 damaged"});
}

TEST_F(VerifyCommandTest, AFolderUnderAnotherStepsNameIsRefused) {
  train();
  fs::rename(run_folder + "/step-00000006", run_folder + "/step-00000007");
  expect_run("verify " + run_folder, 1, {"is of step 00000007 by its name, but of step 6"});
  expect_run("train --resume --steps 8 --out " + run_folder, 1, {"of step 6", "step-00000004 is undamaged"});
}

TEST_F(VerifyCommandTest, ResumeFromThePreviousCheckpoint) {
  ASSERT_EQ(run(command(folder.path("whole"), "--steps 12 --save-every 2 --keep 3")).code, 0);
  train();
  const std::string newest = run_folder + "/step-00000006/model.safetensors";
  flip(newest, fs::file_size(newest) - 100);
  const std::string resume = fmt::format("train --out {} --steps 12 --resume", run_folder);
  expect_run(resume, 1,
             {newest, "differs from its checksum", run_folder + "/step-00000004 is undamaged", "--resume=previous"});
  expect_run("generate " + run_folder + " --prompt a --tokens 1", 1,
             {"latest/model.safetensors", "differs from its checksum"});
  // The newest undamaged checkpoint is used.
  flip(run_folder + "/step-00000004/training.safetensors", 300);  // in the header
  expect_run(resume, 1, {run_folder + "/step-00000002 is undamaged"});
  expect_run(resume + "=previous", 0,
             {"step-00000006 is not used", "resumed from " + run_folder + "/step-00000002", "done after 12 steps"});
  EXPECT_TRUE(fs::exists(run_folder + "/step-00000006.set-aside"));
  EXPECT_EQ(weights_of(run_folder), weights_of(folder.path("whole")));
  expect_run(resume, 0, {"12 steps are done"});
  expect_run("train --resume=older --data x --out x", 2, {"older"});
  // Without an undamaged checkpoint there is nothing to resume from.
  for (const char* step : {"08", "10", "12"})
    flip(run_folder + "/step-000000" + step + "/model.safetensors",
         fs::file_size(run_folder + "/latest/model.safetensors") - 9);
  expect_run(resume, 1, {"no older checkpoint of the run is undamaged"});
  expect_run(resume + "=previous", 1, {"no undamaged checkpoint"});
}

}  // namespace
}  // namespace furious
