// What elementwise.cpp calls after all checks.
#pragma once

#include "ops/elementwise.h"

namespace furious::cpu {

void fill(const Tensor& out, float value);
void copy(const Tensor& out, const Tensor& in);
void add_into(const Tensor& out, const Tensor& in);

}  // namespace furious::cpu

namespace furious::cuda {

void fill(const Tensor& out, float value);
void copy(const Tensor& out, const Tensor& in);
void add_into(const Tensor& out, const Tensor& in);

}  // namespace furious::cuda
