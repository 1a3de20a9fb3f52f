// What adamw.cpp calls after all checks.
#pragma once

#include "ops/optim/adamw.h"

namespace furious::cpu {

void adamw_update(std::span<const AdamWTensors> tensors, const Tensor& numbers);
void adamw_update(int64_t count, const AdamWConstants& constants, float* parameter, const float* gradient,
                  float* first_moment, float* second_moment);
void sum_of_squares(const Tensor& sum, std::span<const Tensor> gradients);
void set_scale(const Tensor& numbers, const Tensor& norm, double most);  // norm: holds its square
double sum_of_squares(const float* x, int64_t count);

}  // namespace furious::cpu

namespace furious::cuda {

void adamw_update(std::span<const AdamWTensors> tensors, const Tensor& numbers);
void sum_of_squares(const Tensor& sum, std::span<const Tensor> gradients);
void set_scale(const Tensor& numbers, const Tensor& norm, double most);

}  // namespace furious::cuda
