// What linear.cpp calls after all checks.
#pragma once

#include "ops/nn/linear.h"

namespace furious::cpu {

void fill_rows(const Tensor& matrix, const Tensor& row);  // each row of the matrix becomes `row`
void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy);

}  // namespace furious::cpu

namespace furious::cuda {

void fill_rows(const Tensor& matrix, const Tensor& row);
void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy);

}  // namespace furious::cuda
