#include "train/log.h"

#include <cmath>

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

}  // namespace
}  // namespace furious
