// What kernels are chosen by: queries of a device, cached.
#pragma once

#include "tensor/device.h"

namespace furious::cuda {

// Compute capability 9: the devices that the code for sm_90a runs on.
bool is_hopper(Device device);

// Of the current device.
bool launches_early();  // see launch.cuh
int multiprocessors();
int most_shared_memory();  // bytes of dynamic shared memory that a block may have

// While it lives, a kernel that this thread launches starts when the previous one has ended, as on devices older than
// Hopper: launches_early() is false.
class InOrderScope {
 public:
  InOrderScope();
  ~InOrderScope();
  InOrderScope(const InOrderScope&) = delete;
  InOrderScope& operator=(const InOrderScope&) = delete;
};

}  // namespace furious::cuda
