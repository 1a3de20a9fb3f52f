// Flags and progress of commands that train small models (paper/small_models.h).
#pragma once

#include <string>
#include <vector>

#include "cli/train_flags.h"
#include "paper/small_models.h"

namespace furious::cli {

// small_model_options() with flags for the most important ones.
class SmallModelFlags {
 public:
  explicit SmallModelFlags(CLI::App& command, bool heads = true);
  TrainOptions options() const;

 private:
  TrainFlags any_, of_models_;
};

// train_small_models with a progress line and a line per model. Empty after a signal; the same command then resumes.
std::vector<LanguageModel> train_with_progress(const std::string& command, const std::string& out,
                                               const std::vector<SmallModel>& models);

}  // namespace furious::cli
