// `furious presets`, by running the binary.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/run.h"
#include "data/corpus.h"
#include "model/config.h"
#include "model/plan.h"

namespace furious {
namespace {

using testing::expect_run;
using testing::run;
using testing::RunResult;
using testing::TemporaryFolder;

TEST(PresetsCommand, ListsEveryPresetWithin120Columns) {
  const RunResult result = run("presets --vocab 2147483647 --size medium");
  ASSERT_EQ(result.code, 0) << result.output;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 120u) << line;
  for (const Preset& preset : presets()) {
    EXPECT_NE(result.output.find("\n" + preset.name + " "), std::string::npos) << preset.name;
    EXPECT_NE(result.output.find("  " + preset.description + "\n"), std::string::npos) << preset.name;
  }
}

TEST(PresetsCommand, NumbersMatchTheModels) {
  const int64_t parameters = parameter_count(model_config("2mamba", "small", 32000));
  const int64_t numbers = cache_numbers(model_config("softmax", "tiny", 32000), 8192);
  expect_run("presets", 0,
             {fmt::format("{:.1f}M", static_cast<double>(parameters) / 1e6), "vocabulary of 32000", "size small"});
  expect_run("presets --size tiny", 0, {fmt::format("{:.2f}", static_cast<double>(numbers) * 4 / 1e6), "size tiny"});
}

TEST(PresetsCommand, Json) {
  const TemporaryFolder folder;
  const std::string path = folder.write("presets.json", "old");
  expect_run("presets --vocab 1000 --size mini --json " + path, 0, {"2mamba"});
  const auto json = nlohmann::json::parse(testing::read_file(path));
  EXPECT_EQ(json.at("vocabulary"), 1000);
  EXPECT_EQ(json.at("size"), "mini");
  ASSERT_EQ(json.at("presets").size(), presets().size());
  for (size_t i = 0; i < presets().size(); ++i) {
    const auto& row = json.at("presets")[i];
    const Preset& preset = presets()[i];
    EXPECT_EQ(row.at("name"), preset.name);
    EXPECT_EQ(row.at("description"), preset.description);
    for (const Size& size : sizes())
      EXPECT_EQ(row.at("parameters").at(size.name), parameter_count(model_config(preset.name, size.name, 1000)));
    const ModelConfig config = model_config(preset.name, "mini", 1000);
    for (const int64_t length : {1024, 8192, 65536})
      EXPECT_EQ(row.at("sequence_bytes").at(std::to_string(length)), 4 * cache_numbers(config, length));
  }
}

TEST(PresetsCommand, ShowsTheSwitchesOfOnePreset) {
  expect_run("presets --preset mamba2-paper --size tiny", 0,
             {"1 head of 32 with queries and keys of 128", "gated branch of 96 channels", "decay          original",
              "conv_bias      false", "scale          1.0"});
  expect_run("presets --preset fox", 0, {"16 heads of 64", "decay          log_sigmoid", "decay_bias     true"});
  expect_run("presets --preset 2mamba-square-mask", 0, {"square_mask    true"});
  expect_run("presets --preset foxx", 2, {"unknown architecture \"foxx\"", "\"fox\""});
  const TemporaryFolder folder;
  expect_run("presets --preset mamba2-paper --size tiny --json " + folder.path("one.json"), 0, {});
  const auto json = nlohmann::json::parse(testing::read_file(folder.path("one.json"))).at("presets");
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(json[0].at("qk_dim"), 128);
  EXPECT_EQ(json[0].at("branch"), 96);
  EXPECT_EQ(json[0].at("heads"), 1);
  EXPECT_EQ(json[0].at("switches").at("z_gate_bias"), false);
}

TEST(PresetsCommand, RefusesAnUnwritableFileFirst) {
  const TemporaryFolder folder;
  const std::string file = folder.write("file", "kept");
  for (const std::string& path :
       {folder.path("none/presets.json"), file + "/presets.json", folder.path(""), std::string("/dev/null")}) {
    const RunResult result = run("presets --json " + path);
    EXPECT_EQ(result.code, 1) << result.output;
    EXPECT_NE(result.output.find(path), std::string::npos) << result.output;
    EXPECT_EQ(result.output.find("2mamba"), std::string::npos) << result.output;
  }
  EXPECT_EQ(testing::read_file(file), "kept");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST(PresetsCommand, FollowsASymbolicLink) {
  const TemporaryFolder folder;
  const std::string file = folder.write("file", "old");
  const std::string link = folder.path("link");
  std::filesystem::create_symlink(file, link);
  expect_run("presets --json " + link, 0, {});
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_NE(testing::read_file(file), "old");
}

TEST(PresetsCommand, Usage) {
  expect_run("presets --help", 0, {"Example: furious presets", "--size", "--vocab", "--json", "small", "32000"});
  expect_run("presets --size smal", 2, {"--size", "unknown size \"smal\"", "did you mean \"small\""});
  expect_run("presets --vocab 0", 2, {"--vocab"});
  expect_run("presets --colour red", 2, {"--colour"});
  expect_run("preset", 2, {"did you mean \"presets\""});
}

}  // namespace
}  // namespace furious
