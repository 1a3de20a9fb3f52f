#pragma once

#include "ops/symmetric_square.h"

namespace furious::cpu {

void symmetric_square_forward(const Tensor& y, const Tensor& x);
void symmetric_square_backward(const Tensor& dx, const Tensor& dy, const Tensor& x);

}  // namespace furious::cpu
