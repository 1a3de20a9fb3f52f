// The options of training as flags.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "train/options.h"
#include "train/recipe.h"

namespace furious::cli {

class TrainFlags {
 public:
  // Those named, or all. A value that cannot be is refused when the command line is read.
  TrainFlags(CLI::App& command, const TrainOptions& defaults, const std::vector<std::string>& names = {});

  void apply(TrainOptions& options) const;  // sets those that were given

 private:
  std::vector<std::pair<const TrainOption*, const CLI::Option*>> flags_;
};

// --recipe NAME, and --paper for the paper's.
class RecipeFlag {
 public:
  explicit RecipeFlag(CLI::App& command);

  explicit operator bool() const { return paper_ || !name_.empty(); }
  // `given` sets what was asked for, which wins over the recipe: called before it too, for the device it is for.
  template <class Given>
  void apply(TrainOptions& options, Given&& given) const {
    given(options);
    if (!*this) return;
    apply_recipe(options, name_.empty() ? kPaperRecipe : name_);
    given(options);
  }

 private:
  std::string name_;
  bool paper_ = false;
};

// Where the paper's experiments are listed, for the end of a command's help.
inline constexpr const char* kPaperPage =
    "docs/paper.md has the command of every table, figure and claim of the paper.";

}  // namespace furious::cli
