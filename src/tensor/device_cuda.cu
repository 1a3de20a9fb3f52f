#include <map>
#include <mutex>

#include "tensor/cuda.cuh"
#include "tensor/device_cuda.h"

namespace furious {

cudaStream_t cuda::stream(Device device) {
  static std::mutex mutex;
  static std::map<int, cudaStream_t> streams;
  check(cudaSetDevice(device.index), name_of(device));
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = streams.try_emplace(device.index);
  if (is_new) check(cudaStreamCreateWithFlags(&entry->second, cudaStreamNonBlocking), name_of(device));
  return entry->second;
}

void synchronize_cuda(int index) {
  const Device device{DeviceKind::cuda, index};
  cuda::check(cudaStreamSynchronize(cuda::stream(device)), name_of(device));
}

int cuda_version() {
  return CUDART_VERSION;
}

std::vector<std::string> describe_cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};  // no driver, or one too old for this toolkit
  std::vector<std::string> lines;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    lines.push_back(fmt::format("cuda:{} {} (compute capability {}.{}, {:.0f} GiB)", i, properties.name,
                                properties.major, properties.minor,
                                static_cast<double>(properties.totalGlobalMem) / 0x1p30));
  }
  return lines;
}

namespace memory {

void* allocate_cuda(int index, size_t bytes) {
  void* pointer = nullptr;
  cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) status = cudaMalloc(&pointer, bytes);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // this error is not sticky; clear it for the next call
    size_t available = 0;
    size_t total = 0;
    (void)cudaMemGetInfo(&available, &total);
    fail("out of memory on cuda:{}: {:.1f} MiB more were needed, {:.1f} MiB of {:.1f} are free", index,
         static_cast<double>(bytes) / 0x1p20, static_cast<double>(available) / 0x1p20,
         static_cast<double>(total) / 0x1p20);
  }
  require(status == cudaSuccess, "cuda:{} cannot be used: {}", index, cudaGetErrorString(status));
  return pointer;
}

void release_cuda(int index, void* pointer) {
  (void)cudaSetDevice(index);
  (void)cudaFree(pointer);  // at exit the driver may be gone already; nothing is lost then
}

void copy_cuda(int index, void* to, const void* from, size_t bytes) {
  const cudaStream_t stream = cuda::stream({DeviceKind::cuda, index});
  cudaError_t status = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  require(status == cudaSuccess, "copy of {:.1f} MiB to or from a CUDA device failed: {}",
          static_cast<double>(bytes) / 0x1p20, cudaGetErrorString(status));
}

void clear_cuda(int index, void* pointer, size_t bytes) {
  const Device device{DeviceKind::cuda, index};
  cuda::check(cudaMemsetAsync(pointer, 0, bytes, cuda::stream(device)), name_of(device));
}

int64_t available_cuda(int index) {
  const Device device{DeviceKind::cuda, index};
  size_t available = 0;
  size_t total = 0;
  cuda::check(cudaSetDevice(index), name_of(device));
  cuda::check(cudaMemGetInfo(&available, &total), name_of(device));
  return static_cast<int64_t>(available);
}

}  // namespace memory
}  // namespace furious
