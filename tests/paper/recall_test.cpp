#include "paper/recall.h"

#include <gtest/gtest.h>

#include "data/corpus.h"
#include "data/synthetic.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::TemporaryFolder;

RecallStudy tiny_study() {
  RecallStudy study;
  study.archs = {"2mamba", "linear"};
  study.dims = {8, 16};
  study.pairs = {2, 5};
  study.rows = 3;
  study.base.hidden = 16;
  study.base.layers = 1;
  study.base.batch = 2;
  study.base.length = 20;
  study.base.steps = 3;
  study.base.device = "cpu";
  return study;
}

std::vector<LanguageModel> untrained_models(const RecallStudy& study) {
  std::vector<LanguageModel> models;
  for (const SmallModel& model : recall_models(study)) {
    ModelConfig config = model_config(model.options.arch, "tiny", LookupOptions().vocabulary_size);
    config.hidden = config.intermediate = 16;
    config.layers = 1;
    config.q_heads = config.k_heads = config.v_heads = model.options.heads;
    config.head_dim = config.qk_dim = 16 / model.options.heads;
    models.emplace_back(config, 1);
  }
  return models;
}

TEST(Recall, OneModelPerArchitectureAndDimension) {
  RecallStudy study = tiny_study();
  const std::vector<SmallModel> models = recall_models(study);
  ASSERT_EQ(models.size(), 4u);
  EXPECT_EQ(models[1].name, "2mamba-16");
  EXPECT_EQ(models[1].options.heads, 1);
  EXPECT_EQ(models[2].name, "linear-8");
  EXPECT_EQ(models[2].options.arch, "linear");
  EXPECT_EQ(models[2].options.heads, 2);
  study.dims = {12};
  expect_error([&] { recall_models(study); }, {"width of 16", "12"});
  study = tiny_study();
  study.pairs = {2, 500};
  expect_error([&] { recall_models(study); }, {"500 pairs", "vocabulary"});
}

TEST(Recall, CellsMapsAndJsonAreInTheOrderOfTheModels) {
  const RecallStudy study = tiny_study();
  const std::vector<RecallCell> cells = recall_cells(study, untrained_models(study));
  ASSERT_EQ(cells.size(), 8u);
  for (size_t i = 0; i < cells.size(); ++i) {
    EXPECT_EQ(cells[i].arch, study.archs[i / 4]) << i;
    EXPECT_EQ(cells[i].head_dim, study.dims[i / 2 % 2]) << i;
    EXPECT_EQ(cells[i].pairs, study.pairs[i % 2]) << i;
    EXPECT_EQ(cells[i].found.asked, study.rows * study.pairs[i % 2]) << i;
    EXPECT_EQ(cells[i].sequence_bytes, cells[i / 2 * 2].sequence_bytes) << i;
  }

  const std::vector<HeatMap> maps = recall_maps(study, cells);
  ASSERT_EQ(maps.size(), 2u);
  EXPECT_EQ(maps[1].title, "linear");
  EXPECT_EQ(maps[1].columns, (std::vector<std::string>{"2", "5"}));
  ASSERT_EQ(maps[1].rows.size(), 2u);
  EXPECT_EQ(maps[1].rows[1].substr(0, 6), "d 16 (");
  ASSERT_EQ(maps[1].cells.size(), 4u);
  EXPECT_EQ(maps[1].cells[3].part, cells[7].found.right);
  EXPECT_EQ(maps[1].cells[3].whole, 15);

  const nlohmann::ordered_json json = recall_json(study, cells);
  EXPECT_EQ(json.at("steps"), 3);
  ASSERT_EQ(json.at("cells").size(), 8u);
  EXPECT_EQ(json.at("cells").at(6).at("arch"), "linear");
  EXPECT_EQ(json.at("cells").at(6).at("head_dim"), 16);
  EXPECT_EQ(json.at("cells").at(6).at("pairs"), 2);
  EXPECT_EQ(json.at("cells").at(6).at("right"), cells[6].found.right);
}

// Two dimensions of the same value keep separate rows.
TEST(Recall, RepeatedDimensionsHaveRowsOfTheirOwn) {
  RecallStudy study = tiny_study();
  study.dims = {8, 8};
  const std::vector<HeatMap> maps = recall_maps(study, recall_cells(study, untrained_models(study)));
  ASSERT_EQ(maps.size(), 2u);
  EXPECT_EQ(maps[0].rows.size(), 2u);
  EXPECT_EQ(maps[0].columns.size(), 2u);
  EXPECT_EQ(maps[0].cells.size(), 4u);
}

TEST(SmallModels, TrainsStopsResumesAndReuses) {
  const TemporaryFolder folder;
  RecallStudy study = tiny_study();
  study.dims = {8};
  const std::vector<SmallModel> models = recall_models(study);
  int64_t steps = 0;
  std::vector<int64_t> left, made;
  SmallModelsObserver observer;
  observer.step = [&](const SmallModel&, const TrainStep&, int64_t steps_left) {
    ++steps;
    left.push_back(steps_left);
  };
  observer.ended = [&](const SmallModel&, const TrainResult&, int64_t steps_made) { made.push_back(steps_made); };
  observer.stop = [&] { return steps == 4; };  // in the second model
  EXPECT_TRUE(train_small_models(folder.path("out"), models, observer).empty());
  EXPECT_EQ(left, (std::vector<int64_t>{5, 4, 3, 2}));
  EXPECT_EQ(made, (std::vector<int64_t>{3, 1}));

  const std::vector<LanguageModel> trained = train_small_models(folder.path("out"), models, observer);
  ASSERT_EQ(trained.size(), 2u);
  EXPECT_EQ(trained[1].config().arch, "linear");
  EXPECT_EQ(left, (std::vector<int64_t>{5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(made, (std::vector<int64_t>{3, 1, 0, 2}));

  observer.stop = {};
  const std::vector<LanguageModel> again = train_small_models(folder.path("out"), models, observer);
  EXPECT_EQ(made, (std::vector<int64_t>{3, 1, 0, 2, 0, 0}));
  ASSERT_EQ(again.size(), 2u);
  for (size_t i = 0; i < again.size(); ++i)
    for (size_t p = 0; p < again[i].parameters().size(); ++p)
      EXPECT_TRUE(testing::same_bits(again[i].parameters()[p].value.value(), trained[i].parameters()[p].value.value()));
}

}  // namespace
}  // namespace furious
