#include "model/plan.h"

#include <algorithm>
#include <set>

#include "model/little.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

std::vector<std::string_view> names_of(const Plan& plan) {
  std::vector<std::string_view> names;
  for (const Op& op : plan.ops) names.push_back(name_of(op));
  return names;
}

TEST(Plan, OfTwoMamba) {
  const Plan plan = plan_layer(little(preset("2mamba")));
  EXPECT_EQ(names_of(plan),
            (std::vector<std::string_view>{"rms_norm", "linear", "conv", "split", "head_function", "mixer", "linear",
                                           "rms_norm", "linear", "swiglu", "linear"}));
  EXPECT_EQ(plan.values[plan.mixer_values].name, "v");
  EXPECT_EQ(plan.weight("self_attn.A_log"), kNo);
  EXPECT_EQ(plan.weights[plan.weight("self_attn.conv1d.weight")].shape[1], 2);
}

TEST(Plan, OfMambaTwo) {
  const Plan plan = plan_layer(little(preset("mamba2")));
  EXPECT_EQ(names_of(plan),
            (std::vector<std::string_view>{"rms_norm", "linear", "conv", "split", "head_function", "original_decay",
                                           "discretize", "mixer", "d_residual", "linear", "rms_norm", "linear",
                                           "rms_norm", "linear", "swiglu", "linear"}));
}

// For all switches: a value is written once and before it is read, every weight has a reader, and a value is
// released right after its last reader.
TEST(Plan, IsAProgramOfSingleAssignments) {
  Random random(1);
  std::vector<ModelConfig> configs;
  for (const Preset& preset : presets()) configs.push_back(little(preset));
  for (int i = 0; i < 40; ++i) configs.push_back(random_config(random));
  for (const ModelConfig& config : configs) {
    const Plan plan = plan_layer(config);
    std::set<Value> written{plan.input}, released;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      for (const Value v : inputs_of(plan.ops[i])) {
        ASSERT_TRUE(written.contains(v)) << config.arch << ": " << plan.values[v].name;
        ASSERT_FALSE(released.contains(v)) << config.arch << ": " << plan.values[v].name;
      }
      for (const Value v : outputs_of(plan.ops[i])) ASSERT_TRUE(written.insert(v).second) << plan.values[v].name;
      for (const Value v : plan.last_read[i]) ASSERT_TRUE(released.insert(v).second) << plan.values[v].name;
    }
    EXPECT_EQ(written.size(), plan.values.size());
    EXPECT_EQ(released.size() + 1, plan.values.size());
    EXPECT_FALSE(released.contains(plan.output));
    std::set<std::string> names;
    for (const WeightInfo& weight : plan.weights) EXPECT_TRUE(names.insert(weight.name).second) << weight.name;
  }
}

TEST(Plan, RefusesWhatCannotWork) {
  ModelConfig config = little(preset("2mamba"));
  config.qk_dim = 3;
  expect_error([&] { plan_layer(config); }, {"head dimension 3"});
}

}  // namespace
}  // namespace furious
