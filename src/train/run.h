// The folder of a training run (furious/train.h).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "furious/train.h"

namespace furious {

std::vector<std::filesystem::path> checkpoints_in(const std::filesystem::path& run);  // oldest first

// The checkpoint from which such a run resumes; empty if there is none yet.
std::filesystem::path resumed_checkpoint(const TrainOptions& options);

// How run.toml disagrees with a checkpoint of the run in options that cannot change; empty if it does not, or if there
// is no run.toml.
std::string run_toml_damage(const std::filesystem::path& run, const TrainOptions& saved);

// The names of folders beside this one that hold runs with checkpoints.
std::vector<std::string> runs_beside(const std::filesystem::path& folder);

}  // namespace furious
