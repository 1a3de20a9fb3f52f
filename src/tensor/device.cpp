#include "tensor/device.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/memory.h"
#include "base/number.h"
#include "tensor/device_cuda.h"

namespace furious {

std::string name_of(Device device) {
  return device.is_cpu() ? "cpu" : fmt::format("cuda:{}", device.index);
}

Device device_from_name(std::string_view name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {DeviceKind::cuda, 0};
  if (name.starts_with("cuda:")) {
    const auto index = parse_number<int>(name.substr(5));
    if (index && *index >= 0) return {DeviceKind::cuda, *index};
  }
  fail("unknown device \"{}\"; expected \"cpu\", \"cuda\" or \"cuda:N\"", name);
}

Device usable_device(std::string_view name) {
  if (name == "cpu") return {};
  const auto found = static_cast<int>(describe_cuda_devices().size());
  if (name == "auto") return found > 0 ? Device{DeviceKind::cuda, 0} : Device{};
  const Device device = device_from_name(name);
#ifdef FURIOUS_CUDA
  require(found > 0,
          "device {}: no usable GPU: {}; check that nvidia-smi lists one with a driver for CUDA {}.{} or newer, or use "
          "\"cpu\"",
          name, cuda_problem(), cuda_version() / 1000, cuda_version() % 1000 / 10);
  require(device.index < found, "device {}: only {} found, counted from cuda:0; use one of those", name, found);
#else
  fail("device {}: this furious was built without CUDA; use \"cpu\" or build the cuda preset", name);
#endif
  return device;
}

#ifndef FURIOUS_CUDA
std::vector<std::string> describe_cuda_devices() {
  return {};
}
std::string cuda_problem() {
  return "this furious was built without CUDA";
}

namespace memory {
void* allocate_cuda(int, size_t) {
  fail("this furious was built without CUDA; use device \"cpu\" or build the cuda preset");
}
void release_cuda(int, void*) {}
void copy_cuda(int, void*, const void*, size_t) {
  fail("this furious was built without CUDA; it cannot copy to or from a GPU");
}
void clear_cuda(int, void*, size_t) {}
int64_t available_cuda(int) {
  return 0;
}
}  // namespace memory
void synchronize_cuda(int) {}
void* open_staging_cuda(int, size_t) {
  fail("this furious was built without CUDA; it has no staging buffers");
}
void close_staging_cuda(void*) {}
void* staging_memory_cuda(void*) {
  return nullptr;
}
void wait_for_staging_cuda(void*) {}
void send_cuda(void*) {}
void arrive_cuda(void*, void*) {}
#endif

void synchronize(Device device) {
  if (!device.is_cpu()) synchronize_cuda(device.index);
}

namespace memory {

void* allocate(Device device, size_t bytes) {
  if (!device.is_cpu()) return allocate_cuda(device.index, bytes);
  void* pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (pointer == nullptr)
    throw OutOfMemory(fmt::format("out of memory on cpu: {:.1f} MiB requested", static_cast<double>(bytes) / 0x1p20));
  return pointer;
}

void release(Device device, void* pointer) {
  if (device.is_cpu())
    std::free(pointer);
  else
    release_cuda(device.index, pointer);
}

void copy(Device to_device, void* to, Device from_device, const void* from, size_t bytes) {
  if (to_device.is_cpu() && from_device.is_cpu())
    std::memcpy(to, from, bytes);
  else
    copy_cuda(to_device.is_cpu() ? from_device.index : to_device.index, to, from, bytes);
}

void clear(Device device, void* pointer, size_t bytes) {
  if (device.is_cpu())
    std::memset(pointer, 0, bytes);
  else
    clear_cuda(device.index, pointer, bytes);
}

int64_t available(Device device) {
  return device.is_cpu() ? available_memory() : available_cuda(device.index);
}

}  // namespace memory
}  // namespace furious
