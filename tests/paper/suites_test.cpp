#include "paper/suites.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "ops/matmul.h"
#include "support.h"
#include "tensor/device.h"
#include "train/options.h"
#include "train/recipe.h"

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

// One run of theirs is drawn in several tables and figures. Figure 5b draws for 2Mamba the run that Figure 10 calls
// 2Mamba-E.
TEST(Suites, FiguresOfARowAgreeAcrossTables) {
  std::map<std::string, std::pair<double, double>> seen;
  std::map<std::string, int> rows;
  for (const PaperRow& row : paper_rows()) {
    ++rows[row.table];
    EXPECT_EQ(preset(row.preset).name, row.preset);
    EXPECT_GT(row.train_loss, 2.2);
    EXPECT_LT(row.test_loss, 3.2);
    if (row.table == "Figure 5b") continue;
    const auto [found, added] =
        seen.emplace(row.preset + " " + row.setting(), std::pair(row.train_loss, row.test_loss));
    EXPECT_EQ(found->second, std::pair(row.train_loss, row.test_loss)) << row.table << " " << row.label;
  }
  EXPECT_EQ(rows, (std::map<std::string, int>{{"Table 1", 7},
                                              {"Table 2", 11},
                                              {"Table 3", 8},
                                              {"Figure 1", 3},
                                              {"Figure 2", 3},
                                              {"Figure 3", 7},
                                              {"Figure 4a", 5},
                                              {"Figure 4b", 4},
                                              {"Figure 5a", 4},
                                              {"Figure 5b", 2},
                                              {"Figure 6", 18},
                                              {"Figure 9", 3},
                                              {"Figure 10", 12},
                                              {"the Pile (appendix)", 3},
                                              {"SlimPajama (appendix)", 3}}));
}

TEST(Suites, Rows) {
  EXPECT_EQ(names_of("base"), (Words{"linear", "mamba2-paper", "softmax"}));
  EXPECT_EQ(names_of("norm"), (Words{"linear", "linear-outnorm", "outnorm-relu"}));
  EXPECT_EQ(names_of("compare"), (Words{"softmax", "mamba2", "mamba2-paper", "mamba2s", "2mamba", "2mamba-dt"}));
  EXPECT_EQ(names_of("exp"), (Words{"softmax", "mamba2-paper", "2mamba", "2mamba-e"}));
  for (const char* suite : {"long", "pile", "slimpajama"})
    EXPECT_EQ(names_of(suite), (Words{"softmax", "mamba2-paper", "2mamba"}));
  for (const Suite& suite : suites()) {
    const std::vector<AblationRow> rows = ablation_rows({suite.name}, base_options());
    std::set<std::string> folders;
    for (const AblationRow& row : rows) {
      EXPECT_TRUE(folders.insert(row.folder()).second) << row.name;
      EXPECT_EQ(row.folder().find_first_of(":,/ "), std::string::npos) << row.folder();
      EXPECT_TRUE(row.options.length == 64 || suite.name == "lengths") << row.name;
      EXPECT_EQ(row.options.batch, 8) << row.name;
      EXPECT_EQ(row.options.steps, base_options().steps);
      EXPECT_EQ(row.options.seed, base_options().seed);
      model_config(row.options, 300);  // is a valid configuration
    }
  }
}

// The score, from one row to the next: odd orders have no positive sum to be divided by, so they have an output norm.
TEST(Suites, OrdersGoFromLinearToExponential) {
  const std::vector<AblationRow> rows = ablation_rows({"orders"}, base_options());
  std::vector<std::tuple<Score, int64_t, Norm>> scores;
  for (const AblationRow& row : rows) {
    BlockConfig block = block_of(row);
    scores.emplace_back(block.score, block.score_degree, block.norm);
    block.score = Score::squared;  // nothing else differs
    block.score_degree = 0;
    block.norm = Norm::sum;
    EXPECT_EQ(block, preset("2mamba").block) << row.name;
  }
  EXPECT_EQ(scores, (std::vector<std::tuple<Score, int64_t, Norm>>{{Score::linear, 0, Norm::none},
                                                                   {Score::squared, 0, Norm::none},
                                                                   {Score::power, 3, Norm::none},
                                                                   {Score::squared, 0, Norm::sum},
                                                                   {Score::power, 4, Norm::sum},
                                                                   {Score::series, 2, Norm::sum},
                                                                   {Score::series, 4, Norm::sum},
                                                                   {Score::exponential, 0, Norm::sum}}));
}

