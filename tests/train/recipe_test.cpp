#include "train/recipe.h"

#include <algorithm>
#include <map>

#include "support.h"
#include "tensor/device.h"

namespace furious {
namespace {

using testing::expect_error;
using Texts = std::map<std::string, std::string>;

// What applying a recipe changes of options that have none of its values.
Texts set_by(const std::string& name, const std::string& device) {
  TrainOptions options;
  options.device = device;
  options.size = "tiny";
  options.initialization = "furious";
  options.packing = "packed";
  options.bos = false;
  options.batch = options.length = options.steps = options.warmup = options.schedule_steps = 7;
  options.seed = 7;
  options.lr = options.weight_decay = options.beta1 = options.beta2 = options.eps = options.clip = 0.7;
  options.dtype = "f32";
  options.mixer_precision = "auto";
  options.eval_every = options.eval_batches = options.save_every = 7;
  const Texts before = to_texts(options);
  apply_recipe(options, name);
  check_train_options(options);
  Texts changed;
  for (const auto& [key, value] : to_texts(options))
    if (before.at(key) != value) changed[key] = value;
  return changed;
}

Texts paper() {
  return {{"size", "small"},
          {"initialization", "pytorch"},
          {"packing", "rows"},
          {"bos", "true"},
          {"batch", "32"},
          {"length", "2048"},
          {"seed", "123"},
          {"steps", "100000"},
          {"lr", "0.0001"},
          {"warmup", "10000"},
          {"schedule-steps", "1000000"},
          {"weight-decay", "0.01"},
          {"beta1", "0.9"},
          {"beta2", "0.999"},
          {"eps", "1e-07"},
          {"clip", "0"},
          {"dtype", "auto"},
          {"eval-every", "10000"},
          {"eval-batches", "0"},
          {"save-every", "5000"}};
}

Texts paper_long() {
  Texts expected = paper();
  expected["size"] = "medium";
  expected["length"] = "8192";
  expected["batch"] = "64";
  expected["steps"] = "400000";
  return expected;
}

TEST(Recipe, ThePapersValueByValue) {
  EXPECT_EQ(set_by("paper", "cpu"), paper());
  EXPECT_EQ(set_by("paper-long", "cpu"), paper_long());
}

TEST(Recipe, OnAGpuTheMixerComputesInTF32AndActivationsAreBf16) {
  const std::vector<KeyValue>& options = recipe("paper").options;
  const auto mixer = std::ranges::find(options, "mixer-precision", &KeyValue::key);
  ASSERT_NE(mixer, options.end());
  EXPECT_EQ(mixer->value, "tf32");
  TrainOptions here;
  apply_recipe(here, "paper");
  here = resolved(here);
  const bool gpu = !device_from_name(here.device).is_cpu();
  EXPECT_EQ(here.dtype, gpu ? "bf16" : "f32");
  EXPECT_EQ(here.mixer_precision, gpu ? "tf32" : "auto");
}

TEST(Recipe, LearningRateIsStillHighAtTheLastStep) {
  TrainOptions options;
  options.device = "cpu";
  apply_recipe(options, "paper");
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 1e-8);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10000), 1e-4);
  EXPECT_DOUBLE_EQ(learning_rate(options, 55000), 1e-4 * (1000000 - 54999) / 990000);
  EXPECT_DOUBLE_EQ(learning_rate(options, 100000), 1e-4 * (1000000 - 99999) / 990000);
  EXPECT_NEAR(learning_rate(options, 100000), 0.91e-4, 1e-7);
}

TEST(Recipe, AnUnknownNameIsAnsweredWithTheNearest) {
  expect_error([] { recipe("papr"); }, {"unknown recipe \"papr\"", "did you mean \"paper\""});
  expect_error([] { recipe("paper-lng"); }, {"did you mean \"paper-long\""});
  TrainOptions options;
  options.device = "cpu";
  expect_error([&] { apply_recipe(options, ""); }, {"unknown recipe"});
}

}  // namespace
}  // namespace furious
