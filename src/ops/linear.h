// The linear layer:
//
//   y = x Wᵀ + b          x [..., in], W [out, in], b [out] or none, y [..., out]
//
//   dx = dy W             dW = dyᵀ x          db = Σ_rows dy
//
// x and its kin are f32, on a GPU also bf16, of one dtype and contiguous, of any rank from 1. bf16 is multiplied as
// such, whatever the precision. b and gradients of W and b are f32; W is f32, or bf16 or f16 when no gradient is
// wanted.
#pragma once

#include "ops/matmul.h"
#include "ops/tape.h"

namespace furious {

Tensor linear_forward(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                      MatmulPrecision precision = MatmulPrecision::f32);

// Each writes one gradient, or adds to it, without a temporary.
void linear_backward_input(const GradientTarget& dx, const Tensor& dy, const Tensor& weight,
                           MatmulPrecision precision = MatmulPrecision::f32);
void linear_backward_weight(const GradientTarget& dweight, const Tensor& dy, const Tensor& x,
                            MatmulPrecision precision = MatmulPrecision::f32);
void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy);

Variable linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias = {},
                MatmulPrecision precision = MatmulPrecision::f32);

namespace cpu {
void fill_rows(const Tensor& matrix, const Tensor& row);  // each row of the matrix becomes `row`
void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy);
}  // namespace cpu
namespace cuda {
void fill_rows(const Tensor& matrix, const Tensor& row);
void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy);
}  // namespace cuda

}  // namespace furious
