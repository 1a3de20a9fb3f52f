// Views on a GPU, in f32 or bf16: rows of a wider tensor with NaN around them, aligned for wide loads or not.
#pragma once

#include <limits>

#include "cuda.h"
#include "support.h"

namespace furious::testing {

inline constexpr DType kActivationTypes[] = {DType::f32, DType::bf16};

// Elements before a row: none (and none after it: contiguous), a number that keeps it aligned, and an odd number.
inline constexpr int64_t kMargins[] = {0, 8, 3};

// Inputs for the CPU to compare with: f32 numbers rounded to the dtype.
inline Tensor rounded(const Tensor& tensor, DType dtype) {
  return to_dtype(to_dtype(tensor, dtype), DType::f32);
}

inline Tensor gpu_empty(const Shape& shape, DType dtype, int64_t margin = 0) {
  Shape wide = shape;
  wide[wide.rank() - 1] += 2 * margin;
  const Tensor tensor = Tensor::empty(wide, dtype, kGpu);
  fill(tensor, std::numeric_limits<float>::quiet_NaN());
  return tensor.slice(-1, margin, shape[shape.rank() - 1]);
}

inline Tensor gpu_copy(const Tensor& tensor, DType dtype, int64_t margin = 0) {
  const Tensor view = gpu_empty(tensor.shape(), dtype, margin);
  copy(view, to_gpu(tensor, dtype));
  return view;
}

// [batch, length, heads, dim] with the heads of a token side by side and a margin around them, as in a fused
// projection.
inline Tensor gpu_empty_heads(const Shape& shape, DType dtype, int64_t margin) {
  return gpu_empty({shape[0], shape[1], shape[2] * shape[3]}, dtype, margin).split_dim(-1, shape[2], shape[3]);
}
inline Tensor gpu_copy_heads(const Tensor& tensor, DType dtype, int64_t margin) {
  const Tensor view = gpu_empty_heads(tensor.shape(), dtype, margin);
  copy(view, to_gpu(tensor, dtype));
  return view;
}

inline double gpu_error(const Tensor& actual, const Tensor& expected) {
  return relative_error(to_cpu(actual), expected, 1e-3);
}
inline bool same_gpu_bits(const Tensor& a, const Tensor& b) {
  return same_bits(to_cpu(a), to_cpu(b));
}

}  // namespace furious::testing
