// Runs of an ablation as processes of `furious train`, several at a time.
#pragma once

#include <vector>

#include "cli/progress.h"
#include "paper/ablation.h"

namespace furious::cli {

// Starts as many at a time as `most` and the free memory of their device allow, at least one; each gets its share of
// the cores. Returns when all have ended. A request to stop is passed on to them, and they save. A run that fails does
// not end the others; its output stays beside its folder, in RUN.txt.
void train_in_processes(const std::vector<AblationJob>& jobs, int64_t most, ProgressLine& line);

}  // namespace furious::cli
