#include <cfloat>

#include "gpu/launch.cuh"
#include "ops/sampling/argmax.h"

namespace furious::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kAtOnce = 16;  // loads of a thread

// A number and its place in one word that is larger where the number is, and among equals where the place is smaller.
__device__ uint64_t ranked(float x, uint32_t place) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);  // zeros of both signs are one number
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~place;
}

// One block for a row.
__global__ void __launch_bounds__(kThreads)
    argmax_kernel(int32_t* out, const float* logits, int64_t stride, int columns) {
  __shared__ uint64_t best_of[32];
  start_next();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x);
  const float* const row = logits + blockIdx.x * stride;
  uint64_t best = 0;
  bool finite = true;
  for (int first = thread; first < columns; first += kAtOnce * kThreads) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      x[i] = first + i * kThreads < columns ? __ldcg(row + first + i * kThreads) : -FLT_MAX;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      finite = finite && isfinite(x[i]);
      if (first + i * kThreads < columns) best = max(best, ranked(x[i], static_cast<uint32_t>(first + i * kThreads)));
    }
  }
  finite = __syncthreads_and(finite);
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xFFFFFFFFu, best, offset));
  if (thread % 32 == 0) best_of[thread / 32] = best;
  __syncthreads();
  if (thread >= 32) return;
  best = best_of[thread];
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xFFFFFFFFu, best, offset));
  if (thread > 0) return;
  out[2 * blockIdx.x] = static_cast<int32_t>(~static_cast<uint32_t>(best));
  out[2 * blockIdx.x + 1] = finite ? 1 : 0;
}

}  // namespace

void argmax(const Tensor& best, const Tensor& logits) {
  if (logits.size(0) == 0) return;
  launch_early(true, argmax_kernel, blocks_for(logits.size(0), 1), kThreads, 0, stream(logits.device()),
               best.data<int32_t>(), static_cast<const float*>(logits.data<float>()), logits.stride(0),
               static_cast<int>(logits.size(1)));
}

}  // namespace furious::cuda
