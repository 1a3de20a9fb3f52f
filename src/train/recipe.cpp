#include "train/recipe.h"

#include <algorithm>

#include "base/names.h"
#include "tensor/device.h"

namespace furious {
namespace {

constexpr const char* kMixerPrecision = "mixer-precision";

std::vector<KeyValue> paper_options() {
  return {
      {"size", "small"},
      {"initialization", "pytorch"},
      {"packing", "rows"},
      {"bos", "true"},
      {"batch", "32"},
      {"length", "2048"},
      {"seed", "123"},
      {"steps", "100000"},
      {"lr", "1e-4"},
      {"warmup", "10000"},
      {"schedule-steps", "1000000"},  // stopped after a tenth of it: the last step has 91 % of the largest rate
      {"weight-decay", "0.01"},
      {"beta1", "0.9"},
      {"beta2", "0.999"},
      {"eps", "1e-7"},
      {"clip", "0"},
      {"dtype", "auto"},          // bf16 on a GPU: autocast
      {kMixerPrecision, "tf32"},  // what Triton's dots of f32 are
      {"eval-every", "10000"},
      {"eval-batches", "0"},  // all of the test part
      {"save-every", "5000"},
  };
}

std::vector<KeyValue> with(std::vector<KeyValue> options, const std::vector<KeyValue>& changes) {
  for (const KeyValue& change : changes) std::ranges::find(options, change.key, &KeyValue::key)->value = change.value;
  return options;
}

}  // namespace

const std::vector<Recipe>& recipes() {
  static const std::vector<Recipe> all = {
      {kPaperRecipe, "small, 100,000 steps of 32 documents of up to 2048 tokens", paper_options()},
      {"paper-long", "the long run: medium, 400,000 steps of 64 documents of up to 8192 tokens",
       with(paper_options(), {{"size", "medium"}, {"batch", "64"}, {"length", "8192"}, {"steps", "400000"}})},
  };
  return all;
}

const Recipe& recipe(const std::string& name) {
  const auto found = std::ranges::find(recipes(), name, &Recipe::name);
  if (found != recipes().end()) return *found;
  std::vector<std::string> known;
  for (const Recipe& one : recipes()) known.push_back(one.name);
  unknown_name("recipe", name, known);
}

void apply_recipe(TrainOptions& options, const std::string& name) {
  const bool cpu = usable_device(options.device).is_cpu();
  for (const auto& [key, value] : recipe(name).options)
    if (!cpu || key != kMixerPrecision) set_train_option(options, key, value);
}

}  // namespace furious
