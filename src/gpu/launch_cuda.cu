#include "gpu/launch.cuh"

#include <map>
#include <mutex>

namespace furious::cuda {
namespace {

int attribute(cudaDeviceAttr which) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> known;
  int device = 0;
  check(cudaGetDevice(&device), "device");
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace({device, static_cast<int>(which)});
  if (is_new) check(cudaDeviceGetAttribute(&entry->second, which, device), "device");
  return entry->second;
}

}  // namespace

bool launches_early() {
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9;  // later ones run the code for 8.0, which does not wait
}

int multiprocessors() {
  return attribute(cudaDevAttrMultiProcessorCount);
}

int most_shared_memory() {
  return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

}  // namespace furious::cuda
