#include <map>
#include <mutex>

#include "gpu/device.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

thread_local int in_order_scopes = 0;

int attribute(cudaDeviceAttr which, int device) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> known;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace({device, static_cast<int>(which)});
  if (is_new) check(cudaDeviceGetAttribute(&entry->second, which, device), "device");
  return entry->second;
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "device");
  return device;
}

}  // namespace

bool is_hopper(Device device) {
  return attribute(cudaDevAttrComputeCapabilityMajor, device.index) == 9;
}

bool launches_early() {
  // Later devices run the code for 8.0, which does not wait.
  return in_order_scopes == 0 && attribute(cudaDevAttrComputeCapabilityMajor, current_device()) == 9;
}

int multiprocessors() {
  return attribute(cudaDevAttrMultiProcessorCount, current_device());
}

int most_shared_memory() {
  return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device());
}

InOrderScope::InOrderScope() {
  ++in_order_scopes;
}
InOrderScope::~InOrderScope() {
  --in_order_scopes;
}

}  // namespace furious::cuda
