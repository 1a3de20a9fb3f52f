#include <map>
#include <memory>
#include <mutex>

#include "tensor/cuda.cuh"
#include "tensor/device_cuda.h"

namespace furious {

namespace {

struct Capture {
  int index = 0;
  cudaStream_t stream = nullptr;
};
thread_local Capture capture;

}  // namespace

CaptureStream::CaptureStream(int index) {
  require(capture.stream == nullptr, "graph: this thread is already capturing one");
  cuda::check(cudaSetDevice(index), "graph");
  cuda::check(cudaStreamCreateWithFlags(&capture.stream, cudaStreamNonBlocking), "graph");
  capture.index = index;
}

CaptureStream::~CaptureStream() {
  (void)cudaStreamDestroy(capture.stream);
  capture = {};
}

cudaStream_t cuda::stream(Device device) {
  static std::mutex mutex;
  static std::map<int, cudaStream_t> streams;
  check(cudaSetDevice(device.index), name_of(device));
  if (capture.stream != nullptr && capture.index == device.index) return capture.stream;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = streams.try_emplace(device.index);
  if (is_new) check(cudaStreamCreateWithFlags(&entry->second, cudaStreamNonBlocking), name_of(device));
  return entry->second;
}

std::mutex& cuda::launch_mutex(Device device) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, std::mutex>;  // never destroyed: may be used during exit
  const std::lock_guard lock(mutex);
  return all[device.index];
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

std::string cuda_problem() {
  int driver = 0, count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (status == cudaSuccess && count > 0) return {};
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no NVIDIA driver is installed";
  if (status == cudaErrorInsufficientDriver)
    return fmt::format("the driver supports CUDA {}.{}, this furious was built for {}.{}", driver / 1000,
                       driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  return status == cudaSuccess ? "no device was found" : cudaGetErrorString(status);
}

namespace {

struct Staging {
  int index = 0;
  size_t bytes = 0;
  void* pinned = nullptr;
  void* waiting = nullptr;  // device memory
  cudaStream_t stream = nullptr;
  cudaEvent_t sent = nullptr, arrived = nullptr;

  ~Staging() {
    (void)cudaSetDevice(index);
    if (stream != nullptr) (void)cudaStreamSynchronize(stream);
    if (sent != nullptr) (void)cudaEventDestroy(sent);
    if (arrived != nullptr) (void)cudaEventDestroy(arrived);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
    (void)cudaFree(waiting);
    (void)cudaFreeHost(pinned);
  }
};

}  // namespace

void* open_staging_cuda(int index, size_t bytes) {
  auto staging = std::make_unique<Staging>();
  staging->index = index;
  staging->bytes = bytes;
  cuda::check(cudaSetDevice(index), "feed");
  cuda::check(cudaMallocHost(&staging->pinned, bytes), "feed: pinned memory");
  staging->waiting = memory::allocate_cuda(index, bytes);
  cuda::check(cudaStreamCreateWithFlags(&staging->stream, cudaStreamNonBlocking), "feed");
  for (cudaEvent_t* event : {&staging->sent, &staging->arrived})
    cuda::check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "feed");
  return staging.release();
}

void close_staging_cuda(void* staging) {
  delete static_cast<Staging*>(staging);
}

void* staging_memory_cuda(void* staging) {
  return static_cast<Staging*>(staging)->pinned;
}

void wait_for_staging_cuda(void* staging) {
  cuda::check(cudaEventSynchronize(static_cast<Staging*>(staging)->sent), "feed");
}

void send_cuda(void* handle) {
  const Staging& staging = *static_cast<Staging*>(handle);
  cuda::check(cudaSetDevice(staging.index), "feed");
  cuda::check(cudaStreamWaitEvent(staging.stream, staging.arrived), "feed");
  cuda::check(cudaMemcpyAsync(staging.waiting, staging.pinned, staging.bytes, cudaMemcpyHostToDevice, staging.stream),
              "feed");
  cuda::check(cudaEventRecord(staging.sent, staging.stream), "feed");
}

void arrive_cuda(void* handle, void* to) {
  const Staging& staging = *static_cast<Staging*>(handle);
  const cudaStream_t stream = cuda::stream({DeviceKind::cuda, staging.index});
  cuda::check(cudaStreamWaitEvent(stream, staging.sent), "feed");
  cuda::check(cudaMemcpyAsync(to, staging.waiting, staging.bytes, cudaMemcpyDeviceToDevice, stream), "feed");
  cuda::check(cudaEventRecord(staging.arrived, stream), "feed");
}

namespace memory {

void* allocate_cuda(int index, size_t bytes) {
  void* pointer = nullptr;
  cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) status = cudaMalloc(&pointer, bytes);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // clear the error, which is not sticky, for the next call
    size_t available = 0;
    size_t total = 0;
    (void)cudaMemGetInfo(&available, &total);
    throw OutOfMemory(fmt::format("out of memory on cuda:{}: {:.1f} MiB requested, {:.1f} MiB of {:.1f} are free",
                                  index, static_cast<double>(bytes) / 0x1p20, static_cast<double>(available) / 0x1p20,
                                  static_cast<double>(total) / 0x1p20));
  }
  require(status == cudaSuccess, "cuda:{} cannot be used: {}", index, cudaGetErrorString(status));
  return pointer;
}

void release_cuda(int index, void* pointer) {
  (void)cudaSetDevice(index);
  (void)cudaFree(pointer);  // fails harmlessly if the driver has already shut down at exit
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
