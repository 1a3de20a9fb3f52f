// What all mixers on a GPU share: how decay weighs and erases tiles, and the rows of one head in a tensor [batch,
// length, heads or a divisor, dim].
#pragma once

#include "gpu/reduce.cuh"
#include "ops/mixer/shape.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {

constexpr float kLog2e = 1.4426950408889634f;

// exp of a log-decay, where what is too small counts as zero.
__device__ inline float decay_factor(double log_decay) {
  return log_decay < kErased ? 0.0f : expf(static_cast<float>(log_decay));
}

// Of `tiles` tiles, counted in the order of `step` from the first, how many decay has erased; they come first in that
// order. `erased(tile)` is evaluated by one thread per tile. All threads of the block take part.
template <int kThreads, class Erased>
__device__ int count_erased(int tiles, Erased&& erased) {
  int total = 0;
  for (int base = 0; base < tiles; base += kThreads) {
    const int tile = base + static_cast<int>(threadIdx.x);
    const int count = __syncthreads_count(tile < tiles && erased(tile));
    total += count;
    if (count < kThreads) break;
  }
  return total;
}

template <class T>
struct Heads {
  T* data;
  int64_t batch, token, head;  // strides
  int group;                   // heads of the call that share one

  // A division of 64 bits would take longer than the rest of what many callers do.
  __device__ T* row(int64_t b, int64_t t, int h) const { return data + b * batch + t * token + h / group * head; }
};

template <class T>
Heads<typename OnDevice<T>::Type> heads_of(const Tensor& x, int64_t heads) {
  return {pointer<T>(x), x.stride(0), x.stride(1), x.stride(2), static_cast<int>(heads / x.size(2))};
}

// Columns of a `past` (mixer_cuda.h), and of a state where it is a factor of products: the values, the normalizer under
// the sum norm, and zeros, so that rows are aligned as the fast kernels for products want it.
__host__ __device__ constexpr int past_columns(int64_t v_dim, bool sum_norm) {
  return static_cast<int>((v_dim + (sum_norm ? 1 : 0) + 7) / 8 * 8);
}

inline float* floats(const Tensor& x) {
  return x ? x.data<float>() : nullptr;
}

inline double* doubles(const Tensor& x) {
  return x ? x.data<double>() : nullptr;
}

// A sum of f32 with what rounding took from it: as good as f64, on devices that have little of that.
struct ExactSum {
  float sum = 0, rest = 0;

  __device__ void add(float x) {
    const float total = sum + x, added = total - sum;
    rest += (sum - (total - added)) + (x - added);
    sum = total;
  }
  __device__ void scale(float factor) {
    const double x = value() * static_cast<double>(factor);
    sum = static_cast<float>(x);
    rest = static_cast<float>(x - static_cast<double>(sum));
  }
  __device__ double value() const { return static_cast<double>(sum) + static_cast<double>(rest); }
};

template <class Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "mixer");
}

}  // namespace furious::cuda
