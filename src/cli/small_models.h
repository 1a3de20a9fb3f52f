// Small models of several architectures, trained on a synthetic task: for commands that compare architectures without
// trained checkpoints.
#pragma once

#include <string>
#include <vector>

#include "cli/flags.h"
#include "cli/train_flags.h"
#include "model/language_model.h"

namespace furious::cli {

struct SmallModel {
  std::string name;  // of its folder
  TrainOptions options;
};

// The architectures of the paper's comparison.
inline const std::vector<std::string> kCompared{"softmax", "2mamba", "mamba2s", "mamba2"};

// The options of their training on synthetic:lookup, small enough for minutes on a CPU, with flags for the most
// important ones.
class SmallModelFlags {
 public:
  explicit SmallModelFlags(CLI::App& command, bool heads = true);
  TrainOptions options() const;

 private:
  TrainFlags any_, of_models_;
};

// Trains each model in OUT/NAME, or resumes the run there; a finished run is only loaded. Empty after a signal; the
// same command then resumes.
std::vector<LanguageModel> train_small_models(const std::string& command, const std::string& out,
                                              std::vector<SmallModel> models);

}  // namespace furious::cli
