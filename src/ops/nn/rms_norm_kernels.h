// What rms_norm.cpp calls after all checks.
#pragma once

#include "ops/nn/rms_norm.h"

namespace furious::cpu {

void rms_norm_forward(const RmsNormResult& out, const Tensor& x, const Tensor& weight, float eps, const Tensor& z);
void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& z);

}  // namespace furious::cpu

namespace furious::cuda {

void rms_norm_forward(const RmsNormResult& out, const Tensor& x, const Tensor& weight, float eps, const Tensor& z);
void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& z);

}  // namespace furious::cuda
