#include "train/log.h"

#include <cmath>
#include <fstream>

#include "base/file.h"
#include "data/corpus.h"

namespace furious {
namespace {

using testing::TemporaryFolder;

TEST(Log, LinesRoundTrip) {
  TrainStep step;
  step.step = 7;
  step.loss = 3.1415926535897931;
  step.lr = 1e-4 / 3;
  step.gradient_norm = 0.5;
  step.tokens_per_second = 12345.678;
  step.mfu = 0.25;
  step.memory = 123456789;
  step.seconds = 12.5;
  step.time = 1763471234.125;
  step.total_tokens = int64_t{1} << 50;
  step.total_flops = 1e21;
  TrainStep tested = step;
  tested.step = 8;
  tested.test_loss = 2.5;
  tested.value_rms = {0.1, 1.0 / 3};
  tested.sample = "two \"lines\"\nof text";
  const TemporaryFolder folder;
  folder.write("log.jsonl", to_line(step) + "\n" + to_line(tested) + "\n" + diverged_line(9, "the loss is no number") +
                                "\n{\"step\": 10, \"lo");
  const RunLog log = read_log(folder.path(""));
  ASSERT_EQ(log.steps.size(), 2u);
  EXPECT_EQ(log.diverged, "the loss is no number");
  for (const size_t i : {0, 1}) {
    const TrainStep& expected = i == 0 ? step : tested;
    EXPECT_EQ(to_line(log.steps[i]), to_line(expected));
    EXPECT_EQ(log.steps[i].step, expected.step);
    EXPECT_EQ(log.steps[i].loss, expected.loss);
    EXPECT_EQ(log.steps[i].test_loss, expected.test_loss);
    EXPECT_EQ(log.steps[i].memory, expected.memory);
    EXPECT_EQ(log.steps[i].seconds, expected.seconds);
    EXPECT_EQ(log.steps[i].time, expected.time);
    EXPECT_EQ(log.steps[i].total_tokens, expected.total_tokens);
    EXPECT_EQ(log.steps[i].total_flops, expected.total_flops);
    EXPECT_EQ(log.steps[i].value_rms, expected.value_rms);
    EXPECT_EQ(log.steps[i].sample, expected.sample);
  }
}

TEST(Log, SkipsLinesThatAreNotSteps) {
  const TemporaryFolder folder;
  EXPECT_TRUE(read_log(folder.path("nowhere")).steps.empty());
  folder.write("log.jsonl", "\n[1]\n{}\n{\"step\": \"x\"}\n{\"step\": 1.5}\n{\"step\": 3, \"loss\": null}\nnonsense\n");
  const RunLog log = read_log(folder.path(""));
  ASSERT_EQ(log.steps.size(), 1u);
  EXPECT_EQ(log.steps[0].step, 3);
  EXPECT_TRUE(std::isnan(log.steps[0].loss));
  EXPECT_TRUE(log.diverged.empty());
}

// What an earlier version wrote stays as it is: a number that is not known is not 0.
TEST(Log, NumbersThatAreNotKnownAreLeftOut) {
  const std::string line =
      R"({"step":3,"loss":2.5,"lr":0.1,"gradient_norm":null,"tokens_per_second":7.0,"mfu":0.5,"test_loss":2.25})";
  const TemporaryFolder folder;
  folder.write("log.jsonl", line + "\n" + R"({"step":4,"memory":-1,"seconds":1e300,"total_tokens":"x"})" + "\n");
  const RunLog log = read_log(folder.path(""));
  ASSERT_EQ(log.steps.size(), 2u);
  EXPECT_EQ(to_line(log.steps[0]), line);
  EXPECT_EQ(log.steps[1].memory, 0);
  EXPECT_EQ(log.steps[1].total_tokens, 0);
}

TEST(LogFollower, ReadsWhatIsAdded) {
  const TemporaryFolder folder;
  const auto line = [](int64_t number) {
    TrainStep step;
    step.step = number;
    return to_line(step) + "\n";
  };
  const auto steps = [](const LogFollower& follower) {
    std::vector<int64_t> numbers;
    for (const TrainStep& step : follower.log().steps) numbers.push_back(step.step);
    return numbers;
  };
  using Steps = std::vector<int64_t>;
  LogFollower follower(folder.path(""));
  follower.update();
  EXPECT_EQ(steps(follower), Steps());
  const auto append = [&](const std::string& text) {
    std::ofstream(folder.path("log.jsonl"), std::ios::app) << text;
    follower.update();
  };
  append(line(1) + line(2).substr(0, 5));
  EXPECT_EQ(steps(follower), Steps{1});
  append(line(2).substr(5, 9));
  EXPECT_EQ(steps(follower), Steps{1});
  append(line(2).substr(14) + line(3));
  EXPECT_EQ(steps(follower), (Steps{1, 2, 3}));
  append("");
  EXPECT_EQ(steps(follower), (Steps{1, 2, 3}));
  append(diverged_line(4, "why") + "\n");
  EXPECT_EQ(follower.log().diverged, "why");
  // A resumed run replaces the file by a shorter one, which then grows beyond the old size.
  write_text(folder.path("log.jsonl"), line(1) + line(2));
  append(line(3) + line(4) + line(5));
  EXPECT_EQ(steps(follower), (Steps{1, 2, 3, 4, 5}));
  EXPECT_EQ(follower.log().diverged, "");
  // Cut in place.
  std::ofstream(folder.path("log.jsonl"), std::ios::trunc) << line(7);
  follower.update();
  EXPECT_EQ(steps(follower), Steps{7});
  std::filesystem::remove(folder.path("log.jsonl"));
  follower.update();
  EXPECT_EQ(steps(follower), Steps());
}

}  // namespace
}  // namespace furious
