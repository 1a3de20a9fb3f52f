// The rows of a table, one per token:
//
//   y_t = E[token_t]                        tokens i32 [...], E [vocabulary, dim], y [..., dim]
//
//   dE[v] += Σ_{t: token_t = v} dy_t        summed in one order (on the CPU that of t): the same bits in every run
//
// E is f32, or on the CPU bf16 or f16 when no gradient is wanted; dE is f32. y is f32, on a GPU also bf16. Tokens lie
// where E does. Ids are checked on the CPU only: on a GPU that would mean waiting for it.
#pragma once

#include "ops/tape.h"

namespace furious {

Tensor embedding_forward(const Tensor& table, const Tensor& tokens, DType dtype = DType::f32);  // y in this dtype
void embedding_backward(const GradientTarget& dtable, const Tensor& dy, const Tensor& tokens);
Variable embedding(Tape& tape, const Variable& table, const Tensor& tokens, DType dtype = DType::f32);

}  // namespace furious
