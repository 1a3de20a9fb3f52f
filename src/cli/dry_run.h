// `furious train --dry-run`: what a run will take, without writing a file.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "furious/train.h"

namespace furious::cli {

class DryRun {
 public:
  explicit DryRun(CLI::App& command);  // --dry-run, --assume-gpu

  explicit operator bool() const { return wanted_; }
  void run(const TrainOptions& options) const;

 private:
  bool wanted_ = false;
  std::string assumed_;  // memory of a GPU: "80GB"
};

int64_t parse_bytes(const std::string& text);  // "80GB", "24 GiB", "512MB"

}  // namespace furious::cli
