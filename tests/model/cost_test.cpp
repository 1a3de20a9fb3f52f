#include "model/cost.h"

#include "model/plan.h"
#include "support.h"

namespace furious {
namespace {

// The costs of the operations add up to those of a step, which are counted from the number of parameters.
TEST(TrainingCosts, AddUpToTheStep) {
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const ModelConfig config = model_config(preset.name, "mini", 4096);
    double flops = 0;
    for (const WorkCost& cost : training_costs(config, 2, 128, {}, DType::f32)) {
      flops += cost.flops;
      EXPECT_GT(cost.bytes, 0) << cost.label.role;
    }
    EXPECT_NEAR(flops / training_flops(config, 2, 128), 1, 0.01);
  }
}

TEST(TrainingCosts, CountBytesOfATensorOnce) {
  const ModelConfig config = model_config("2mamba", "mini", 4096);
  const double tokens = 2 * 128, hidden = 384, inner = 768, layers = 8;
  const auto bytes = [&](const WorkLabel& label, StepPass pass, DType dtype) {
    for (const WorkCost& cost : training_costs(config, 2, 128, {}, dtype))
      if (cost.label == label && cost.pass == pass) return cost.bytes;
    return 0.0;
  };
  const WorkLabel swiglu{"activation", "swiglu"}, output{"output product", "linear"};
  EXPECT_EQ(bytes(swiglu, StepPass::forward, DType::f32), layers * 3 * 4 * tokens * inner);
  EXPECT_EQ(bytes(swiglu, StepPass::backward, DType::f32), layers * 5 * 4 * tokens * inner);
  EXPECT_EQ(bytes(swiglu, StepPass::backward, DType::bf16), layers * 5 * 2 * tokens * inner);
  // x, residual, result; the gradient of the result, x, its gradient. Weights are f32.
  EXPECT_EQ(bytes(output, StepPass::forward, DType::bf16), layers * (3 * 2 * tokens * hidden + 4 * hidden * hidden));
  EXPECT_EQ(bytes(output, StepPass::backward, DType::bf16), layers * (3 * 2 * tokens * hidden + 8 * hidden * hidden));
  EXPECT_EQ(bytes(kOptimizerWork, StepPass::update, DType::bf16), 32.0 * static_cast<double>(parameter_count(config)));
}

// Beyond a window of one token, what attention costs is linear in the length.
TEST(TrainingCosts, CountTheTokensOfAWindow) {
  ModelConfig config = model_config("softmax", "mini", 4096), short_window = config, long_window = config;
  short_window.block.window = 1;
  long_window.block.window = 128;
  const auto flops = [](const ModelConfig& c, int64_t length) { return training_flops(c, 1, length); };
  EXPECT_EQ(flops(long_window, 128), flops(config, 128));
  EXPECT_LT(flops(long_window, 256), flops(config, 256));
  EXPECT_NEAR(flops(short_window, 256) / flops(short_window, 128), 2, 1e-12);
}

TEST(TrainingCosts, EveryOperationHasARole) {
  for (const Preset& preset : presets()) {
    const Plan plan = plan_layer(model_config(preset.name, "mini", 4096));
    for (const Op& op : plan.ops) EXPECT_NE(label_of(plan, op).role, "products") << preset.name;
  }
}

}  // namespace
}  // namespace furious
