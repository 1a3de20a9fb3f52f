#include "paper/demo.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "data/corpus.h"
#include "model/checkpoint.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::TemporaryFolder;

TEST(Demo, TrainsComparesSavesAndSamples) {
  const TemporaryFolder folder;
  testing::Random random(1);
  std::string text;
  for (int i = 0; i < 400; ++i) text += testing::random_sentence(random, 30) + "\n\n";
  Demo demo({.text = {folder.write("text.txt", text)},
             .archs = {"2mamba", "softmax"},
             .out = folder.path("demo"),
             .steps = 2,
             .vocabulary = 400});
  EXPECT_GT(demo.train_tokenizer(), static_cast<int64_t>(text.size()) / 2);
  const Manifest manifest = demo.tokenize();
  EXPECT_GT(manifest[Split::train].total().tokens, manifest[Split::test].total().tokens);
  EXPECT_GT(manifest[Split::test].total().tokens, 0);
  demo.make_models();
  demo.step();
  demo.step();
  demo.evaluate();
  ASSERT_EQ(demo.models().size(), 2u);
  for (const Demo::Model& model : demo.models()) {
    ASSERT_EQ(model.losses.size(), 2u);
    EXPECT_LT(model.losses[1], model.losses[0]);
    EXPECT_LT(model.test_loss, model.losses[0]);
    EXPECT_GT(model.seconds, 0);
  }

  const Table table = demo_table(demo);
  ASSERT_EQ(table.rows.size(), 2u);
  EXPECT_EQ(table.rows[1].at(0), "softmax");
  EXPECT_EQ(table.rows[0].size(), table.header.size());
  const Chart chart = demo_chart(demo);
  ASSERT_EQ(chart.series.size(), 2u);
  EXPECT_EQ(chart.series[0].x, (std::vector<double>{1, 2}));

  demo.save();
  EXPECT_TRUE(std::filesystem::exists(folder.path("demo/loss.svg")));
  EXPECT_EQ(load_model(folder.path("demo/softmax")).config().vocabulary, 400);
  const std::vector<Text> samples = demo.samples(2);
  ASSERT_EQ(samples.size(), 2u);
  for (const Text& sample : samples) EXPECT_TRUE(sample.tokens == 80 || sample.ending == Ending::eos);
}

TEST(Demo, RefusesMissingText) {
  const TemporaryFolder folder;
  Demo demo({.text = {folder.path("none.txt")}, .out = folder.path("demo")});
  expect_error([&] { demo.train_tokenizer(); }, {"none.txt", "does not exist"});
}

}  // namespace
}  // namespace furious
