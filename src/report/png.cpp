#include "report/png.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

// Empty if it is not on the PATH.
fs::path program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (fs::path candidate = fs::path(folder) / name; ::access(candidate.c_str(), X_OK) == 0) return candidate;
  return {};
}

// The command that converts `svg` to `png` with the first installed program, at twice the size for sharp print.
std::vector<std::string> converter(const std::string& svg, const std::string& png) {
  if (const fs::path found = program("rsvg-convert"); !found.empty())
    return {found.string(), "--zoom=2", "--output=" + png, svg};
  if (const fs::path found = program("inkscape"); !found.empty())
    return {found.string(), "--export-dpi=192", "--export-filename=" + png, svg};
  fail(
      "PNG: neither rsvg-convert (package librsvg2-bin) nor inkscape is installed; install one, or write an .svg, "
      "which "
      "needs neither");
}

void run(std::vector<std::string> command) {
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int problem = ::posix_spawn(&child, arguments[0], nullptr, nullptr, arguments.data(), ::environ);
  require(problem == 0, "PNG: cannot start {}: {}", command.front(), std::strerror(problem));
  int status = 0;
  ::waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "PNG: {} has failed", command.front());
}

}  // namespace

void check_png() {
  converter("", "");
}

void write_png(const fs::path& path, const std::string& svg) {
  AtomicFile out(path);  // a place that cannot be written is said before any work
  std::string folder = (fs::temp_directory_path() / "furious-png-XXXXXX").string();
  require(::mkdtemp(folder.data()) != nullptr, "PNG: cannot make a folder in {}: {}",
          fs::temp_directory_path().string(), std::strerror(errno));
  struct Removed {
    const std::string& folder;
    ~Removed() {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
    }
  } removed{folder};
  write_text(folder + "/chart.svg", svg);
  run(converter(folder + "/chart.svg", folder + "/chart.png"));
  const MappedFile png(folder + "/chart.png");
  out.write(png.bytes());
  out.commit();
}

}  // namespace furious
