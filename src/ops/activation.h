// Elementwise activations of queries and keys:
//
//   relu:  y = max(x, 0)       dx = dy where x > 0, else 0
//   silu:  y = x σ(x)          dx = dy σ(x) (1 + x σ(−x))
//
// x is f32 (on a GPU also bf16) of any shape whose innermost stride is 1 (a view of a fused projection); y is
// contiguous.
#pragma once

#include "ops/tape.h"

namespace furious {

enum class Activation : uint8_t { none, relu, silu };

Tensor activation_forward(const Tensor& x, Activation activation);
void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation);

// Activation::none gives x itself.
Variable activation(Tape& tape, const Variable& x, Activation activation);

}  // namespace furious
