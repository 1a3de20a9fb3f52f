#include "train/suites.h"

#include <map>
#include <set>

#include "ops/matmul.h"
#include "support.h"
#include "train/options.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::Random;
using Words = std::vector<std::string>;

TrainOptions base_options() {
  TrainOptions options;
  options.device = "cpu";
  options.batch = 8;
  options.length = 64;
  return options;
}

Words names_of(const std::string& suite) {
  Words names;
  for (const AblationRow& row : ablation_rows({suite}, base_options())) names.push_back(row.name);
  return names;
}

BlockConfig block_of(const AblationRow& row) {
  return model_config(row.options, 300).block;
}

// Tables 1 to 3 of the paper by what each label says, apart from the presets that carry them out.
BlockConfig said_by(std::string label) {
  BlockConfig block;
  block.score = Score::linear;
  block.norm = Norm::none;
  block.decay = DecayKind::none;
  block.conv_window = 0;
  const auto has = [&](const std::string& part) { return (" " + label + " ").find(" " + part + " ") != label.npos; };
  if (has("SM Norm")) block.norm = Norm::sum;
  if (has("ReLU")) block.qk_activation = Activation::relu;
  if (has("SiLU")) block.qk_activation = Activation::silu;
  for (const int64_t window : {2, 3, 4})
    if (has(fmt::format("Conv (w={})", window))) block.conv_window = window;
  if (has("A-mask original")) block.decay = DecayKind::original;
  if (has("A-mask softplus")) block.decay = DecayKind::softplus;
  if (has("value discretize")) block.discretize = Discretization::dt;
  block.d_residual = has("D res");
  block.z_gate = has("Z gate");
  return block;
}

TEST(Suites, RowsOfTheTablesAreWhatTheirLabelsSay) {
  const std::map<std::string, std::pair<std::string, size_t>> tables = {
      {"conv", {"Table 1", 7}}, {"isolated", {"Table 2", 11}}, {"buildup", {"Table 3", 8}}};
  for (const auto& [suite, expected] : tables) {
    const std::vector<AblationRow> rows = ablation_rows({suite}, base_options());
    EXPECT_EQ(rows.size(), expected.second) << suite;
    for (const AblationRow& row : rows) {
      ASSERT_TRUE(row.paper.has_value()) << row.name;
      EXPECT_EQ(row.paper->table, expected.first);
      EXPECT_EQ(row.label, row.paper->label);
      EXPECT_EQ(block_of(row), said_by(row.label)) << row.label;
    }
  }
}

TEST(Suites, ThePaperSaysTheSameOfARowInEveryTable) {
  std::map<std::string, std::pair<double, double>> seen;
  for (const PaperRow& row : paper_rows()) {
    const auto [found, added] = seen.emplace(row.preset, std::pair(row.train_loss, row.test_loss));
    EXPECT_EQ(found->second, std::pair(row.train_loss, row.test_loss)) << row.table << " " << row.label;
    EXPECT_GT(row.train_loss, 2.6);
    EXPECT_LT(row.test_loss, 3.2);
  }
  EXPECT_EQ(seen.size(), 20u);
}

TEST(Suites, Rows) {
  EXPECT_EQ(names_of("base"), (Words{"linear", "mamba2", "softmax"}));
  EXPECT_EQ(names_of("norm"), (Words{"linear", "linear-outnorm", "outnorm-relu"}));
  EXPECT_EQ(names_of("compare"), (Words{"softmax", "mamba2", "mamba2s", "2mamba", "2mamba-dt"}));
  EXPECT_EQ(names_of("exp"), (Words{"softmax", "mamba2", "2mamba", "2mamba-e"}));
  for (const Suite& suite : suites()) {
    const std::vector<AblationRow> rows = ablation_rows({suite.name}, base_options());
    std::set<std::string> folders;
    for (const AblationRow& row : rows) {
      EXPECT_TRUE(folders.insert(row.folder()).second) << row.name;
      EXPECT_EQ(row.folder().find_first_of(":,/ "), std::string::npos) << row.folder();
      EXPECT_EQ(row.options.batch * row.options.length, 8 * 64) << row.name;
      EXPECT_EQ(row.options.steps, base_options().steps);
      EXPECT_EQ(row.options.seed, base_options().seed);
    }
  }
}

