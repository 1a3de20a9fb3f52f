// Tensors that are views: rows of a wider tensor, surrounded by NaN so that an out-of-range read is detected.
#pragma once

#include <limits>

#include "base/parallel.h"
#include "ops/elementwise.h"
#include "support.h"

namespace furious::testing {

inline Tensor strided_empty(const Shape& shape) {
  constexpr int64_t kBefore = 3;
  constexpr int64_t kBehind = 2;
  Shape wide = shape;
  wide[wide.rank() - 1] += kBefore + kBehind;
  const Tensor tensor = Tensor::empty(wide, DType::f32);
  fill(tensor, std::numeric_limits<float>::quiet_NaN());
  return tensor.slice(-1, kBefore, shape[shape.rank() - 1]);
}

inline Tensor strided_copy(const Tensor& tensor) {
  const Tensor view = strided_empty(tensor.shape());
  copy(view, tensor);
  return view;
}

// A contiguous copy, to compare bits.
inline Tensor dense(const Tensor& tensor) {
  return to_dtype(tensor, tensor.dtype());
}

// Runs f with this many threads.
template <class F>
auto with_threads(int count, F&& f) {
  const int before = threads();
  set_threads(count);
  auto result = f();
  set_threads(before);
  return result;
}

}  // namespace furious::testing
