// Many training runs in one folder: complete, interrupted, resumed.
#include "paper/ablation.h"

#include <cmath>
#include <filesystem>

#include "train/options.h"
#include "train/small_run.h"

namespace furious {
namespace {

using namespace furious::testing;
namespace fs = std::filesystem;

class AblationTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);

  AblationOptions options_for(const std::string& out, const std::vector<std::string>& words) {
    AblationOptions options{words, small_options(data, folder.path(out)), 1};
    options.base.hidden = options.base.intermediate = 16;
    options.base.layers = 1;
    options.base.steps = 2;
    options.base.eval_every = 1;
    options.base.eval_batches = 1;
    options.base.save_every = 0;
    options.base.keep = 1;
    return options;
  }
};

// Everything but the time it took.
std::string summary(const Ablation& ablation) {
  std::string text;
  for (const RowResult& row : ablation.rows) {
    text += fmt::format("{} {} {}\n", row.name, row.parameters, row.state_bytes);
    for (const RowRun& run : row.runs) {
      text += fmt::format("  {} {} {} {} {} {}", run.seed, run.steps, run.finished, run.train_loss, run.test_loss,
                          run.diverged);
      for (const Curve* curve : {&run.training, &run.test, &run.values})
        for (size_t i = 0; i < curve->x.size(); ++i) text += fmt::format(" {}:{}", curve->x[i], curve->y[i]);
      text += "\n";
    }
  }
  return text;
}

class EverySuite : public AblationTest, public ::testing::WithParamInterface<std::string> {};

std::vector<std::string> suite_names() {
  std::vector<std::string> names;
  for (const Suite& suite : suites()) names.push_back(suite.name);
  return names;
}

TEST_P(EverySuite, ResumedRunGivesTheSameResults) {
  Random random(21);
  const std::string suite = GetParam();
  const Ablation whole = run_ablation(options_for("whole", {suite}));
  EXPECT_TRUE(whole.finished());
  const size_t rows = ablation_rows({suite}, options_for("", {}).base).size();
  ASSERT_EQ(whole.rows.size(), rows);
  for (const RowResult& row : whole.rows) {
    ASSERT_EQ(row.runs.size(), 1u);
    EXPECT_EQ(row.runs[0].steps, 2);
    EXPECT_EQ(row.runs[0].test.x, (std::vector<double>{1, 2}));
    EXPECT_EQ(row.runs[0].values.x.empty(), suite != "stability");
    EXPECT_TRUE(std::isfinite(row.runs[0].train_loss) && std::isfinite(row.runs[0].test_loss));
    EXPECT_GT(row.parameters, 0);
  }
  // Stopped after any step, also between two rows.
  const AblationOptions options = options_for("parts", {suite});
  const auto stop_at = static_cast<size_t>(random.integer(1, static_cast<int64_t>(2 * rows) - 1));
  size_t steps = 0;
  AblationObserver observer;
  observer.step = [&](const RowResult&, uint64_t, const TrainStep&) { ++steps; };
  observer.stop = [&] { return steps >= stop_at; };
  Ablation parts = run_ablation(options, observer);
  EXPECT_FALSE(parts.finished());
  EXPECT_TRUE(parts.stopped);
  observer.stop = {};
  parts = run_ablation(options, observer);
  EXPECT_EQ(steps, 2 * rows) << "no step is made twice";
  EXPECT_TRUE(parts.finished());
  EXPECT_EQ(summary(parts), summary(whole));
}

INSTANTIATE_TEST_SUITE_P(Ablation, EverySuite, ::testing::ValuesIn(suite_names()),
                         [](const auto& suite) { return suite.param; });

TEST_F(AblationTest, SeedsAndASyntheticTask) {
  AblationOptions options = options_for("seeds", {"2mamba", "softmax:lr=0.02"});
  options.base.data = "synthetic:passkey";
  options.seeds = 2;
  std::vector<std::string> order;
  AblationObserver observer;
  observer.run = [&](const Ablation&, const RowResult& row, const RowRun& run) {
    order.push_back(fmt::format("{} {}", row.name, run.seed));
  };
  const Ablation ablation = run_ablation(options, observer);
  EXPECT_EQ(order,
            (std::vector<std::string>{"2mamba 123", "softmax:lr=0.02 123", "2mamba 124", "softmax:lr=0.02 124"}));
  for (const RowResult& row : ablation.rows) {
    ASSERT_EQ(row.runs.size(), 2u);
    EXPECT_NE(row.runs[0].test_loss, row.runs[1].test_loss);
  }
  EXPECT_EQ(ablation.rows[1].options.at("lr"), "0.02");
  EXPECT_TRUE(fs::exists(folder.path("seeds/runs/softmax-lr=0.02/seed-124/latest/model.safetensors")));
  // Seeds added later: existing results are kept.
  options.seeds = 3;
  order.clear();
  size_t steps = 0;
  observer.step = [&](const RowResult&, uint64_t, const TrainStep&) { ++steps; };
  EXPECT_EQ(run_ablation(options, observer).rows[0].runs.size(), 3u);
  EXPECT_EQ(steps, 4u);
}

TEST_F(AblationTest, RowsTrainOnTheSameBatches) {
  // Two rows that are the same model: any difference would come from the data, its order or the weights.
  const Ablation ablation = run_ablation(options_for("same", {"2mamba", "2mamba:score=squared"}));
  EXPECT_EQ(ablation.rows[0].runs[0].training.y, ablation.rows[1].runs[0].training.y);
  EXPECT_EQ(ablation.rows[0].runs[0].test.y, ablation.rows[1].runs[0].test.y);
}

