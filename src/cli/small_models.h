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

// Of training on synthetic:lookup: small enough for minutes on a CPU.
TrainOptions small_model_options();

// The options of training that a command with small models has as flags.
inline const std::vector<std::string> kSmallModelFlags{"steps",  "lr",    "warmup", "batch",    "length",
                                                       "hidden", "heads", "layers", "qk-heads", "seed",
                                                       "device", "dtype", "threads"};

// Trains each in folder OUT/NAME, or goes on with what is there: what was trained before is not trained again. Nothing
// where a signal ended it; the same command goes on then.
std::vector<LanguageModel> train_small_models(const std::string& command, const std::string& out,
                                              std::vector<SmallModel> models);

}  // namespace furious::cli
