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

}  // namespace

int64_t available_memory() {
  int64_t bytes = free_of_machine();
  const int64_t limit = number_in("/sys/fs/cgroup/memory.max");
  const int64_t used = number_in("/sys/fs/cgroup/memory.current");
  if (limit >= 0 && used >= 0) bytes = std::min(bytes, std::max<int64_t>(0, limit - used));
  return bytes;
}

}  // namespace furious
