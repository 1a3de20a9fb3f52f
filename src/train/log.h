// The log of a run, RUN/log.jsonl: one JSON object per step, and one with the reason after divergence.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "furious/train.h"

namespace furious {

inline constexpr const char* kLogFile = "log.jsonl";

// A number that the steps of a log have.
struct LogNumber {
  std::string name;                                             // in log.jsonl and log.csv
  std::string tag;                                              // in TensorBoard; empty: it is not there
  std::function<nlohmann::ordered_json(const TrainStep&)> get;  // null where a step does not have it
  std::function<void(TrainStep&, double)> set;                  // NaN: the step does not have it
};
const std::vector<LogNumber>& log_numbers();

std::string to_line(const TrainStep& step);
std::string diverged_line(int64_t step, const std::string& why);

struct RunLog {
  std::vector<TrainStep> steps;
  std::string diverged;  // the reason; empty if the run did not diverge
};

// The log of the run in a folder; empty if there is none. Incomplete lines (of a killed process) are skipped.
RunLog read_log(const std::filesystem::path& run);

// The log of a run that may still be training.
class LogFollower {
 public:
  explicit LogFollower(const std::filesystem::path& run) : path_(run / kLogFile) {}

  // Reads what was added since the last call; all of it again if the file was replaced, as a resumed run does. A line
  // without an end waits for it.
  void update();
  const RunLog& log() const { return log_; }

 private:
  std::filesystem::path path_;
  RunLog log_;
  uint64_t file_ = 0;  // inode
  uint64_t read_ = 0;  // bytes
  std::string rest_;   // of them, after the last line break
};

}  // namespace furious
