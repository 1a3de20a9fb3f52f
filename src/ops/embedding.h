// The rows of a table, one per token:
//
//   y_t = E[token_t]                        tokens i32 [...], E [vocabulary, dim], y [..., dim]
//
//   dE[v] += Σ_{t: token_t = v} dy_t        summed in the order of t, so the same bits for any number of threads
//
// E is f32, or bf16 or f16 when no gradient is wanted; y is f32.
#pragma once

#include "ops/tape.h"

namespace furious {

Tensor embedding_forward(const Tensor& table, const Tensor& tokens);
void embedding_backward(const GradientTarget& dtable, const Tensor& dy, const Tensor& tokens);
Variable embedding(Tape& tape, const Variable& table, const Tensor& tokens, DType dtype = DType::f32);

}  // namespace furious
