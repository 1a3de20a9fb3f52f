// The log of a run, RUN/log.jsonl: one JSON object per step, and one with the reason after divergence.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "furious/train.h"

namespace furious {

inline constexpr const char* kLogFile = "log.jsonl";

std::string to_line(const TrainStep& step);
std::string diverged_line(int64_t step, const std::string& why);

struct RunLog {
  std::vector<TrainStep> steps;
  std::string diverged;  // the reason; empty if the run did not diverge
};

// The log of the run in a folder; empty if there is none. Incomplete lines (of a killed process) are skipped.
RunLog read_log(const std::filesystem::path& run);

}  // namespace furious
