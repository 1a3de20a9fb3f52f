// What matmul.cpp calls after all checks.
#pragma once

#include "ops/matmul.h"

namespace furious {

// The type that factors are multiplied in on a GPU.
DType multiplied_in(const Tensor& a, const Tensor& b, MatmulPrecision precision);
// The distance between rows of a matrix or of many. A single row may have any stride, but the libraries insist on one
// that is long enough.
int64_t row_stride(const Tensor& matrix);

}  // namespace furious

namespace furious::cpu {

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options);
double matmul_rate(MatmulPrecision precision, Device device);
std::string matmul_library(Device device);

}  // namespace furious::cpu

namespace furious::cuda {

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options);
double matmul_rate(MatmulPrecision precision, Device device);
std::string matmul_library(Device device);

}  // namespace furious::cuda
