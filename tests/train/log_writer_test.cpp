#include "train/log_writer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "data/corpus.h"
#include "train/event_reader.h"

namespace furious {
namespace {

using namespace furious::testing;
namespace fs = std::filesystem;

TrainStep step_of(int64_t number) {
  TrainStep step;
  step.step = number;
  step.loss = 1.0 / static_cast<double>(number);
  step.lr = 1e-3;
  step.time = 1e9 + static_cast<double>(number);
  step.seconds = 2.0 * static_cast<double>(number);
  step.total_tokens = 100 * number;
  step.memory = 12345;
  return step;
}

std::vector<std::string> event_files(const std::string& folder) {
  std::vector<std::string> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) found.push_back(entry.path().string());
  std::ranges::sort(found);
  return found;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(LogWriter, FormatsByName) {
  EXPECT_TRUE(log_formats_from_names("").empty());
  EXPECT_EQ(log_formats_from_names("tensorboard,csv"), (std::vector{LogFormat::tensorboard, LogFormat::csv}));
  expect_error([] { log_formats_from_names("csv,tensorbord"); }, {"\"tensorbord\"", "did you mean \"tensorboard\"?"});
  expect_error([] { log_formats_from_names("csv, csv"); }, {"\" csv\""});
}

TEST(LogWriter, WritesOnlyWhatWasAskedFor) {
  const TemporaryFolder folder;
  fs::create_directories(folder.path("run"));
  LogWriter writer(folder.path("run"), {}, {});
  writer.add(step_of(1));
  EXPECT_EQ(read_folder(folder.path("run")).size(), 1u);
  EXPECT_EQ(read_file(folder.path("run/log.jsonl")), to_line(step_of(1)) + "\n");
}

TEST(LogWriter, CsvHasAColumnForEveryNumber) {
  const TemporaryFolder folder;
  LogWriter writer(folder.path(""), {LogFormat::csv}, {step_of(1)});
  TrainStep tested = step_of(2);
  tested.test_loss = 0.75;
  tested.gradient_norm = std::nan("");
  writer.add(tested);
  writer.add_divergence(3, "a reason, with \"quotes\"");
  const std::vector<std::string> lines = lines_of(read_file(folder.path("log.csv")));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0],
            "step,loss,lr,gradient_norm,tokens_per_second,mfu,memory,seconds,time,total_tokens,total_flops,test_loss");
  EXPECT_EQ(lines[1], "1,1.0,0.001,0.0,0.0,0.0,12345,2.0,1000000001.0,100,,");
  EXPECT_EQ(lines[2], "2,0.5,0.001,,0.0,0.0,12345,4.0,1000000002.0,200,,0.75");
  EXPECT_EQ(read_log(folder.path("")).diverged, "a reason, with \"quotes\"");
}

// A running TensorBoard has the points of the old file and reads the new one after it.
TEST(LogWriter, AResumedRunHasEveryStepInOneEventFile) {
  const TemporaryFolder folder;
  {
    LogWriter writer(folder.path(""), {LogFormat::tensorboard}, {});
    for (int64_t i = 1; i <= 5; ++i) writer.add(step_of(i));
  }
  const std::vector<std::string> before = event_files(folder.path(""));
  ASSERT_EQ(before.size(), 1u);
  LogWriter writer(folder.path(""), {LogFormat::tensorboard}, {step_of(1), step_of(2)});
  TrainStep tested = step_of(3);
  tested.test_loss = 0.5;
  tested.value_rms = {1, 2};
  tested.sample = "text";
  writer.add(tested);
  const std::vector<std::string> after = event_files(folder.path(""));
  ASSERT_EQ(after.size(), 2u);
  EXPECT_EQ(after[0], before[0]);  // TensorBoard would not go on from a file that does not exist
  EXPECT_EQ(read_file(after[0]), "");
  const std::vector<ReadEvent> events = read_events(read_file(after[1]));
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_TRUE(events[1].starts_session);
  EXPECT_EQ(events[1].step, 0);
  for (size_t i = 2; i < 5; ++i) {
    const TrainStep expected = step_of(static_cast<int64_t>(i) - 1);
    EXPECT_EQ(events[i].step, expected.step);
    EXPECT_EQ(events[i].time, expected.time);
    EXPECT_EQ(events[i].numbers.at("train/loss"), static_cast<float>(expected.loss));
    EXPECT_EQ(events[i].numbers.at("train/total_tokens"), static_cast<float>(expected.total_tokens));
    EXPECT_EQ(events[i].numbers.contains("test/loss"), i == 4);
    EXPECT_FALSE(events[i].numbers.contains("train/total_flops"));  // not known
  }
  EXPECT_EQ(events[4].numbers.at("value_rms/layer_01"), 2.0f);
  EXPECT_EQ(events[4].texts.at("sample"), "text");
  const LogWriter again(folder.path(""), {LogFormat::tensorboard}, {step_of(1)});
  const std::vector<std::string> last = event_files(folder.path(""));
  ASSERT_EQ(last.size(), 2u);
  EXPECT_EQ(last[0], after[1]);
}

TEST(LogWriter, NamesTheFileThatCannotBeWritten) {
  const TemporaryFolder folder;
  LogWriter writer(folder.path(""), {LogFormat::csv}, {});
  fs::remove(folder.path("log.csv"));
  fs::create_directory(folder.path("log.csv"));
  expect_error([&] { writer.add(step_of(1)); }, {"log.csv", "is the disk full?"});
}

}  // namespace
}  // namespace furious
