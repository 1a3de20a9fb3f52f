// The training options of the paper, by name: `--recipe NAME` of `furious train` and `furious ablate`. Flags override
// them.
#pragma once

#include <string>
#include <vector>

#include "train/options.h"

namespace furious {

struct Recipe {
  std::string name;
  std::string about;
  std::vector<KeyValue> options;  // of training
};

inline constexpr const char* kPaperRecipe = "paper";

const std::vector<Recipe>& recipes();
const Recipe& recipe(const std::string& name);  // an unknown name is answered with the nearest

// Sets the options of the recipe and leaves the rest. Sets the precision of the mixer only on a GPU.
void apply_recipe(TrainOptions& options, const std::string& name);

}  // namespace furious
