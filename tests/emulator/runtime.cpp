// The device, errors and memory of the emulated CUDA runtime.
#include "emulator/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "emulator/emulator.h"

namespace furious::emulator {
namespace {

constexpr size_t kTotalMemory = size_t{4} << 30;
constexpr size_t kAlignment = 512;

DeviceFacts facts_of_capability(std::string_view name) {
  if (name == "8.0") return {8, 0, 163 * 1024, 164 * 1024, 2048};
  if (name == "9.0") return {9, 0, kSharedMemoryPerBlock, 228 * 1024, 2048};
  if (name == "12.0") return {12, 0, 99 * 1024, 100 * 1024, 1536};
  fmt::print(stderr, "FURIOUS_EMULATED_CAPABILITY is \"{}\", expected 8.0, 9.0 or 12.0\n", name);
  std::abort();
}

DeviceFacts facts_from_environment() {
  const char* const capability = std::getenv("FURIOUS_EMULATED_CAPABILITY");
  const char* const multiprocessors = std::getenv("FURIOUS_EMULATED_MULTIPROCESSORS");
  DeviceFacts facts = facts_of_capability(capability == nullptr ? "9.0" : capability);
  if (multiprocessors != nullptr) facts.multiprocessors = std::atoi(multiprocessors);
  if (facts.multiprocessors > 0) return facts;
  fmt::print(stderr, "FURIOUS_EMULATED_MULTIPROCESSORS is \"{}\", expected a number\n", multiprocessors);
  std::abort();
}

const char* meaning_of(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorCooperativeLaunchTooLarge:
      return "too many blocks in cooperative launch";
    case cudaErrorInvalidClusterSize:
      return "invalid cluster size";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge:
      return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched:
      return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorIllegalState:
      return "the operation cannot be performed in the present state";
    default:
      return "an error of the emulated runtime";
  }
}

thread_local cudaError_t last_error = cudaSuccess;  // of cudaGetLastError()

// The last failure, which cudaGetErrorString() describes.
thread_local cudaError_t described_error = cudaSuccess;
thread_local std::string description;

void describe(cudaError_t status, std::string text) {
  described_error = status;
  description = std::move(text);
}

cudaError_t report(cudaError_t status, const char* message, bool remembered) {
  describe(status, fmt::format("{} ({})", meaning_of(status), message));
  // Programs try allocations that may fail; everything else is a mistake.
  if (status != cudaErrorMemoryAllocation) fmt::print(stderr, "emulated CUDA: {}\n", description);
  if (remembered) last_error = status;
  return status;
}

struct Allocation {
  size_t bytes = 0;
  bool on_device = false;
};

struct Memory {
  std::map<uintptr_t, Allocation> allocations;
  size_t used = 0;  // on the device
};
Memory& memory() {
  static Memory& only = *new Memory;  // never destroyed: tensors with static lifetime are released during exit
  return only;
}

// The allocation that an address lies in.
const std::pair<const uintptr_t, Allocation>* allocation_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = memory().allocations.upper_bound(address);
  if (after == memory().allocations.begin()) return nullptr;
  --after;
  return address - after->first < after->second.bytes ? &*after : nullptr;
}

void* allocate(size_t bytes, bool on_device) {
  if (bytes == 0) return nullptr;
  if (bytes > kTotalMemory || (on_device && bytes > kTotalMemory - memory().used))
    throw Failure(cudaErrorMemoryAllocation, fmt::format("{} bytes, {} are in use", bytes, memory().used));
  void* const pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (pointer == nullptr) throw Failure(cudaErrorMemoryAllocation, fmt::format("{} bytes on the host", bytes));
  if (on_device) {
    std::memset(pointer, kUnwritten, bytes);
    memory().used += bytes;
  }
  memory().allocations[reinterpret_cast<uintptr_t>(pointer)] = {bytes, on_device};
  add_memory(pointer, bytes);
  return pointer;
}

void release(void* pointer, bool on_device) {
  if (pointer == nullptr) return;
  const auto found = memory().allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == memory().allocations.end() || found->second.on_device != on_device)
    throw Failure(cudaErrorInvalidValue, fmt::format("{} was not allocated, or by another function", pointer));
  remove_memory(pointer);
  if (on_device) memory().used -= found->second.bytes;
  memory().allocations.erase(found);
  std::free(pointer);
}

// Memory of which the runtime knows nothing is the host's.
void check_side(const void* begin, size_t bytes, bool must_be_on_device, std::string_view what) {
  const auto* const entry = allocation_of(begin);
  if (must_be_on_device && (entry == nullptr || !entry->second.on_device))
    throw Failure(cudaErrorInvalidValue, fmt::format("{}: {} is not on the device", what, begin));
  if (entry != nullptr) require_memory(begin, bytes, what);
}

void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return;
  check_side(to, bytes, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, "destination of a copy");
  check_side(from, bytes, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, "source of a copy");
  const auto* const first = static_cast<const std::byte*>(from);
  const auto* const second = static_cast<const std::byte*>(to);
  if (first != second && first < second + bytes && second < first + bytes)
    throw Failure(cudaErrorInvalidValue, "the source and the destination of a copy overlap");
  std::memmove(to, from, bytes);
}

void fill(void* begin, int value, size_t bytes) {
  if (bytes == 0) return;
  check_side(begin, bytes, true, "memset");
  std::memset(begin, value, bytes);
}

void check_device(int index) {
  if (index != 0) throw Failure(cudaErrorInvalidDevice, fmt::format("there is no device {}", index));
}

