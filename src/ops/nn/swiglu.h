// The gated MLP's activation:
//
//   y = silu(gate) ⊙ up        dgate = dy ⊙ up ⊙ silu'(gate)        dup = dy ⊙ silu(gate)
//
// gate and up are f32 (on a GPU also bf16) of one shape with contiguous rows; they may be the halves of one fused
// projection, and then their gradients may be the halves of one fused gradient. y is contiguous.
#pragma once

#include "ops/tape.h"

namespace furious {

Tensor swiglu_forward(const Tensor& gate, const Tensor& up);

struct SwigluGradients {
  Tensor gate;
  Tensor up;
};
void swiglu_backward(const SwigluGradients& out, const Tensor& dy, const Tensor& gate, const Tensor& up);

Variable swiglu(Tape& tape, const Variable& gate, const Variable& up);

// For [gate, up] side by side in the last dimension.
Variable swiglu(Tape& tape, const Variable& gate_and_up);

}  // namespace furious
