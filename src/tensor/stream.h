// The library's work on a GPU in order with a stream of a caller.
//
// All work of a device is launched on one stream (cuda.cuh), which is what makes it safe to give released memory to the
// next tensor at once. A caller's stream does not replace it. Instead events order the two: when a scope begins, the
// device's stream waits for what the caller's stream holds; when it ends, the caller's stream waits for what the
// device's stream holds. Memory of the arena is then used on one stream only, whatever streams and threads callers
// have; the caller's memory may be reused on the caller's stream as soon as the scope has ended.
#pragma once

#include "tensor/device.h"

namespace furious {

// No effect on the CPU. `stream` is a cudaStream_t.
class StreamScope {
 public:
  StreamScope(Device device, void* stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  Device device_;
  void* stream_ = nullptr;
  void* event_ = nullptr;
};

// Restores this thread's current CUDA device, which the library's work on another one changes.
class KeepCurrentDevice {
 public:
  explicit KeepCurrentDevice(Device used);
  ~KeepCurrentDevice();
  KeepCurrentDevice(const KeepCurrentDevice&) = delete;
  KeepCurrentDevice& operator=(const KeepCurrentDevice&) = delete;

 private:
  int before_ = -1;  // −1: nothing to restore
};

}  // namespace furious
