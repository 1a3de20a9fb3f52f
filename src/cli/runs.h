// Runs of `furious train` that commands are given by their folders.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace furious::cli {

// Runs, and every run below other folders, as `furious ablate` leaves them. A place without any is an Error of the
// command.
std::vector<std::filesystem::path> runs_in(const std::string& command, const std::vector<std::string>& places);

}  // namespace furious::cli
