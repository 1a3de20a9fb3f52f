// Writes the log of a run, and copies of it for other programs.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "train/log.h"

namespace furious {

enum class LogFormat : uint8_t { csv, tensorboard };

// "csv,tensorboard"; an unknown name is answered with the nearest.
std::vector<LogFormat> log_formats_from_names(const std::string& names);

class LogWriter {
 public:
  // Begins the files anew, with the steps that a resumed run keeps.
  LogWriter(const std::filesystem::path& folder, const std::vector<LogFormat>& formats,
            const std::vector<TrainStep>& kept);

  void add(const TrainStep& step);  // an Error names a file that cannot be written
  void add_divergence(int64_t step, const std::string& why);

 private:
  std::filesystem::path log_, csv_, events_;  // empty: not written
};

}  // namespace furious