TEST(Suites, VariantsHaveEveryMaskAndDiscretization) {
  std::set<DecayKind> decays;
  std::set<Discretization> discretizations;
  bool square_mask = false, limit = false, fox = false;
  for (const AblationRow& row : ablation_rows({"variants"}, base_options())) {
    const BlockConfig block = block_of(row);
    decays.insert(block.decay);
    discretizations.insert(block.discretize);
    square_mask |= block.square_mask;
    limit |= block.dt_limit == 10 && block.discretize == Discretization::dt;
    fox |= block.score == Score::exponential && block.conv_window == 0;
    EXPECT_FALSE(row.paper.has_value() && row.name.find(':') != row.name.npos) << row.name;
  }
  EXPECT_EQ(decays, (std::set<DecayKind>{DecayKind::softplus, DecayKind::softplus_dt, DecayKind::softplus2,
                                         DecayKind::silu, DecayKind::log_sigmoid}));
  EXPECT_EQ(discretizations,
            (std::set<Discretization>{Discretization::none, Discretization::dt, Discretization::sigmoid,
                                      Discretization::silu, Discretization::softplus, Discretization::softplus2}));
  EXPECT_TRUE(square_mask && limit && fox);
}

TrainOptions paper_options(const std::string& size) {
  TrainOptions options;
  options.device = "cpu";
  apply_recipe(options, "paper");
  options.size = size;
  return options;
}

const AblationRow& row_named(const std::vector<AblationRow>& rows, const std::string& name) {
  return *std::ranges::find(rows, name, &AblationRow::name);
}

TEST(Suites, LengthsKeepTheBatch) {
  for (const std::string size : {"small", "medium"}) {
    const std::vector<AblationRow> rows = ablation_rows({"lengths"}, paper_options(size));
    Words archs = names_of("compare");
    archs.emplace_back("2mamba-e");
    ASSERT_EQ(rows.size(), 3 * archs.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].options.length, 2048 * (1 << i / archs.size()));
      EXPECT_EQ(rows[i].options.batch, 32);
      EXPECT_EQ(rows[i].options.size, size);
      EXPECT_EQ(rows[i].options.arch, archs[i % archs.size()]);
    }
  }
  TrainOptions odd = base_options();
  odd.batch = 7;
  for (const AblationRow& row : ablation_rows({"lengths"}, odd)) EXPECT_EQ(row.options.batch, 7);
}

