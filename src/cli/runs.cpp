#include "cli/runs.h"

#include <algorithm>

#include "base/error.h"
#include "train/log.h"

namespace furious::cli {
namespace fs = std::filesystem;
namespace {

// A run, or every run below a folder, as `furious ablate` leaves them.
void find_runs(const fs::path& folder, std::vector<fs::path>& found) {
  if (fs::is_regular_file(folder / kLogFile)) {
    found.push_back(folder);
    return;
  }
  std::vector<fs::path> inside;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.is_directory() && !entry.is_symlink()) inside.push_back(entry.path());
  std::ranges::sort(inside);
  for (const fs::path& one : inside) find_runs(one, found);
}

}  // namespace

std::vector<fs::path> runs_in(const std::string& command, const std::vector<std::string>& places) {
  std::vector<fs::path> found;
  for (const std::string& place : places) {
    fs::path path = fs::path(place).lexically_normal();
    if (path.filename().empty() || path.filename() == kLogFile) path = path.parent_path();  // "run/", "run/log.jsonl"
    require(fs::exists(path), "{}: {} does not exist; give the folder of a run", command, place);
    require(fs::is_directory(path), "{}: {} is not a folder; give a run of `furious train`", command, place);
    const size_t before = found.size();
    find_runs(path.empty() ? "." : path, found);
    require(found.size() > before, "{}: {} contains no run; no folder in it has a {}", command, place, kLogFile);
  }
  return found;
}

}  // namespace furious::cli
