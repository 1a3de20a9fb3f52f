// Runs CUDA kernels on a CPU, from the PTX that nvcc embeds beside the machine code: GPU tests without a GPU.
//
// runtime.cpp and cublaslt.cpp define the functions of the CUDA runtime and of cuBLASLt that the library calls; a
// program with the emulator links neither. Everything runs at once, in order, on the calling thread: streams and events
// exist, but nothing overlaps. Device memory is host memory; replacements.cpp gives each tensor bounds of its own.
//
// A warp executes an instruction for all of its converged lanes. Of lanes that diverge, those with the lowest PC run
// first, until they reconverge with others. Asynchronous copies are performed as late as the program allows, so that a
// missing wait shows in the result. Errors name the kernel and the line of its PTX: accesses outside of an allocation,
// to an mbarrier that was not initialised, and others that are undefined on a device; launches that make no progress;
// instructions, modifiers and calls that are not known.
//
// What is not emulated: time, registers, caches, and the order of memory operations between the threads of a device, so
// that a missing fence does not show. wgmma multiplies at once: nor does a missing wait for it. A tensor core sums the
// products of an instruction in order, in f32, and adds that to the accumulator; approximate instructions give the
// nearest number; NaN has any sign and payload. Clusters extend along x only. An access outside of one array of shared
// memory, but within that of the block, is no error; nor is one outside of a tensor that belongs to a captured graph,
// but within its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace furious::emulator {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Adds the kernels of a module. It is only searched for their names here; a kernel is read when it is first launched.
void add_module(std::string ptx);

struct Kernel;
// Of the device code with this (mangled) name; nullptr if no module has it.
Kernel* find_kernel(std::string_view name);

struct KernelFacts {
  size_t static_shared = 0;             // bytes
  int max_threads = 1024;               // of a block
  std::vector<size_t> parameter_sizes;  // bytes
};
const KernelFacts& facts_of(Kernel& kernel);

struct Launch {
  Dim grid, block, cluster;
  size_t dynamic_shared = 0;
  bool cooperative = false;                // all blocks run at the same time
  const void* const* arguments = nullptr;  // where the value of each parameter lies
};
// Throws std::runtime_error.
void run(Kernel& kernel, const Launch& launch);

// Device memory, and host memory that kernels may use.
void add_memory(const void* begin, size_t bytes);
void remove_memory(const void* begin);
size_t memory_count();  // of pieces, those of running blocks and of kernels too

// What a multiprocessor has.
inline constexpr size_t kSharedMemoryPerBlock = 227 * 1024;

// A tensor map as kernels find it: what cuTensorMapEncodeTiled writes here, in place of the driver's format.
struct TensorMap {
  uint64_t address;
  uint64_t sizes[5];
  uint64_t strides[5];  // bytes; that of the first dimension is the size of an element
  uint32_t box[5];
  uint16_t rank, element_bytes;
  uint32_t swizzle;  // bytes of a row in which it happens: 128, or 0 for none
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace furious::emulator
