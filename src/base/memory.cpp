#include "base/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace furious {
namespace {

int64_t number_in(const char* path) {  // -1: no such file, or "max"
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

int64_t free_of_machine() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  for (int64_t kib = 0; file >> key >> kib; std::getline(file, unit))
    if (key == "MemAvailable:") return kib * 1024;
  return std::numeric_limits<int64_t>::max();
}

// Pages of files, which the system drops when memory is needed.
int64_t file_pages_of_group() {
  std::ifstream file("/sys/fs/cgroup/memory.stat");
  std::string key;
  int64_t sum = 0;
  for (int64_t bytes = 0; file >> key >> bytes;)
    if (key == "inactive_file" || key == "active_file") sum += bytes;
  return sum;
}

}  // namespace

int64_t available_memory() {
  int64_t bytes = free_of_machine();
  const int64_t limit = number_in("/sys/fs/cgroup/memory.max");
  const int64_t used = number_in("/sys/fs/cgroup/memory.current");
  if (limit >= 0 && used >= 0)
    bytes = std::min(bytes, std::max<int64_t>(0, limit - std::max<int64_t>(0, used - file_pages_of_group())));
  return bytes;
}

}  // namespace furious