int attribute_of(cudaDeviceAttr which) {
  const DeviceFacts& device = device_facts();
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return kMostThreads;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return INT32_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return kDefaultSharedMemory;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(device.shared_per_block);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(device.shared_per_multiprocessor);
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return kReservedSharedMemory;
    case cudaDevAttrTotalConstantMemory:
      return 65536;
    case cudaDevAttrWarpSize:
      return kWarpSize;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrMultiProcessorCount:
      return device.multiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return device.threads_per_multiprocessor;
    case cudaDevAttrL2CacheSize:
      return 50 << 20;
    case cudaDevAttrComputeCapabilityMajor:
      return device.major;
    case cudaDevAttrComputeCapabilityMinor:
      return device.minor;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
      return 1;
    case cudaDevAttrClusterLaunch:
      return device.has_clusters() ? 1 : 0;
    default:
      throw Failure(cudaErrorInvalidValue, fmt::format("device attribute {}", static_cast<int>(which)));
  }
}

cudaDeviceProp properties() {
  const DeviceFacts& device = device_facts();
  cudaDeviceProp all{};
  std::snprintf(all.name, sizeof(all.name), "emulated");
  all.totalGlobalMem = kTotalMemory;
  all.sharedMemPerBlock = kDefaultSharedMemory;
  all.sharedMemPerBlockOptin = device.shared_per_block;
  all.sharedMemPerMultiprocessor = device.shared_per_multiprocessor;
  all.reservedSharedMemPerBlock = kReservedSharedMemory;
  all.regsPerBlock = all.regsPerMultiprocessor = attribute_of(cudaDevAttrMaxRegistersPerBlock);
  all.warpSize = kWarpSize;
  all.maxThreadsPerBlock = all.maxThreadsDim[0] = all.maxThreadsDim[1] = kMostThreads;
  all.maxThreadsDim[2] = attribute_of(cudaDevAttrMaxBlockDimZ);
  all.maxGridSize[0] = attribute_of(cudaDevAttrMaxGridDimX);
  all.maxGridSize[1] = all.maxGridSize[2] = attribute_of(cudaDevAttrMaxGridDimY);
  all.totalConstMem = static_cast<size_t>(attribute_of(cudaDevAttrTotalConstantMemory));
  all.major = device.major;
  all.minor = device.minor;
  all.multiProcessorCount = device.multiprocessors;
  all.maxThreadsPerMultiProcessor = device.threads_per_multiprocessor;
  all.l2CacheSize = attribute_of(cudaDevAttrL2CacheSize);
  all.concurrentKernels = all.unifiedAddressing = all.cooperativeLaunch = 1;
  all.clusterLaunch = device.has_clusters() ? 1 : 0;
  return all;
}

}  // namespace

std::recursive_mutex& runtime_mutex() {
  static std::recursive_mutex& only = *new std::recursive_mutex;
  return only;
}

const DeviceFacts& device_facts() {
  static const DeviceFacts facts = facts_from_environment();
  return facts;
}

cudaError_t report_exception(LastError remembered) {
  try {
    throw;
  } catch (const Failure& failure) {
    return report(failure.status, failure.what(), remembered != LastError::none);
  } catch (const std::exception& error) {
    return report(cudaErrorLaunchFailure, error.what(), remembered == LastError::of_all);
  }
}

const void* device_allocation_of(const void* pointer) {
  const auto* const entry = allocation_of(pointer);
  return entry != nullptr && entry->second.on_device ? reinterpret_cast<const void*>(entry->first) : nullptr;
}

void require_memory(const void* begin, size_t bytes, std::string_view what) {
  const auto* const entry = allocation_of(begin);
  if (entry != nullptr && bytes <= entry->first + entry->second.bytes - reinterpret_cast<uintptr_t>(begin)) return;
  const std::string where = entry == nullptr ? "are in no allocation"
                                             : fmt::format("are not within the allocation of {} bytes at {:#x}",
                                                           entry->second.bytes, entry->first);
  throw Failure(cudaErrorInvalidValue, fmt::format("{}: {} bytes at {} {}", what, bytes, begin, where));
}

}  // namespace furious::emulator

using namespace furious::emulator;

extern "C" {

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
  return last_error;
}

const char* cudaGetErrorString(cudaError_t status) {
  return status != cudaSuccess && status == described_error ? description.c_str() : meaning_of(status);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int index) {
  return call([&] { check_device(index); });
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int index) {
  return call([&] {
    check_device(index);
    *value = attribute_of(which);
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int index) {
  return call([&] {
    check_device(index);
    *all = properties();
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function = known ? tensor_map_encoder() : nullptr;
  if (result != nullptr) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return known || result != nullptr ? cudaSuccess : cudaErrorSymbolNotFound;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return call([&] { *pointer = allocate(bytes, true); });
}

cudaError_t cudaFree(void* pointer) {
  return call([&] { release(pointer, true); });
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return call([&] { *pointer = allocate(bytes, false); });
}

cudaError_t cudaFreeHost(void* pointer) {
  return call([&] { release(pointer, false); });
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  return call([&] {
    *available = kTotalMemory - memory().used;
    *total = kTotalMemory;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return call([&] { enqueue(stream, [=] { copy(to, from, bytes, kind); }); });
}

cudaError_t cudaMemsetAsync(void* begin, int value, size_t bytes, cudaStream_t stream) {
  return call([&] { enqueue(stream, [=] { fill(begin, value, bytes); }); });
}

}  // extern "C"
