// The paper's training, by name: what `--recipe NAME` of `furious train` and `furious ablate` sets. Flags win over it.
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

// Sets what the recipe says and leaves the rest. The mixer's precision is one of GPUs: on a CPU it stays as it is.
void apply_recipe(TrainOptions& options, const std::string& name);

}  // namespace furious
