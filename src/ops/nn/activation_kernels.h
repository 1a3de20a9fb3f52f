// What activation.cpp calls after all checks.
#pragma once

#include "ops/nn/activation.h"

namespace furious::cpu {

void activation_forward(const Tensor& y, const Tensor& x, Activation activation);
void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation);

}  // namespace furious::cpu

namespace furious::cuda {

void activation_forward(const Tensor& y, const Tensor& x, Activation activation);
void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation);

}  // namespace furious::cuda
