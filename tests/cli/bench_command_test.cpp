// `furious bench` and `furious --version`, by running the binary.
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "base/file.h"
#include "cli/run.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using testing::expect_run;

TEST(Command, VersionNamesCompilerAndDevices) {
  expect_run("--version", 0, {"furious 0.", "compiler", "SIMD", "matrix products", "cpu"});
  expect_run("", 0, {"bench", "--help"});
}

TEST(BenchCommand, WritesTheFieldsOfARow) {
  const testing::TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  expect_run("bench mixer --preset 2mamba --form auto,chunked --length 64 --heads 1 --dim 8 --backward --json " +
                 path.string(),
             0, {"GFLOP/s", "forward+backward"});
  const auto rows = nlohmann::json::parse(read_text(path));
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].at("preset"), "2mamba");
  EXPECT_EQ(rows[0].at("form"), "auto");
  EXPECT_EQ(rows[2].at("form"), "chunked");
  EXPECT_EQ(rows[0].at("length"), 64);
  EXPECT_EQ(rows[0].at("pass"), "forward");
  EXPECT_EQ(rows[1].at("pass"), "forward+backward");
  for (const auto& row : rows) {
    EXPECT_GT(row.at("ms").get<double>(), 0);
    EXPECT_GT(row.at("gflops").get<double>(), 0);
    EXPECT_NEAR(row.at("ratio").get<double>(), row.at("ms").get<double>() / row.at("floor_ms").get<double>(), 1e-9);
  }
}

TEST(BenchCommand, SweepsDimensionsScoresAndForms) {
  const testing::TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  expect_run("bench mixer --sweep --device cpu --length 16 --heads 1 --json " + path.string(), 0,
             {"ratio", "2mamba-e"});
  const auto rows = nlohmann::json::parse(read_text(path));
  ASSERT_EQ(rows.size(), 11u * 5);  // two forms, but one of the exponential score
  std::set<std::tuple<std::string, std::string, int64_t, int64_t>> measured;
  for (const auto& row : rows) {
    measured.emplace(row.at("preset"), row.at("ran"), row.at("qk_dim"), row.at("v_dim"));
    EXPECT_EQ(row.at("pass"), "forward+backward");
    EXPECT_EQ(row.at("kernel"), "cpu");
    EXPECT_GT(row.at("ratio").get<double>(), 0);
  }
  EXPECT_EQ(measured.size(), rows.size());
  EXPECT_TRUE(measured.contains({"2mamba", "chunked", 128, 64}));
  EXPECT_TRUE(measured.contains({"2mamba-e", "parallel", 256, 256}));
  expect_run("bench mixer --sweep --dim 64", 2, {"--sweep", "--dim"});
}

// What a row cannot measure is said in it, and the others are measured.
TEST(BenchCommand, ARowOfASweepThatFailsSaysWhy) {
  const testing::TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  expect_run("bench mixer --sweep --device cpu --length 16 --heads 1 --form parallel --mixer-precision tf32 --json " +
                 path.string(),
             0, {"2mamba-e", "tf32"});
  for (const auto& row : nlohmann::json::parse(read_text(path)))
    EXPECT_NE(row.at("error").get<std::string>().find("tf32"), std::string::npos);
}

TEST(BenchCommand, TimesTheRecurrentForm) {
  expect_run("bench recurrent --preset mamba2 --length 3,300 --heads 2 --dim 8", 0, {"us/token", "      300 "});
  expect_run("bench recurrent --preset mamba3", 2, {"did you mean \"mamba2\""});
}

TEST(BenchCommand, TimesDecoding) {
  expect_run("bench decode --preset mamba2 --size mini --vocab 300 --batch 1,2 --context 3 --tokens 2", 0,
             {"tokens/s", "of floor", "     2 "});
  expect_run("bench serve --vocab 300 --clients 1,3 --prompt 5 --tokens 4 --long-prompt 0", 0,
             {"clients", "cpu ratio"});
  expect_run("bench decode --preset mamba3", 1, {"did you mean \"mamba2\""});
}

// A published model's shape, with weights made in the dtype that they are kept in.
TEST(BenchCommand, TimesTheModelOfAConfiguration) {
  const testing::TemporaryDirectory directory;
  const auto config = directory / "config.json", rows = directory / "rows.json";
  write_text(config, R"({"model_type": "brumby", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
                         "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 16})");
  const std::string command = "bench decode --device cpu --config " + config.string();
  expect_run(command + " --dtype bf16 --batch 1,3 --context 7 --tokens 2 --json " + rows.string(), 0,
             {"prompt t/s", "of floor", config.string()});
  const auto json = nlohmann::json::parse(read_text(rows));
  ASSERT_EQ(json.size(), 2u);
  // Matrices of two layers and of the output.
  const int64_t layer = 32 * (10 + 2 + 2) * 16 + 32 * 2 + 32 * 160 + 3 * 32 * 48;
  EXPECT_GE(json[0].at("weight_bytes").get<int64_t>(), 2 * (2 * layer + 97 * 32));
  EXPECT_LE(json[0].at("weight_bytes").get<int64_t>(), 2 * (2 * layer + 97 * 32) + 4096);
  EXPECT_GT(json[1].at("prompt_tokens_per_second").get<double>(), 0);
  EXPECT_EQ(json[1].at("batch"), 3);
  expect_run(command + " --size tiny", 2, {"--config", "--size"});
  expect_run("bench decode --config none.json", 2, {"none.json"});
  write_text(config,
             R"({"model_type": "brumby", "vocab_size": 151936, "hidden_size": 51200, "intermediate_size": 174080,
                         "num_hidden_layers": 400, "num_attention_heads": 400, "num_key_value_heads": 80,
                         "head_dim": 128})");
  expect_run(command, 1, {"its weights need", "GB", "bytes) are free"});
}

