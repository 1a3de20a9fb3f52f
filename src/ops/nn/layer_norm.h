// Layer norm over the last dimension n:
//
//   u = x − mean(x)        y = u / sqrt(mean(u²) + eps) ⊙ weight + bias        dx = du − mean(du)
//
// It is the RMSNorm of u, whose backward pass gives du. x is f32 (on a GPU also bf16) with contiguous rows; weight and
// bias [n] are f32; y is contiguous.
#pragma once

#include "ops/tape.h"

namespace furious {

Tensor center_forward(const Tensor& x);  // x − mean(x); its own backward pass
Tensor layer_norm_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, float eps);
Variable layer_norm(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias, float eps);

}  // namespace furious
