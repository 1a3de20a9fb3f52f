// Small models of several architectures, trained on a synthetic task: for studies that compare architectures without
// trained checkpoints.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "furious/train.h"
#include "model/language_model.h"

namespace furious {

struct SmallModel {
  std::string name;  // of its folder
  TrainOptions options;
};

// The architectures of the paper's comparison.
inline const std::vector<std::string> kCompared{"softmax", "2mamba", "mamba2s", "mamba2"};

// The default options: training on synthetic:lookup, small enough for minutes on a CPU.
TrainOptions small_model_options();

struct SmallModelsObserver {
  // `left`: steps until all models are trained.
  std::function<void(const SmallModel& model, const TrainStep& step, int64_t left)> step;
  // `made`: steps of this call; 0 if the run was already finished.
  std::function<void(const SmallModel& model, const TrainResult& result, int64_t made)> ended;
  std::function<bool()> stop;
};

// Trains each model in OUT/NAME, or resumes the run there; a finished run is only loaded. Empty if `stop` returned
// true; another call then resumes.
std::vector<LanguageModel> train_small_models(const std::string& out, std::vector<SmallModel> models,
                                              const SmallModelsObserver& observer = {});

}  // namespace furious
