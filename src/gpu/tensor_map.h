// Descriptions of tensors for the bulk copy engine (TMA).
#pragma once

#include <cuda.h>

#include "tensor/tensor.h"

namespace furious::cuda {

// Of a bf16 tensor [batch, length, heads, dim]: boxes of 64 columns of 64 tokens, in the layout of hopper.cuh. Rows
// must begin at addresses divisible by 16.
CUtensorMap tile_map(const Tensor& x);

}  // namespace furious::cuda
