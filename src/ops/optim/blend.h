// A weighted sum of two tensors:
//
//   out = α x + β y
//
// All f32, contiguous, of one shape and on one device; out may be x or y. Every element is computed alone, so the same
// bits for any number of threads. With a guard (f32 [1]) that is NaN nothing is written: the gradient scale of
// clip_gradients (ops/optim/adamw.h) then leaves what depends on a step as it was.
#pragma once

#include "tensor/tensor.h"

namespace furious {

void blend(const Tensor& out, float alpha, const Tensor& x, float beta, const Tensor& y, const Tensor& guard = {});

}  // namespace furious
