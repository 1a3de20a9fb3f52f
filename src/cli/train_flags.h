// The options of training as flags.
#pragma once

#include <CLI/CLI.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "train/options.h"
#include "train/recipe.h"

namespace furious::cli {

class TrainFlags {
 public:
  // The named options, or all. An invalid value is an error when the command line is parsed.
  TrainFlags(CLI::App& command, const TrainOptions& defaults, const std::vector<std::string>& names = {});

  void apply(TrainOptions& options) const;  // sets the options that were given
  std::set<std::string> given() const;      // their names

 private:
  std::vector<std::pair<const TrainOption*, const CLI::Option*>> flags_;
};

// --recipe NAME, and --paper for the paper's.
class RecipeFlag {
 public:
  explicit RecipeFlag(CLI::App& command);

  explicit operator bool() const { return paper_ || !name_.empty(); }
  // `given` sets the flags of the user, which override the recipe. It also runs before the recipe, which depends on the
  // device.
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

// For the end of a help text.
inline constexpr const char* kGlossaryPage = "docs/glossary.md explains the numbers that commands print.";
inline constexpr const char* kPaperPage =
    "docs/paper.md lists the command of every table, figure and claim of the paper.";

}  // namespace furious::cli
