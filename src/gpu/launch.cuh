// Kernels that start before the one ahead of them on the stream has ended (programmatic dependent launch, Hopper): a
// block is brought up and may fetch what no kernel of the step writes, weights above all, while the last blocks of the
// previous kernel still run. On other devices, and in an InOrderScope (device.h), kernels follow each other in order.
//
//   launch_early(early, kernel, grid, threads, bytes, stream, arguments...)      early: whether it may
//
// Such a kernel calls start_next() once, as soon as it likes, and wait_for_previous() in every thread before it
// reads what another kernel has written and before it writes anything. What it then reads of other kernels it reads
// past the first-level cache (__ldcg), which may hold numbers from before.
#pragma once

#include <utility>

#include "gpu/device.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {

__device__ inline void start_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class... Parameters, class... Arguments>
void launch_early(bool early, void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t bytes, cudaStream_t stream,
                  Arguments&&... arguments) {
  // A multiprocessor splits its memory between cache and shared memory, and splits it anew only when it is empty: all
  // kernels that are to overlap request the same split.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "launch");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && launches_early() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "launch");
}

}  // namespace furious::cuda
