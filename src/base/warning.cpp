#include "base/warning.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <utility>

namespace furious {
namespace {

struct Warnings {
  std::mutex mutex;
  std::set<std::string, std::less<>> given;
  std::function<void(const std::string&)> write;
};

// Never destroyed: threads may warn while the process ends.
Warnings& warnings() {
  static auto* const all = new Warnings;
  return *all;
}

}  // namespace

void warn_once(std::string_view key, std::string_view message) {
  std::function<void(const std::string&)> write;
  {
    Warnings& all = warnings();
    const std::lock_guard lock(all.mutex);
    if (all.given.contains(key)) return;
    all.given.emplace(key);
    write = all.write;
  }
  const std::string text(message);
  if (write)
    write(text);
  else
    std::fputs(("warning: " + text + "\n").c_str(), stderr);
}

void set_warning_output(std::function<void(const std::string&)> write) {
  const std::lock_guard lock(warnings().mutex);
  warnings().write = std::move(write);
}

void reset_warnings() {
  const std::lock_guard lock(warnings().mutex);
  warnings().given.clear();
}

}  // namespace furious
