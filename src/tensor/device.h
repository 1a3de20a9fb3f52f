// Devices: names, queries and raw memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "furious/error.h"

namespace furious {

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;

  bool operator==(const Device&) const = default;
  bool is_cpu() const { return kind == DeviceKind::cpu; }
};

std::string name_of(Device device);                // "cpu", "cuda:0"
Device device_from_name(std::string_view name);    // "cpu", "cuda", "cuda:1"
Device usable_device(std::string_view name);       // also "auto": a GPU if available, else the CPU; an Error if missing
std::vector<std::string> describe_cuda_devices();  // one line each; empty without a CUDA build, driver or GPU
std::string cuda_problem();                        // the reason why no GPU is usable; empty if one is

void synchronize(Device device);  // waits for all work of the device; no effect on the CPU

class OutOfMemory : public Error {
 public:
  using Error::Error;
};

namespace memory {  // raw memory of a device, 256-byte aligned; throws OutOfMemory
void* allocate(Device device, size_t bytes);
void release(Device device, void* pointer);
void copy(Device to_device, void* to, Device from_device, const void* from, size_t bytes);  // blocks until done
void clear(Device device, void* pointer, size_t bytes);                                     // to zeros
int64_t available(Device device);  // bytes that can still be allocated
}  // namespace memory

}  // namespace furious
