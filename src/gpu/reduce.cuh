// Sums and maxima over the threads of a warp or of a block: every thread gets the result, and the order is always the
// same.
#pragma once

#include <cfloat>

namespace furious::cuda {

// Over each kLanes neighbouring threads of a warp.
template <int kLanes = 32, class T>
__device__ inline T warp_sum(T x) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
  return x;
}

// Over a block of up to 1024 threads. `shared` holds 32 floats; the block must pass a barrier before it uses them
// again.
__device__ inline float block_sum(float x, float* shared) {
  const unsigned warps = (blockDim.x + 31) / 32;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0.0f);
}
__device__ inline float block_max(float x, float* shared) {
  const unsigned warps = (blockDim.x + 31) / 32;
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : -FLT_MAX);
}

}  // namespace furious::cuda
