#include "tensor/stream.h"

#ifndef FURIOUS_CUDA

#include "base/error.h"

namespace furious {

StreamScope::StreamScope(Device device, void*) : device_(device) {
  require(device.is_cpu(), "stream: this furious was built without CUDA; use device \"cpu\" or build the cuda preset");
}
StreamScope::~StreamScope() = default;

KeepCurrentDevice::KeepCurrentDevice(Device) {}
KeepCurrentDevice::~KeepCurrentDevice() = default;

}  // namespace furious

#endif
