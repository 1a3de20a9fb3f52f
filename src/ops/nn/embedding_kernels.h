// What embedding.cpp calls after all checks.
#pragma once

#include "ops/nn/embedding.h"

namespace furious::cpu {

void embedding_forward(const Tensor& y, const Tensor& table, const Tensor& tokens);
void embedding_backward(const GradientTarget& dtable, const Tensor& dy, const Tensor& tokens);

}  // namespace furious::cpu

namespace furious::cuda {

void embedding_forward(const Tensor& y, const Tensor& table, const Tensor& tokens);
void embedding_backward(const GradientTarget& dtable, const Tensor& dy, const Tensor& tokens);

}  // namespace furious::cuda