// Each row has its losses in the paper: test loss, if given, and the figure.
TEST(Suites, FiguresOfThePaper) {
  const auto said = [](const std::string& suite, const TrainOptions& options) {
    std::map<std::string, std::pair<std::string, double>> found;
    for (const AblationRow& row : ablation_rows({suite}, options))
      if (row.paper) found[row.name] = {row.paper->table, row.paper->test_loss};
    return found;
  };
  using Said = std::map<std::string, std::pair<std::string, double>>;
  EXPECT_EQ(
      said("base", paper_options("small")),
      (Said{{"linear", {"Figure 1", 3.03}}, {"mamba2-paper", {"Figure 1", 2.88}}, {"softmax", {"Figure 1", 2.73}}}));
  EXPECT_EQ(said("compare", paper_options("small")), (Said{{"softmax", {"Figure 5a", 2.73}},
                                                           {"mamba2-paper", {"Figure 5a", 2.88}},
                                                           {"mamba2s", {"Figure 5a", 2.76}},
                                                           {"2mamba-dt", {"Figure 5a", 2.73}}}));
  const Said lengths = said("lengths", paper_options("medium"));
  EXPECT_EQ(lengths, (Said{{"softmax:length=2048", {"Figure 6", 2.61}},
                           {"mamba2-paper:length=2048", {"Figure 6", 2.75}},
                           {"mamba2s:length=2048", {"Table 3", 2.76}},
                           {"2mamba:length=2048", {"Figure 6", 2.62}},
                           {"2mamba-dt:length=2048", {"Figure 6", 2.73}},
                           {"2mamba-e:length=2048", {"Figure 10", 2.59}},
                           {"softmax:length=4096", {"Figure 6", 2.62}},
                           {"mamba2-paper:length=4096", {"Figure 6", 2.77}},
                           {"2mamba:length=4096", {"Figure 6", 2.63}},
                           {"2mamba-dt:length=4096", {"Figure 6", 2.74}},
                           {"2mamba-e:length=4096", {"Figure 10", 2.6}},
                           {"softmax:length=8192", {"Figure 6", 2.67}},
                           {"mamba2-paper:length=8192", {"Figure 6", 2.81}},
                           {"2mamba:length=8192", {"Figure 6", 2.68}},
                           {"2mamba-dt:length=8192", {"Figure 5b", 2.76}},
                           {"2mamba-e:length=8192", {"Figure 10", 2.66}}}));
  EXPECT_EQ(said("lengths", paper_options("small")).at("softmax:length=8192"),
            std::pair(std::string("Figure 6"), 2.76));
  EXPECT_EQ(said("lengths", paper_options("small")).count("2mamba-e:length=8192"), 0u);
  const Said exponential = {{"softmax", {"Figure 10", 2.61}},
                            {"mamba2-paper", {"Figure 10", 2.75}},
                            {"2mamba", {"Figure 10", 2.62}},
                            {"2mamba-e", {"Figure 10", 2.59}}};
  EXPECT_EQ(said("exp", paper_options("medium")), exponential);
  EXPECT_EQ(said("exp", paper_options("mini")), exponential);
  EXPECT_EQ(said("exp", base_options()), exponential);
  const Said long_run = {
      {"softmax", {"Figure 9", 2.33}}, {"mamba2-paper", {"Figure 9", 2.45}}, {"2mamba", {"Figure 9", 2.34}}};
  TrainOptions longer = paper_options("small");
  apply_recipe(longer, "paper-long");
  EXPECT_EQ(said("long", longer), long_run);
  EXPECT_EQ(said("long", base_options()), long_run);
  EXPECT_EQ(said("compare", longer).at("softmax"), std::pair(std::string("Figure 6"), 2.67)) << "of the shorter run";
  EXPECT_EQ(said("pile", paper_options("medium")).at("2mamba"), std::pair(std::string("the Pile (appendix)"), 2.5));
  EXPECT_EQ(said("slimpajama", paper_options("medium")).at("2mamba"),
            std::pair(std::string("SlimPajama (appendix)"), 2.79));
  // A row of two suites is trained once, with the paper's losses of the first suite that has some.
  const std::vector<AblationRow> both = ablation_rows({"compare", "exp"}, paper_options("mini"));
  EXPECT_EQ(both.size(), 7u);
  EXPECT_EQ(row_named(both, "2mamba").paper->table, "Figure 10");
  EXPECT_EQ(row_named(both, "softmax").paper->table, "Figure 5a");
  // For a size that is not in the paper: figures of the small model.
  EXPECT_EQ(said("compare", paper_options("mini")), said("compare", paper_options("small")));
  EXPECT_EQ(said("compare", base_options()), said("compare", paper_options("small")));
  EXPECT_TRUE(said("lengths", base_options()).empty()) << "it has other lengths";
}

TEST(Suites, ChangesThatKeepThePapersFigures) {
  TrainOptions options = paper_options("medium");
  options.length = 8192;
  const auto has = [&](const std::string& word) { return ablation_rows({word}, options).front().paper.has_value(); };
  EXPECT_TRUE(has("2mamba-dt:mixer-precision=tf32"));
  EXPECT_TRUE(has("2mamba-dt:accumulate=4"));
  EXPECT_TRUE(has("2mamba-dt:size=small,length=4096"));
  EXPECT_FALSE(has("2mamba-dt:mixer-precision=bf16"));
  EXPECT_FALSE(has("2mamba-dt:lr=0.5"));
  EXPECT_FALSE(has("2mamba-dt:conv_window=3"));
  EXPECT_FALSE(has("2mamba-dt:length=512"));
  EXPECT_FALSE(has("2mamba-dt:qk-dim=32"));
  TrainOptions other = options;
  other.qk_dim = 32;  // for all rows
  EXPECT_FALSE(ablation_rows({"2mamba-dt"}, other).front().paper.has_value());
  // Figure 5b is for its suite only.
  EXPECT_EQ(row_named(ablation_rows({"2mamba"}, options), "2mamba").paper->table, "Figure 6");
}

TEST(Suites, StabilityUsesThePrecisionsOfTheDevice) {
  const std::vector<AblationRow> rows = ablation_rows({"stability"}, base_options());
  const bool bf16 = matmul_supports(MatmulPrecision::bf16);
  ASSERT_EQ(rows.size(), bf16 ? 3u : 2u);
  EXPECT_EQ(rows.front().name, bf16 ? "2mamba-dt:dtype=bf16" : "2mamba-dt:dtype=f32");
  EXPECT_EQ(rows[rows.size() - 2].options.dtype, "f32");
  EXPECT_EQ(rows.back().options.arch, "2mamba");
  for (const AblationRow& row : rows) EXPECT_TRUE(row.options.log_values);
}

