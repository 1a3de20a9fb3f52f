#include "decode/token_plan.h"

#include <algorithm>
#include <set>

#include "model/little.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;
using Kind = FusedLinear::Kind;

template <class T>
std::vector<T> all_of(const TokenPlan& plan) {
  std::vector<T> found;
  for (const TokenOp& op : plan.ops)
    if (const auto* own = std::get_if<T>(&op.op)) found.push_back(*own);
  return found;
}

TEST(TokenPlan, OfTwoMambaIsFiveOperations) {
  const TokenPlan plan = plan_tokens(plan_layer(little(preset("2mamba"))));
  const std::vector<FusedLinear> linears = all_of<FusedLinear>(plan);
  ASSERT_EQ(linears.size(), 4u);
  ASSERT_EQ(linears[0].parts.size(), 2u);
  EXPECT_EQ(linears[0].parts[0].kind, Kind::value);
  EXPECT_NE(linears[0].parts[0].conv_weight, kNo);
  EXPECT_EQ(linears[0].parts[1].kind, Kind::softplus);
  EXPECT_EQ(linears[0].parts[1].factor, -1);
  EXPECT_EQ(linears[1].parts[0].kind, Kind::add);
  EXPECT_EQ(linears[1].norm, kNo);
  EXPECT_EQ(linears[2].parts[0].kind, Kind::swiglu);
  EXPECT_NE(linears[2].norm, kNo);
  EXPECT_EQ(linears[3].parts[0].kind, Kind::add);
  EXPECT_EQ(all_of<FusedMixer>(plan).size(), 1u);
  ASSERT_EQ(all_of<Op>(plan).size(), 1u);  // a view
  EXPECT_EQ(name_of(all_of<Op>(plan)[0]), "split");
}

TEST(TokenPlan, OfMambaTwo) {
  const TokenPlan plan = plan_tokens(plan_layer(little(preset("mamba2"))));
  const FusedLinear first = all_of<FusedLinear>(plan).at(0);
  ASSERT_EQ(first.parts.size(), 3u);  // q, k and v; z; dt with the decay
  EXPECT_EQ(plan.plan.weights[first.parts[1].weight].name, "self_attn.z_gate_proj.weight");
  EXPECT_NE(first.parts[2].a_log, kNo);
  EXPECT_NE(first.parts[2].decay, kNo);
  const FusedMixer mixer = all_of<FusedMixer>(plan).at(0);
  EXPECT_EQ(mixer.dt, first.parts[2].y);
  EXPECT_NE(mixer.d, kNo);
  EXPECT_EQ(plan.plan.values[mixer.v].name, "v");
  const FusedLinear out = all_of<FusedLinear>(plan).at(1);
  EXPECT_EQ(out.gate, first.parts[1].y);
  EXPECT_NE(out.norm, kNo);
}

TEST(TokenPlan, FusesRotaryPositionsWithTheMixer) {
  const TokenPlan plan = plan_tokens(plan_layer(little(preset("softmax"))));
  const FusedMixer mixer = all_of<FusedMixer>(plan).at(0);
  ASSERT_TRUE(mixer.rope.has_value());
  EXPECT_EQ(plan.plan.values[mixer.q].name, "q");
  EXPECT_EQ(plan.plan.values[mixer.k].name, "k");
}

TEST(TokenPlan, FusesActivationsOfQueriesAndKeysWithTheirProduct) {
  const TokenPlan plan = plan_tokens(plan_layer(little(preset("linear"))));
  const FusedLinear first = all_of<FusedLinear>(plan).at(0);
  EXPECT_EQ(first.parts[0].qk_activation, Activation::relu);
  const FusedMixer mixer = all_of<FusedMixer>(plan).at(0);
  const ModelConfig config = little(preset("linear"));
  EXPECT_EQ(plan.places[mixer.q].value, first.parts[0].y);
  EXPECT_EQ(plan.places[mixer.q].column, 0);
  EXPECT_EQ(plan.places[mixer.k].column, config.q_heads * config.qk_dim);
  EXPECT_EQ(first.parts[0].qk_width, (config.q_heads + config.k_heads) * config.qk_dim);
}

// Functions that no fused kernel computes remain separate operations.
TEST(TokenPlan, KeepsOtherFunctionsUnfused) {
  ModelConfig config = little(preset("2mamba"));
  config.block.decay = DecayKind::log_sigmoid;
  const TokenPlan plan = plan_tokens(plan_layer(config));
  const std::vector<Op> rest = all_of<Op>(plan);
  EXPECT_TRUE(std::ranges::any_of(rest, [](const Op& op) { return name_of(op) == "head_function"; }));
  EXPECT_EQ(all_of<FusedLinear>(plan).at(0).parts.at(1).kind, Kind::value);
}

// Every operation runs, and none before its inputs, with fused operations or with those they cover.
TEST(TokenPlan, CoversThePlanInOrder) {
  Random random(2);
  std::vector<ModelConfig> configs;
  for (const Preset& preset : presets()) configs.push_back(little(preset));
  for (int i = 0; i < 40; ++i) configs.push_back(random_config(random));
  for (const ModelConfig& config : configs) {
    const Plan plan = plan_layer(config);
    const TokenPlan tokens = plan_tokens(plan);
    std::set<int> run;
    std::set<Value> written{plan.input};
    for (const TokenOp& op : tokens.ops)
      for (const int i : op.covers) {
        run.insert(i);
        for (const Value v : inputs_of(plan.ops[i]))
          ASSERT_TRUE(written.contains(v))
              << config.arch << ": " << name_of(plan.ops[i]) << " reads " << plan.values[v].name;
        for (const Value v : outputs_of(plan.ops[i])) written.insert(v);
      }
    EXPECT_EQ(run.size(), plan.ops.size()) << config.arch;
  }
}

}  // namespace
}  // namespace furious
