// What fp8.cpp calls after all checks.
#pragma once

#include "ops/fp8.h"

namespace furious::cuda {

bool fp8_supported(Device device);
void to_fp8(const Fp8Matrix& out, const Tensor& x);  // into memory of the right sizes
void matmul_fp8(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options);

}  // namespace furious::cuda