TEST(Suites, LengthsKeepTheTokensOfAStep) {
  const std::vector<AblationRow> rows = ablation_rows({"lengths"}, base_options());
  ASSERT_EQ(rows.size(), 15u);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t times = int64_t{1} << i / 5;
    EXPECT_EQ(rows[i].options.length, 64 * times);
    EXPECT_EQ(rows[i].options.batch, 8 / times);
    EXPECT_EQ(rows[i].options.arch, names_of("compare")[i % 5]);
    EXPECT_FALSE(rows[i].paper.has_value()) << "the paper's figures are for one length";
  }
  TrainOptions odd = base_options();
  odd.batch = 6;
  expect_error([&] { ablation_rows({"lengths"}, odd); }, {"softmax:length=256", "6 x 64", "--batch"});
}

TEST(Suites, StabilityTakesThePrecisionsOfTheDevice) {
  const std::vector<AblationRow> rows = ablation_rows({"stability"}, base_options());
  const bool bf16 = matmul_supports(MatmulPrecision::bf16);
  ASSERT_EQ(rows.size(), bf16 ? 3u : 2u);
  EXPECT_EQ(rows.front().name, bf16 ? "2mamba-dt:dtype=bf16" : "2mamba-dt:dtype=f32");
  EXPECT_EQ(rows[rows.size() - 2].options.dtype, "f32");
  EXPECT_EQ(rows.back().options.arch, "2mamba");
  for (const AblationRow& row : rows) EXPECT_TRUE(row.options.log_values);
}

TEST(Suites, RowsOfOnesOwn) {
  const auto rows = ablation_rows(
      {"2mamba:conv_window=4,norm=none,lr=0.5", "softmax", "mamba2:length=32", "exp", "2mamba:batch=4,length=128"},
      base_options());
  ASSERT_EQ(rows.size(), 7u);  // softmax is one of exp's too
  EXPECT_EQ(rows[0].options.lr, 0.5);
  EXPECT_EQ(rows[0].folder(), "2mamba-conv_window=4-norm=none-lr=0.5");
  BlockConfig expected = preset("2mamba").block;
  expected.conv_window = 4;
  expected.norm = Norm::none;
  EXPECT_EQ(block_of(rows[0]), expected);
  EXPECT_EQ(rows[1].options.lr, base_options().lr);
  EXPECT_EQ(rows[2].options.batch, 16);
  EXPECT_EQ(rows.back().options.batch, 4);
  // A base with switches is not the paper's model.
  TrainOptions changed = base_options();
  changed.switches = "conv_window=3";
  const auto base = ablation_rows({"linear", "linear:norm=none"}, changed);
  EXPECT_FALSE(base[0].paper.has_value());
  EXPECT_EQ(base[1].options.switches, "conv_window=3,norm=none");
}

TEST(Suites, ASyntheticTaskHasNoFiguresInThePaper) {
  TrainOptions options = base_options();
  options.data = "synthetic:recall";
  for (const AblationRow& row : ablation_rows({"conv"}, options)) {
    EXPECT_FALSE(row.paper.has_value());
    EXPECT_NE(row.label, row.name);
  }
}

TEST(Suites, BadWords) {
  const auto refused = [](const Words& words, const Words& parts) {
    expect_error([&] { ablation_rows(words, base_options()); }, parts);
  };
  refused({}, {"nothing to train"});
  refused({"isolatd"}, {"unknown suite or preset \"isolatd\"", "did you mean \"isolated\""});
  refused({"2mambo:lr=1"}, {"\"2mambo\"", "did you mean \"2mamba\""});
  refused({"2mamba:conv_windo=3"}, {"unknown key \"conv_windo\"", "did you mean \"conv_window\""});
  refused({"2mamba:seed=4"}, {"unknown key \"seed\""});  // the same for all rows
  refused({"2mamba:lr=fast"}, {"lr", "fast"});
  refused({"2mamba:lr"}, {"\"lr\"", "no key=value"});
  refused({"2mamba:batch=4"}, {"4 x 64", "8 x 64"});
  refused({"2mamba:length=63"}, {"8 x 63", "8 x 64"});
  refused({"conv:lr=1"}, {"conv:lr=1", "a suite takes no changes"});
}

}  // namespace
}  // namespace furious
