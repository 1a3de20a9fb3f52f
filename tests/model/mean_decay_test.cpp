#include "model/mean_decay.h"

#include "model/little.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

TEST(MeanDecay, IsSetInEveryLayerOfEveryPresetWithADecay) {
  Random random(3);
  int64_t without = 0;
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const ModelConfig config = little(preset);
    if (config.block.decay == DecayKind::none) {
      ++without;
      expect_error([&] { with_settable_decay(config); }, {preset.name, "no decay"});
      EXPECT_TRUE(mean_log_decays(LanguageModel(config, 7), random_tokens(random, {1, 5}, 23)).empty());
      continue;
    }
    const LanguageModel model(with_settable_decay(config), 7);
    const Tensor tokens = random_tokens(random, {1, 40}, config.vocabulary);
    for (const double mean : {-0.001, -0.3, -2.0}) {
      set_mean_log_decay(model, tokens, mean);
      const std::vector<double> found = mean_log_decays(model, tokens);
      ASSERT_EQ(found.size(), 2u);
      for (const double each : found) EXPECT_NEAR(each, mean, 1e-4 * -mean);
    }
  }
  EXPECT_GT(without, 3);
  EXPECT_LT(without, static_cast<int64_t>(presets().size()) / 2);
}

// The switches that no preset has.
TEST(MeanDecay, IsSetForEveryKindOfDecay) {
  Random random(4);
  for (const DecayKind kind : {DecayKind::softplus_dt, DecayKind::softplus2, DecayKind::silu}) {
    ModelConfig config = little(preset("2mamba-outnorm-dt"));
    config.block.decay = kind;
    const LanguageModel model(with_settable_decay(config), 7);
    const Tensor tokens = random_tokens(random, {1, 40}, config.vocabulary);
    set_mean_log_decay(model, tokens, -0.05);
    for (const double each : mean_log_decays(model, tokens)) EXPECT_NEAR(each, -0.05, 1e-5);
  }
}

// New weights: softplus(0).
TEST(MeanDecay, IsThatOfTheMixersInput) {
  Random random(5);
  const LanguageModel model(little(preset("2mamba")), 7);
  for (const double each : mean_log_decays(model, random_tokens(random, {2, 40}, 23))) EXPECT_NEAR(each, -0.69, 0.05);
}

TEST(MeanDecay, RefusesWhatIsNotNegative) {
  Random random(6);
  const ModelConfig config = little(preset("2mamba"));
  const Tensor tokens = random_tokens(random, {1, 5}, 23);
  const LanguageModel settable(with_settable_decay(config), 7), not_settable(config, 7);
  for (const double mean : {0.0, 0.1, std::nan("")})
    expect_error([&] { set_mean_log_decay(settable, tokens, mean); }, {"not negative", "-0.001"});
  expect_error([&] { set_mean_log_decay(not_settable, tokens, -0.1); }, {"2mamba", "with_settable_decay"});
}

}  // namespace
}  // namespace furious