TEST_F(AblationTest, ReportsADivergedRow) {
  AblationOptions options = options_for("diverged", {"2mamba:lr=100", "2mamba"});
  options.base.warmup = 0;
  options.base.steps = 12;
  const Ablation ablation = run_ablation(options);
  EXPECT_TRUE(ablation.finished());
  const RowRun& broken = ablation.rows[0].runs[0];
  EXPECT_FALSE(broken.diverged.empty());
  EXPECT_LT(broken.steps, 12);
  EXPECT_NE(broken.diverged.find("step"), std::string::npos);
  EXPECT_EQ(ablation.rows[1].runs[0].steps, 12);
  // A second call does not repeat the run.
  size_t steps = 0;
  AblationObserver observer;
  observer.step = [&](const RowResult&, uint64_t, const TrainStep&) { ++steps; };
  EXPECT_EQ(summary(run_ablation(options, observer)), summary(ablation));
  EXPECT_EQ(steps, 0u);
}

TEST_F(AblationTest, RefusesToResumeInAFolderOfOtherRuns) {
  AblationOptions options = options_for("mine", {"linear"});
  run_ablation(options);
  const auto refused = [&](const std::function<void(TrainOptions&)>& change, const std::vector<std::string>& parts) {
    AblationOptions changed = options;
    change(changed.base);
    expect_error([&] { run_ablation(changed); }, parts);
  };
  refused([](TrainOptions& o) { o.lr = 1; }, {"lr = 0.01", "lr = 1", "another --out"});
  refused([](TrainOptions& o) { o.steps = 3; }, {"steps = 2", "steps = 3"});
  refused([](TrainOptions& o) { o.data = "synthetic:passkey"; }, {"data = ", "synthetic:passkey"});
  options.base.save_every = 1;
  EXPECT_TRUE(run_ablation(options).finished());
  // A run of a version without an option has its default.
  const std::string toml = folder.path("mine/runs/linear/seed-123/run.toml");
  std::string text = read_file(toml);
  const size_t at = text.find("\neps = ") + 1;
  ASSERT_GT(at, 0u);
  folder.write("mine/runs/linear/seed-123/run.toml", text.erase(at, text.find('\n', at) + 1 - at));
  EXPECT_TRUE(run_ablation(options).finished());
  refused([](TrainOptions& o) { o.eps = 0.5; }, {"eps = 1e-08", "eps = 0.5"});
  // Runs without the option `initialization` used another initialization.
  text = read_file(toml);
  const size_t line = text.find("\ninitialization = ") + 1;
  ASSERT_GT(line, 0u);
  folder.write("mine/runs/linear/seed-123/run.toml", text.erase(line, text.find('\n', line) + 1 - line));
  expect_error([&] { run_ablation(options); }, {"another initialization", "--out"});
}

TEST_F(AblationTest, BadInput) {
  const auto refused = [&](const std::function<void(AblationOptions&)>& change, const std::vector<std::string>& parts) {
    AblationOptions options = options_for("bad", {"base"});
    change(options);
    expect_error([&] { run_ablation(options); }, parts);
    EXPECT_FALSE(fs::exists(folder.path("bad")));
  };
  refused([](AblationOptions& o) { o.base.data.clear(); }, {"--data"});
  refused([](AblationOptions& o) { o.base.out.clear(); }, {"--out"});
  refused([](AblationOptions& o) { o.base.data = "/nowhere"; }, {"/nowhere"});
  refused([](AblationOptions& o) { o.seeds = 0; }, {"0 seeds"});
  refused([](AblationOptions& o) { o.words = {"bas"}; }, {"did you mean \"base\""});
  refused([](AblationOptions& o) { o.words = {"2mamba:score=linear"}; }, {"linear score"});  // before any is trained
  refused([](AblationOptions& o) { o.words = {"2mamba", "2mamba:heads=7"}; }, {"7 heads"});
}

TEST(RowRun, OfALog) {
  RunLog log;
  for (int64_t i = 1; i <= 1000; ++i) {
    TrainStep step;
    step.step = i;
    step.loss = i <= 950 ? 5 : 2;
    step.tokens_per_second = i == 1 ? 1 : 100;
    if (i % 500 == 0) {
      step.test_loss = 3 - static_cast<double>(i) / 1000;
      step.value_rms = {1, static_cast<double>(i), 2};
    }
    log.steps.push_back(step);
  }
  const RowRun run = row_run(5, log, 1000);
  EXPECT_EQ(run.seed, 5u);
  EXPECT_TRUE(run.finished);
  EXPECT_DOUBLE_EQ(run.train_loss, 2);
  EXPECT_DOUBLE_EQ(run.test_loss, 2);
  EXPECT_DOUBLE_EQ(run.tokens_per_second, 100);
  EXPECT_EQ(run.training.x.size(), 200u);
  EXPECT_DOUBLE_EQ(run.training.x[0], 3);  // steps 1 to 5
  EXPECT_DOUBLE_EQ(run.training.y[189], 5);
  EXPECT_DOUBLE_EQ(run.training.y[190], 2);
  EXPECT_EQ(run.values.y, (std::vector<double>{500, 1000}));
  EXPECT_FALSE(row_run(5, log, 1001).finished);
  log.diverged = "why";
  EXPECT_TRUE(row_run(5, log, 1001).finished);
  EXPECT_TRUE(std::isnan(row_run(5, {}, 10).train_loss));
  EXPECT_FALSE(row_run(5, {}, 10).finished);
}

}  // namespace
}  // namespace furious