TEST(Suites, StabilityOnAGpuIsAboutTheMixer) {
  if (describe_cuda_devices().empty()) GTEST_SKIP() << "no GPU";
  TrainOptions options = base_options();
  options.device = "cuda";
  Words names;
  for (const AblationRow& row : ablation_rows({"stability"}, options)) names.push_back(row.name);
  EXPECT_EQ(names, (Words{"2mamba-dt:mixer-precision=bf16", "2mamba-dt:mixer-precision=tf32",
                          "2mamba-dt:mixer-precision=tf32x3", "2mamba-dt:mixer-precision=f32",
                          "2mamba:mixer-precision=bf16"}));
}

TEST(Suites, CustomRows) {
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
  const AblationRow many = ablation_rows(
      {"2mamba-4:score_degree=3,norm=none,qk-dim=16,initialization=pytorch,eps=0.001,mixer-precision=f32"},
      base_options())[0];
  EXPECT_EQ(block_of(many).score_degree, 3);
  EXPECT_EQ(model_config(many.options, 300).qk_dim, 16);
  EXPECT_EQ(many.options.initialization, "pytorch");
  EXPECT_EQ(many.options.eps, 0.001);
  EXPECT_EQ(many.options.mixer_precision, "f32");
}

TEST(Suites, ASyntheticTaskHasNoFiguresInThePaper) {
  TrainOptions options = base_options();
  options.data = "synthetic:recall";
  for (const AblationRow& row : ablation_rows({"conv"}, options)) {
    EXPECT_FALSE(row.paper.has_value());
    EXPECT_NE(row.label, row.name);
  }
}

TEST(Suites, GridsMultiplyRows) {
  Words names;
  for (const AblationRow& row : ablation_rows({"2mamba:conv_window=4", "base"}, base_options(),
                                              {grid_axis("lr=0.1,0.2"), grid_axis("layers=2..3")}))
    names.push_back(row.name);
  ASSERT_EQ(names.size(), 16u);
  EXPECT_EQ(names[0], "2mamba:conv_window=4,lr=0.1,layers=2");
  EXPECT_EQ(names[1], "2mamba:conv_window=4,lr=0.1,layers=3");
  EXPECT_EQ(names[2], "2mamba:conv_window=4,lr=0.2,layers=2");
  EXPECT_EQ(names[4], "linear:lr=0.1,layers=2");
  EXPECT_EQ(grid_axis("steps=1,5..7").values, (Words{"1", "5", "6", "7"}));
  for (const char* bad : {"lr", "=1", "lr=", "lr=1,,2", "lr=1..", "lr=2..1", "lr=0.1..0.3", "lr=1..5000", "lr=1,1"})
    expect_error([&] { grid_axis(bad); }, {"grid: "});
  expect_error([] { ablation_rows({"2mamba"}, base_options(), {grid_axis("lr=0.1,fast")}); }, {"row 2mamba:lr=fast"});
}

TEST(Suites, RefusesBadWords) {
  const auto refused = [](const Words& words, const Words& parts) {
    expect_error([&] { ablation_rows(words, base_options()); }, parts);
  };
  refused({}, {"nothing to train"});
  refused({"isolatd"}, {"unknown suite or preset \"isolatd\"", "did you mean \"isolated\""});
  refused({"2mambo:lr=1"}, {"\"2mambo\"", "did you mean \"2mamba\""});
  refused({"2mamba:conv_windo=3"}, {"unknown key \"conv_windo\"", "did you mean \"conv_window\""});
  refused({"2mamba:seed=4"}, {"unknown key \"seed\""});  // the same for all rows
  refused({"2mamba:lr=fast"}, {"lr", "fast"});
  const std::string twice = fmt::format("2mamba:length={}", 2 * base_options().length);  // it halves the batch
  refused({twice, "lengths"}, {twice, "given twice", "batches"});
  refused({"2mamba:lr"}, {"\"lr\"", "not KEY=VALUE"});
  refused({"2mamba:batch=4"}, {"4 x 64", "8 x 64"});
  refused({"2mamba:length=63"}, {"8 x 63", "8 x 64"});
  refused({"conv:lr=1"}, {"conv:lr=1", "not to suites"});
}

}  // namespace
}  // namespace furious
