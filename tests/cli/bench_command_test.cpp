// `furious bench` and `furious --version`, by running the binary.
#include <nlohmann/json.hpp>

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

TEST(BenchCommand, TimesTheRecurrentForm) {
  expect_run("bench recurrent --preset mamba2 --length 3,300 --heads 2 --dim 8", 0, {"us/token", "      300 "});
  expect_run("bench recurrent --preset mamba3", 2, {"did you mean \"mamba2\""});
}

TEST(BenchCommand, TimesDecoding) {
  expect_run("bench decode --preset mamba2 --size mini --vocab 300 --batch 1,2 --context 3 --tokens 2", 0,
             {"tokens/s", "of floor", "     2 "});
  expect_run("bench decode --preset mamba3", 1, {"did you mean \"mamba2\""});
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
  expect_run("bench mixer --json /nowhere/rows.json", 1, {"/nowhere"});
}

}  // namespace
}  // namespace furious
