// Processes that are killed repeatedly at random moments finally write the same files as an uninterrupted
// one.
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <sstream>

#include "cli/run.h"
#include "model/safetensors.h"
#include "train/run.h"
#include "train/small_run.h"
#include "train/training_checkpoint.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;
using Clock = std::chrono::steady_clock;

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// Runs the binary and kills it some milliseconds after it has changed the result of `progress` so many times; returns
// whether it was killed. By time alone, the number of kills would depend on what else the machine does.
bool killed_after(const std::string& command, const std::function<std::string()>& progress, int64_t changes,
                  int64_t milliseconds) {
  std::string last = progress();
  Clock::time_point end = Clock::now() + std::chrono::milliseconds(milliseconds);
  const int status = run_and_signal(words(command), SIGKILL, [&] {
    if (changes == 0) return Clock::now() >= end;
    if (std::string now = progress(); now != last) {
      last = std::move(now);
      if (--changes == 0) end = Clock::now() + std::chrono::milliseconds(milliseconds);
    }
    return false;
  });
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << command;
  return WIFSIGNALED(status);
}

// Weights, moments and everything else that a checkpoint has, but for the options, which name the folder.
std::map<std::string, std::string> contents(const std::string& run) {
  std::map<std::string, std::string> files = read_folder(run + "/latest");
  files.erase("training.safetensors");
  const SafetensorsReader reader(run + "/latest/training.safetensors");
  for (const StoredTensor& tensor : reader.tensors())
    files[tensor.name] = std::string(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  return files;
}

TEST(KillTest, TrainingResumesBitForBit) {
  Random random(20);
  const TemporaryFolder folder;
  const std::string data = small_data(folder);
  const auto command = [&](const std::string& out) {
    return fmt::format(
        "train --data {} --out {} --hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 4 --length 24 --threads 1 "
        "--device cpu --eval-every 7 --eval-batches 1 --steps 300 --save-every 1 --resume",
        data, folder.path(out));
  };
  ASSERT_EQ(run(command("whole")).code, 0);
  const std::string out = folder.path("killed");
  const auto newest = [&] {
    std::error_code ignored;
    return fs::read_symlink(out + "/latest", ignored).string();
  };
  int kills = 0;
  for (int i = 0; i < 12; ++i) {
    // By turns while it starts, and in one of the next steps.
    const int64_t steps = i % 2 == 0 ? 0 : random.integer(1, 20);
    kills += killed_after(command("killed"), newest, steps, random.integer(0, steps == 0 ? 60 : 20)) ? 1 : 0;
    // Every checkpoint under its final name is complete at every moment.
    for (const fs::path& checkpoint : checkpoints_in(out))
      ASSERT_EQ(checkpoint_damage(checkpoint), std::vector<std::string>()) << "after " << kills << " kills";
  }
  EXPECT_GE(kills, 3) << "too fast to be killed";
  ASSERT_EQ(run(command("killed")).code, 0);
  EXPECT_TRUE(contents(out) == contents(folder.path("whole")));
}

TEST(KillTest, TokenizingResumesByteForByte) {
  Random random(21);
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 40'000; ++i) text += json_line(fmt::format("{} {}", i, random_sentence(random, 60)));
  const std::string input = folder.write("in.jsonl", text);
  const auto command = [&](const std::string& out) {
    return fmt::format("tokenize {} --tokenizer byte --out {} --shard-tokens 300000 --test-fraction 0.01 --threads 2",
                       input, folder.path(out));
  };
  ASSERT_EQ(run(command("whole")).code, 0);
  const auto written = [&] {
    std::error_code ignored;
    const auto time = fs::last_write_time(folder.path("killed/progress.json"), ignored);
    return std::to_string(time.time_since_epoch().count());
  };
  int kills = 0;
  while (kills < 8 && killed_after(command("killed"), written, random.integer(0, 3), random.integer(0, 60))) ++kills;
  EXPECT_GE(kills, 2) << "too fast to be killed";
  ASSERT_EQ(run(command("killed")).code, 0);
  EXPECT_TRUE(read_folder(folder.path("killed")) == read_folder(folder.path("whole")));
}

}  // namespace
}  // namespace furious
