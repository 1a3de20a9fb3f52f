// Tests on a GPU: skipped if none is available.
#pragma once

#include <gtest/gtest.h>

#include "ops/elementwise.h"
#include "tensor/tensor.h"

namespace furious::testing {

inline constexpr Device kGpu{DeviceKind::cuda, 0};

// Every test of a suite whose name ends in Cuda begins with this.
#define SKIP_WITHOUT_GPU() \
  if (furious::describe_cuda_devices().empty()) GTEST_SKIP() << "no CUDA device"

// A contiguous copy on the other side, in another dtype if one is given.
inline Tensor to_gpu(const Tensor& tensor) {
  const Tensor dense = to_dtype(tensor, tensor.dtype());
  const Tensor there = Tensor::empty(tensor.shape(), tensor.dtype(), kGpu);
  copy_between(there, dense);
  return there;
}
inline Tensor to_gpu(const Tensor& tensor, DType dtype) {
  return to_dtype(to_gpu(tensor), dtype);
}
inline Tensor to_cpu(const Tensor& tensor) {
  const Tensor dense = to_dtype(tensor, tensor.dtype());
  const Tensor here = Tensor::empty(tensor.shape(), tensor.dtype());
  copy_between(here, dense);
  return here;
}

// Tolerances against the CPU for f32 and bf16, as relative norms.
inline double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 1e-2 : 1e-4;
}

}  // namespace furious::testing
