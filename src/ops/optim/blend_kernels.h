// What blend.cpp calls after all checks.
#pragma once

#include "ops/optim/blend.h"

namespace furious::cpu {

void blend(const Tensor& out, float alpha, const Tensor& x, float beta, const Tensor& y, const Tensor& guard);

}  // namespace furious::cpu

namespace furious::cuda {

void blend(const Tensor& out, float alpha, const Tensor& x, float beta, const Tensor& y, const Tensor& guard);

}  // namespace furious::cuda
