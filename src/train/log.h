// The log of a run, RUN/log.jsonl: a line of JSON for every step, and one that says why where training has failed.
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
  std::string diverged;  // why, if it did
};

// The log of the run in a folder; empty where there is none. Lines that are no steps (a run may be killed while it
// writes one) are passed over.
RunLog read_log(const std::filesystem::path& run);

}  // namespace furious
