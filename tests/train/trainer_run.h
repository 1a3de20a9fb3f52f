// A training loop on furious::Trainer beside a run with the same options.
#pragma once

#include "support.h"
#include "train/small_run.h"

namespace furious::testing {

// Same losses, gradient norms, learning rates and checkpoints, to the bit. `own`: folder for the trainer's checkpoint.
inline void expect_trainer_equals_run(TrainOptions options, const std::string& own) {
  SCOPED_TRACE(options.device + " " + options.dtype + " " + options.packing);
  options.accumulate = 2;
  options.clip = 1;
  std::vector<TrainStep> steps;
  TrainObserver observer;
  observer.step = [&](const TrainStep& step) { steps.push_back(step); };
  const TrainResult result = train(options, observer);
  ASSERT_EQ(steps.size(), 12u);
  Trainer trainer(options);
  for (const TrainStep& expected : steps) {
    const TrainStep step = trainer.step(trainer.data_batch(expected.step));
    EXPECT_EQ(step.step, expected.step);
    EXPECT_EQ(step.loss, expected.loss) << step.step;
    EXPECT_EQ(step.gradient_norm, expected.gradient_norm) << step.step;
    EXPECT_EQ(step.lr, expected.lr);
    EXPECT_EQ(step.tokens, expected.tokens);
    if (expected.test_loss) {
      EXPECT_EQ(trainer.test_loss(), expected.test_loss);
    }
  }
  trainer.save(own);
  for (const char* file : {"model.safetensors", "training.safetensors", "config.json", "tokenizer_config.json"})
    EXPECT_TRUE(read_file(own + "/" + file) == read_file(result.checkpoint + "/" + file)) << file;
}

}  // namespace furious::testing
