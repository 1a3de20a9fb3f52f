#include "model/checkpoint.h"

#include "model/safetensors.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;

constexpr int64_t kVocabulary = 23;

ModelConfig little(const Preset& preset) {
  ModelConfig config;
  config.arch = preset.name;
  config.block = preset.block;
  config.vocabulary = kVocabulary;
  config.hidden = 24;
  config.intermediate = 32;
  config.layers = 2;
  config.q_heads = config.k_heads = config.v_heads = 3;
  config.head_dim = 8;
  return config;
}

// A model whose every parameter matters.
LanguageModel random_model(const ModelConfig& config, Random& random) {
  return LanguageModel(
      config, [&](const std::string&, const Tensor& out) { copy(out, random.normal_tensor(out.shape(), 0.3)); });
}

Tensor random_tokens(Random& random, int64_t length = 9) {
  std::vector<int32_t> tokens(length);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.integer(0, kVocabulary - 1));
  return int_tensor_of(tokens, {1, length});
}

void expect_same_logits(const LanguageModel& a, const LanguageModel& b, Random& random) {
  const Tensor tokens = random_tokens(random);
  EXPECT_TRUE(same_bits(a.logits(tokens), b.logits(tokens)));
}

TEST(Checkpoint, EveryPresetComesBack) {
  Random random(1);
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const TemporaryDirectory directory;
    const LanguageModel model = random_model(little(preset), random);
    save_model(directory.path(), model);
    EXPECT_EQ(load_config(directory.path()), model.config());
    const LanguageModel loaded = load_model(directory.path(), preset.name);
    EXPECT_EQ(loaded.config(), model.config());
    expect_same_logits(model, loaded, random);
  }
}

}  // namespace
}  // namespace furious
