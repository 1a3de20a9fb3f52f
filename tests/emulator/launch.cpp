// Kernels of the emulated CUDA runtime: their registration, which runs before main, and their launches.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/fat_binary.h"
#include "emulator/runtime.h"

namespace furious::emulator {
namespace {

struct FatBinary {
  const void* wrapper = nullptr;
  bool loaded = false;
  int architecture = 0;  // of the code that was loaded; 0 if there is none for the device
};

struct Function {
  FatBinary* binary = nullptr;
  const char* name = nullptr;
  Kernel* kernel = nullptr;   // when it has been used
  size_t dynamic_shared = 0;  // what cudaFuncSetAttribute has allowed
  bool any_cluster_size = false;
};

// By the address of the function on the host that launches it. Never destroyed: used before main and during exit.
std::unordered_map<const void*, Function>& functions() {
  static auto& all = *new std::unordered_map<const void*, Function>;
  return all;
}

void load(FatBinary& binary) {
  if (binary.loaded) return;
  std::optional<DeviceCode> code = device_code(binary.wrapper, device_facts().major, device_facts().minor);
  if (code.has_value()) {
    add_module(std::move(code->ptx));
    binary.architecture = code->architecture;
  }
  binary.loaded = true;
}

Function& function_at(const void* host) {
  const auto found = functions().find(host);
  if (found == functions().end()) throw Failure(cudaErrorInvalidDeviceFunction, "a kernel that was not registered");
  Function& function = found->second;
  load(*function.binary);
  if (function.binary->architecture == 0) throw Failure(cudaErrorNoKernelImageForDevice, function.name);
  if (function.kernel == nullptr) function.kernel = find_kernel(function.name);
  if (function.kernel == nullptr) throw Failure(cudaErrorInvalidDeviceFunction, function.name);
  return function;
}

// Bytes that a launch may ask for.
size_t dynamic_limit(const Function& function) {
  const size_t fixed = facts_of(*function.kernel).static_shared;
  return std::max(function.dynamic_shared, kDefaultSharedMemory - std::min(kDefaultSharedMemory, fixed));
}

// Blocks of a multiprocessor. Registers are not known: of large blocks it holds one.
int resident_blocks(const Function& function, int threads, size_t dynamic_shared) {
  constexpr int kMostBlocks = 16, kLargeBlock = 512;
  const DeviceFacts& device = device_facts();
  const size_t shared = facts_of(*function.kernel).static_shared + dynamic_shared;
  if (threads <= 0 || threads > facts_of(*function.kernel).max_threads || shared > device.shared_per_block) return 0;
  const int whole_warps = (threads + kWarpSize - 1) / kWarpSize * kWarpSize;
  const auto by_memory = static_cast<int>(device.shared_per_multiprocessor / (shared + kReservedSharedMemory));
  return std::min(
      {device.threads_per_multiprocessor / whole_warps, by_memory, threads < kLargeBlock ? kMostBlocks : 1});
}

uint64_t count_of(const Dim& dim) {
  return uint64_t{dim.x} * dim.y * dim.z;
}

std::string text_of(const Dim& dim) {
  return fmt::format("({}, {}, {})", dim.x, dim.y, dim.z);
}

void check_cluster(const Function& function, const Launch& launch) {
  const uint64_t blocks = count_of(launch.cluster);
  if (blocks == 1) return;
  if (!device_facts().has_clusters()) throw Failure(cudaErrorNotSupported, "clusters need compute capability 9.0");
  const uint64_t most = function.any_cluster_size ? 16 : 8;
  const bool divides = blocks > 0 && launch.grid.x % launch.cluster.x == 0 && launch.grid.y % launch.cluster.y == 0 &&
                       launch.grid.z % launch.cluster.z == 0;
  if (blocks > most || !divides)
    throw Failure(cudaErrorInvalidClusterSize, fmt::format("{}: clusters {} in a grid {}", function.name,
                                                           text_of(launch.cluster), text_of(launch.grid)));
}

void check_launch(const Function& function, const Launch& launch) {
  const KernelFacts& facts = facts_of(*function.kernel);
  const Dim &grid = launch.grid, &block = launch.block;
  const uint64_t threads = count_of(block);
  const bool fits = grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535 && block.z <= 64 &&
                    threads <= static_cast<uint64_t>(std::min(facts.max_threads, kMostThreads));
  if (count_of(grid) == 0 || threads == 0 || !fits)
    throw Failure(cudaErrorInvalidConfiguration,
                  fmt::format("{}: grid {}, blocks {} of at most {} threads", function.name, text_of(grid),
                              text_of(block), facts.max_threads));
  if (launch.dynamic_shared > dynamic_limit(function))
    throw Failure(cudaErrorInvalidValue, fmt::format("{}: {} bytes of dynamic shared memory, {} are allowed",
                                                     function.name, launch.dynamic_shared, dynamic_limit(function)));
  check_cluster(function, launch);
  const auto resident = static_cast<uint64_t>(
      device_facts().multiprocessors * resident_blocks(function, static_cast<int>(threads), launch.dynamic_shared));
  if (launch.cooperative && count_of(grid) > resident)
    throw Failure(cudaErrorCooperativeLaunchTooLarge,
                  fmt::format("{}: {} blocks, {} fit on the device", function.name, count_of(grid), resident));
}

// With copies of the arguments, whose places are valid during the call alone.
void launch_kernel(const Function& function, Launch launch, void** arguments, cudaStream_t stream) {
  check_launch(function, launch);
  std::vector<std::vector<std::byte>> values;
  for (const size_t bytes : facts_of(*function.kernel).parameter_sizes) {
    const auto* const from = static_cast<const std::byte*>(arguments[values.size()]);
    values.emplace_back(from, from + bytes);
  }
  enqueue(stream, [kernel = function.kernel, launch, values = std::move(values)]() mutable {
    std::vector<const void*> places;
    for (const auto& value : values) places.push_back(value.data());
    launch.arguments = places.data();
    run(*kernel, launch);
  });
}

Dim dim_of(dim3 dim) {
  return {dim.x, dim.y, dim.z};
}

void add_attribute(Launch& launch, const cudaLaunchAttribute& attribute) {
  switch (attribute.id) {
    case cudaLaunchAttributeIgnore:
    case cudaLaunchAttributePriority:
    case cudaLaunchAttributeProgrammaticStreamSerialization:  // nothing overlaps
      return;
    case cudaLaunchAttributeCooperative:
      launch.cooperative = attribute.val.cooperative != 0;
      return;
    case cudaLaunchAttributeClusterDimension:
      launch.cluster = {attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z};
      return;
    default:
      throw Failure(cudaErrorInvalidValue, fmt::format("launch attribute {}", static_cast<int>(attribute.id)));
  }
}

void set_attribute(Function& function, cudaFuncAttribute attribute, int value) {
  switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize: {
      const size_t fixed = facts_of(*function.kernel).static_shared;
      if (value < 0 || static_cast<size_t>(value) + fixed > device_facts().shared_per_block)
        throw Failure(cudaErrorInvalidValue, fmt::format("{}: {} bytes of dynamic and {} of static shared memory",
                                                         function.name, value, fixed));
      function.dynamic_shared = static_cast<size_t>(value);
      return;
    }
    case cudaFuncAttributePreferredSharedMemoryCarveout:
      if (value < -1 || value > 100) throw Failure(cudaErrorInvalidValue, fmt::format("a carveout of {}%", value));
      return;
    case cudaFuncAttributeNonPortableClusterSizeAllowed:
      function.any_cluster_size = value != 0;
      return;
    default:
      throw Failure(cudaErrorInvalidValue, fmt::format("attribute {} of a kernel", static_cast<int>(attribute)));
  }
}

cudaFuncAttributes attributes_of(const Function& function) {
  const KernelFacts& facts = facts_of(*function.kernel);
  cudaFuncAttributes all{};
  all.sharedSizeBytes = facts.static_shared;
  all.maxThreadsPerBlock = facts.max_threads;
  all.maxDynamicSharedSizeBytes = static_cast<int>(dynamic_limit(function));
  all.ptxVersion = function.binary->architecture;
  all.binaryVersion = 10 * device_facts().major + device_facts().minor;
  all.preferredShmemCarveout = -1;
  return all;
}

// What stands between <<< and >>>.
struct Configuration {
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace furious::emulator

using namespace furious::emulator;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  const std::lock_guard lock(runtime_mutex());
  return reinterpret_cast<void**>(new FatBinary{.wrapper = wrapper});  // lives as long as the process
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** binary, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  const std::lock_guard lock(runtime_mutex());
  functions()[host] = {.binary = reinterpret_cast<FatBinary*>(binary), .name = name};
}

// Variables of the device are known by name to the kernels; the host has no function here that would reach them.
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

char __cudaInitModule(void**) {
  return 0;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return cudaErrorMissingConfiguration;
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

// The handle is the address on the host.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

// Nothing reads the status of a launch by <<< >>>.
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
  const auto body = [&] {
    const Launch launch{.grid = dim_of(grid), .block = dim_of(block), .cluster = {}, .dynamic_shared = shared};
    launch_kernel(function_at(host), launch, arguments, stream);
  };
  return call(body, LastError::of_all);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
  return call([&] {
    Launch launch{.grid = dim_of(config->gridDim),
                  .block = dim_of(config->blockDim),
                  .cluster = {},
                  .dynamic_shared = config->dynamicSmemBytes};
    for (unsigned i = 0; i < config->numAttrs; ++i) add_attribute(launch, config->attrs[i]);
    launch_kernel(function_at(host), launch, arguments, config->stream);
  });
}

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  return call([&] { set_attribute(function_at(host), attribute, value); });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* all, const void* host) {
  return call([&] { *all = attributes_of(function_at(host)); });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host, int threads,
                                                                   size_t dynamic_shared, unsigned) {
  return call([&] { *blocks = resident_blocks(function_at(host), threads, dynamic_shared); });
}

}  // extern "C"
