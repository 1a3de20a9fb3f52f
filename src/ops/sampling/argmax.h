// The most probable token of every sequence: the first of the largest logits of each row.
#pragma once

#include "tensor/tensor.h"

namespace furious {

// logits f32 [batch, n], n at least 1, with contiguous rows that may lie apart. The result is i32 [batch, 2] on the
// same device: an id, which is one whatever the logits are, and 1 if the whole row was finite, else 0. It is the choice
// of ops/sampling/sampling.h with temperature 0, and has its kernel.
Tensor argmax(const Tensor& logits);

}  // namespace furious
