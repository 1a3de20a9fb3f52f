// What all mixers on a GPU share: how decay weighs, and the rows of one head in a tensor [batch, length, heads or a
// divisor, dim].
#pragma once

#include "ops/mixer/shape.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {

// exp of a log-decay, where what is too small counts as zero.
__device__ inline float decay_factor(double log_decay) {
  return log_decay < kErased ? 0.0f : expf(static_cast<float>(log_decay));
}

template <class T>
struct Heads {
  T* data;
  int64_t batch, token, head;  // strides
  int group;                   // heads of the call that share one

  __device__ T* row(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * token + h / group * head; }
};

template <class T>
Heads<typename OnDevice<T>::Type> heads_of(const Tensor& x, int64_t heads) {
  return {pointer<T>(x), x.stride(0), x.stride(1), x.stride(2), static_cast<int>(heads / x.size(2))};
}

inline float* floats(const Tensor& x) {
  return x ? x.data<float>() : nullptr;
}

}  // namespace furious::cuda
