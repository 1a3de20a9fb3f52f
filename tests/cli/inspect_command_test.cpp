// `furious inspect`, by running the binary.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "cli/run.h"
#include "model/checkpoint.h"
#include "model/little.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

class InspectCommand : public ::testing::Test {
 protected:
  void save(const char* arch) const {
    std::filesystem::create_directories(model_);
    save_model(model_, LanguageModel(little(preset(arch)), 1));
  }

  TemporaryDirectory directory_;
  std::filesystem::path model_ = directory_ / "model", json_ = directory_ / "out.json";
};

TEST_F(InspectCommand, SaysWhatAModelIsAndNeeds) {
  save("2mamba");
  const ModelConfig config = little(preset("2mamba"));
  expect_run(fmt::format("inspect {} --json {}", model_.string(), json_.string()), 0,
             {"furious", "2 layers of width 24", "vocabulary 23", "squared", "softplus", "weights in memory",
              "smaller than a KV cache from 21 tokens on"});
  const auto json = nlohmann::json::parse(read_text(json_));
  EXPECT_EQ(json["parameters"], parameter_count(config));
  EXPECT_EQ(json["weight_bytes"]["f32"], 4 * parameter_count(config));
  EXPECT_EQ(json["sequence_bytes"]["1024"], 4 * cache_numbers(config, 1024));
  EXPECT_EQ(json["break_even"], 21);  // 36 rows of 9 numbers in a head, 16 numbers of a token
  for (const auto& one : json["memory"]) EXPECT_TRUE(one["fits"]) << one.dump();
  EXPECT_EQ(json["memory"][0]["needed"], 4 * parameter_count(config));
  save("softmax");
  expect_run("inspect " + model_.string(), 0, {"no state of constant size"});
}

TEST_F(InspectCommand, SaysWhatHeadsShare) {
  ModelConfig config = little(preset("2mamba"));
  config.q_heads = 3;
  config.k_heads = config.v_heads = config.decay_heads = 1;
  std::filesystem::create_directories(model_);
  save_model(model_, LanguageModel(config, 1));
  // 36 rows of 9 numbers.
  expect_run("inspect " + model_.string(), 0, {"1.3 KB of each layer for 3 heads that share 1", "decay_heads"});
  config = little(preset("softmax"));
  config.block.window = 17;
  save_model(model_, LanguageModel(config, 1));
  expect_run(fmt::format("inspect {} --json {}", model_.string(), json_.string()), 0, {"the last 17 tokens"});
  const auto json = nlohmann::json::parse(read_text(json_));
  EXPECT_EQ(json["sequence_bytes"]["1024"], json["sequence_bytes"]["8192"]);
  EXPECT_EQ(json["switches"]["sliding_window"], 17);
}

TEST_F(InspectCommand, SaysWhyAModelIsRefused) {
  save("2mamba");
  write_text(model_ / "config.json", R"({"model_type": "rwkv7"})");
  expect_run("inspect " + model_.string(), 1, {"unknown \"model_type\"", "rwkv7"});
  expect_run("inspect " + (directory_ / "none").string(), 1, {"does not exist"});
}

}  // namespace
}  // namespace furious
