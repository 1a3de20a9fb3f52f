// The runs that a command is given, and their loss curves.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "report/chart.h"
#include "train/log.h"

namespace furious::cli {

// The folder that a place means: "run/" and "run/log.jsonl" are run.
std::filesystem::path run_folder(const std::string& place);
// A run, or every run below a folder, as `furious ablate` writes them. Nothing if there is none yet.
std::vector<std::filesystem::path> runs_below(const std::string& place);
// The same for several, each run once. A place without a run is an Error of the command.
std::vector<std::filesystem::path> runs_in(const std::string& command, const std::vector<std::string>& places);

inline constexpr const char* kRunsHelp =
    "Folders of runs, or folders that contain runs, as `furious ablate` writes them";

// The options with which it is trained, from its run.toml; none if that is missing or damaged.
std::optional<TrainOptions> options_of(const std::filesystem::path& run);

// Flags that select and shape curves.
struct CurveFlags {
  explicit CurveFlags(CLI::App& command);

  // Runs by name, in colours 0, 1, …; `named`: with the name and last loss at the end of a line.
  struct Run {
    std::string name;
    const RunLog& log;
  };
  Chart chart(const std::vector<Run>& runs) const;
  bool has_points(const RunLog& log) const;

  std::string x = "step", curves = "both";
  int64_t smooth = -1, from = 0;
  bool log_x = false, log_y = false;

 private:
  Series training(const RunLog& log) const;
  Series test(const RunLog& log) const;
};

}  // namespace furious::cli
