// The options of training as flags.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "train/options.h"

namespace furious::cli {

class TrainFlags {
 public:
  // Those named, or all. A value that cannot be is refused when the command line is read.
  TrainFlags(CLI::App& command, const TrainOptions& defaults, const std::vector<std::string>& names = {});

  void apply(TrainOptions& options) const;  // sets those that were given

 private:
  std::vector<std::pair<const TrainOption*, const CLI::Option*>> flags_;
};

}  // namespace furious::cli
