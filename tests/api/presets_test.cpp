#include "furious/presets.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace furious {
namespace {

TEST(Presets, AreListedAndHaveConfigurations) {
  const std::vector<PresetInfo> infos = preset_infos();
  EXPECT_TRUE(std::ranges::any_of(infos, [](const PresetInfo& info) { return info.name == "2mamba"; }));
  for (const PresetInfo& info : infos) {
    EXPECT_FALSE(info.description.empty()) << info.name;
    const std::string config = preset_config(info.name, "tiny", 258);
    EXPECT_NE(config.find("\"arch\": \"" + info.name + "\""), std::string::npos) << config;
    EXPECT_EQ(normal_config(config), config);
  }
}

TEST(Presets, ReadALlama) {
  const std::string config = normal_config(
      R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2})");
  EXPECT_NE(config.find("\"arch\": \"softmax\""), std::string::npos) << config;
}

TEST(Presets, RefuseWhatCannotWork) {
  EXPECT_THROW(preset_config("2mambo", "tiny", 258), Error);
  EXPECT_THROW(preset_config("2mamba", "tyni", 258), Error);
  EXPECT_THROW(preset_config("2mamba", "tiny", 0), Error);
  EXPECT_THROW(normal_config("{"), Error);
  EXPECT_THROW(normal_config("{}"), Error);
}

}  // namespace
}  // namespace furious
