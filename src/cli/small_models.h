// Small models of several architectures, trained on one task on the spot: for commands that show what an architecture
// can do before anyone has a large model of it.
#pragma once

#include <string>
#include <vector>

#include "cli/train_flags.h"
#include "model/language_model.h"

namespace furious::cli {

struct SmallModel {
  std::string name;  // of its folder
  TrainOptions options;
};

// The architectures of the paper's comparison.
inline const std::vector<std::string> kCompared{"softmax", "2mamba", "mamba2s", "mamba2"};

// The options of their training, on synthetic:lookup and small enough for minutes on a CPU, with flags for those that a
// user may want to change.
class SmallModelFlags {
 public:
  explicit SmallModelFlags(CLI::App& command, bool heads = true);
  TrainOptions options() const;

 private:
  TrainFlags any_, of_models_;
};

// Lists of the command line: with commas, so that what follows a space is not part of them.
CLI::Option* with_commas(CLI::Option* option);

// Trains each in folder OUT/NAME, or goes on with what is there: what was trained before is not trained again. Nothing
// where a signal ended it; the same command goes on then.
std::vector<LanguageModel> train_small_models(const std::string& command, const std::string& out,
                                              std::vector<SmallModel> models);

}  // namespace furious::cli
