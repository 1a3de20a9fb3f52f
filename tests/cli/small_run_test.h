// Runs of `furious train` that take milliseconds.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "train/small_run.h"

namespace furious::testing {

class SmallRunTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);
  std::string small =
      "--hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 4 --length 24 --threads 1 --device cpu";

  std::string command(const std::string& out, const std::string& more) const {
    return fmt::format("train --data {} --out {} {} {}", data, folder.path(out), small, more);
  }
};

}  // namespace furious::testing