// The operations of a step and what lies between them are the whole step.
TEST(BenchCommand, ProfilesAStep) {
  const testing::TemporaryDirectory directory;
  const auto profile_of = [&](const std::string& options) {
    const auto path = directory / "step.json";
    expect_run("bench step --size tiny --vocab 300 --batch 2 --length 64 --steps 1 --profile --device cpu --json " +
                   path.string() + " " + options,
               0, {"times floor", "other", "optimizer"});
    return nlohmann::json::parse(read_text(path)).at("profile");
  };
  const std::set<std::string> common{"embedding",      "norm",         "qkv product", "mixer",     "split",
                                     "output product", "MLP products", "activation",  "optimizer", "loss"};
  const std::map<std::string, std::set<std::string>> further{
      {"--preset 2mamba --recompute", {"convolution", "decay"}},
      {"--preset softmax", {"rope"}},
      {"--preset mamba2", {"convolution", "decay", "D residual", "gate product"}}};
  for (const auto& [options, own] : further) {
    SCOPED_TRACE(options);
    const auto profile = profile_of(options);
    std::set<std::string> roles = common, found;
    roles.insert(own.begin(), own.end());
    double share = profile.at("other_share");
    EXPECT_GE(share, 0);
    for (const auto& row : profile.at("operations")) {
      const std::string role = row.at("role");
      found.insert(role);
      share += row.at("share").get<double>();
      if (role == "split") continue;  // views
      EXPECT_GT(row.at("bytes").get<double>(), 0) << role;
      EXPECT_NEAR(row.at("ratio").get<double>() * row.at("floor_ms").get<double>(), row.at("ms").get<double>(), 1e-6);
    }
    EXPECT_EQ(found, roles);
    EXPECT_NEAR(share, 1, 1e-6);
  }
}

TEST(BenchCommand, SetsTheMeanLogDecayOfAStep) {
  const testing::TemporaryDirectory directory;
  const auto path = directory / "step.json";
  const std::string step = "bench step --size tiny --vocab 300 --batch 1 --length 64 --steps 1 --device cpu --json " +
                           path.string() + " --preset ";
  for (const char* preset : {"2mamba", "mamba2", "fox"}) {
    expect_run(step + preset + " --mean-decay -0.001", 0, {"mean log-decay", "set by --mean-decay"});
    EXPECT_NEAR(nlohmann::json::parse(read_text(path)).at("mean_log_decay").get<double>(), -0.001, 5e-5);
  }
  expect_run(step + "2mamba", 0, {"mean log-decay -0.6", "new weights"});
  expect_run(step + "softmax --mean-decay -0.001", 1, {"softmax has no decay", "2mamba"});
  expect_run(step + "2mamba --mean-decay 0.5", 2, {"--mean-decay"});
}

TEST(BenchCommand, OutOfMemorySaysWhatToDo) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer ends a program that allocates so much";
#endif
  expect_run("bench mixer --device cpu --batch 1048576 --length 16777216", 1, {"out of memory on cpu", "--batch"});
}

TEST(BenchCommand, BadOptionsAreUsageErrors) {
  expect_run("bench mixer --preset 2mama", 2, {"did you mean \"2mamba\""});
  expect_run("bench mixer --form paralel", 2, {"did you mean \"parallel\""});
  expect_run("bench mixer --score cubic", 2, {"cubic", "squared"});
  expect_run("bench mixer --device tpu", 2, {"tpu", "cuda"});
  expect_run("bench mixer --length 0", 2, {"--length"});
  expect_run("bench mixer --dim 7", 2, {"--dim"});
  expect_run("bench mixer --threads 100000", 2, {"--threads"});
  expect_run("bench", 2, {"subcommand"});
  expect_run("bench mixer --preset softmax --form chunked", 1, {"exponential", "parallel"});
  expect_run("bench mixer --kernel tiles --device cpu", 1, {"--kernel tiles", "--device cuda"});
  expect_run("bench mixer --sweep --kernel tiles --device cpu", 1, {"--sweep", "--kernel tiles"});
  expect_run("bench mixer --json /nowhere/rows.json", 1, {"/nowhere"});
}

}  // namespace
}  // namespace furious
