// What layer_norm.cpp calls after all checks.
#pragma once

#include "tensor/tensor.h"

namespace furious::cpu {

void center_rows(const Tensor& y, const Tensor& x);

}  // namespace furious::cpu

namespace furious::cuda {

void center_rows(const Tensor& y, const Tensor& x);

}  // namespace furious::cuda
