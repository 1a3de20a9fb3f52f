// Tensors of random numbers: element i of (seed, stream) takes lane i mod 4 of counter i / 4 (base/random.h),
//
//   fill_uniform    out_i = low + (high − low) · u_i        u uniform in [0, 1)
//   fill_normal     out_i = mean + stddev · z_i             z standard normal
//
// with product and sum rounded to f32 one after the other: the same bits on the CPU, for any number of threads, and on
// CUDA. Two tensors are independent if their seed or stream differs. f32, contiguous.
#pragma once

#include <cstdint>

#include "tensor/tensor.h"

namespace furious {

void fill_uniform(const Tensor& out, float low, float high, uint64_t seed, uint64_t stream);
void fill_normal(const Tensor& out, float mean, float stddev, uint64_t seed, uint64_t stream);

}  // namespace furious
