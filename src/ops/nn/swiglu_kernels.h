// What swiglu.cpp calls after all checks.
#pragma once

#include "ops/nn/swiglu.h"

namespace furious::cpu {

void swiglu_forward(const Tensor& y, const Tensor& gate, const Tensor& up);
void swiglu_backward(const SwigluGradients& out, const Tensor& dy, const Tensor& gate, const Tensor& up);

}  // namespace furious::cpu

namespace furious::cuda {

void swiglu_forward(const Tensor& y, const Tensor& gate, const Tensor& up);
void swiglu_backward(const SwigluGradients& out, const Tensor& dy, const Tensor& gate, const Tensor& up);

}  // namespace furious::cuda
