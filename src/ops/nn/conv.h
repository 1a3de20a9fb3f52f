// Causal depthwise convolution over the tokens of a document, with activation (none, relu or silu) and optional bias:
//
//   pre[b,t,c] = bias[c] + Σ_{s<w} weight[c,s] · x[b, t−(w−1)+s, c]        y = activation(pre)
//
//   dpre = dy · activation'(pre)               dx[b,t,c]    = Σ_s weight[c,s] · dpre[b, t+(w−1)−s, c]
//   dbias[c] = Σ_{b,t} dpre[b,t,c]             dweight[c,s] = Σ_{b,t} dpre[b,t,c] · x[b, t−(w−1)+s, c]
//
// The window w is 2, 3 or 4; the last tap is the current token (PyTorch's conv1d order). Inputs before the start of a
// document are zero. x is f32 (on a GPU also bf16) [batch, length, channels] and may be a view with contiguous rows;
// weight [channels, w] and bias [channels] are f32. The backward pass computes pre again rather than storing it.
//
// The state [batch, w−1, channels], always f32, holds the inputs before the next token, oldest first. A row that starts
// from a state continues its document: a sequence that is cut anywhere and carried over by its state gives the bits of
// one pass.
#pragma once

#include "ops/nn/activation.h"
#include "ops/slots.h"
#include "ops/tape.h"

namespace furious {

// `state`, if given, precedes the first token of every row. For `boundaries` see ops/boundaries.h.
Tensor conv_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation,
                    const Tensor& boundaries = {}, const Tensor& state = {});

// The state after the last token of every row.
Tensor conv_state(const Tensor& x, int64_t window, const Tensor& boundaries = {}, const Tensor& state = {});

// One token [rows, channels] of some slots; moves their states, of [slots, w−1, channels], on.
Tensor conv_step(const Tensor& state, const SlotRows& rows, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 Activation activation);

struct ConvGradients {
  Tensor x;  // may be a view with contiguous rows
  Tensor weight;
  Tensor bias;  // only with a bias
};
void conv_backward(const ConvGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& bias, Activation activation, const Tensor& boundaries = {});

Variable conv(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias, Activation activation,
              const Tensor& boundaries = {});

}  // namespace furious
