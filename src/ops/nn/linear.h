// The linear layer:
//
//   y = x Wᵀ + b + r      x [..., in], W [out, in], b [out] or none, y [..., out], r (a residual) like y or none
//
//   dx = dy W             dW = dyᵀ x          db = Σ_rows dy          dr = dy
//
// x and its kin are f32, on a GPU also bf16, of one dtype and contiguous, of any rank from 1. bf16 is multiplied as
// such, whatever the precision but fp8. b and gradients of W and b are f32; W is f32, or bf16 or f16 when no gradient
// is wanted. A layer has a bias or a residual, not both; the product adds it to what it computes.
//
// With precision fp8 (ops/fp8.h) linear() and joined_linear() round x, W and dy to 8 bits, for products whose sizes are
// multiples of 16; those of other sizes, and the functions without a tape, multiply in bf16.
#pragma once

#include "ops/matmul.h"
#include "ops/tape.h"

namespace furious {

Tensor linear_forward(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                      MatmulPrecision precision = MatmulPrecision::f32, const Tensor& residual = {});

// Each writes one gradient, or adds to it, without a temporary.
void linear_backward_input(const GradientTarget& dx, const Tensor& dy, const Tensor& weight,
                           MatmulPrecision precision = MatmulPrecision::f32);
void linear_backward_weight(const GradientTarget& dweight, const Tensor& dy, const Tensor& x,
                            MatmulPrecision precision = MatmulPrecision::f32);
void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy);

// On a GPU weights are rounded once for both passes, so the rounded ones stay until the backward pass.
Variable linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias = {},
                MatmulPrecision precision = MatmulPrecision::f32, const Variable& residual = {});

// Layers that read one x, side by side: y = [x W₁ᵀ, x W₂ᵀ, …]. On a GPU one product computes them all.
Variable joined_linear(Tape& tape, const Variable& x, const std::vector<Variable>& weights,
                       MatmulPrecision precision = MatmulPrecision::f32);

// h Wᵀ in f32, for h [..., n] of any activation's dtype: the logits of an output matrix W.
Tensor logits_forward(const Tensor& h, const Tensor& weight);

}  // namespace furious
