// Mean cross-entropy of predicted tokens, fused with the output projection that makes the logits:
//
//   l_r    = W h_r                                   h [..., dim], W [vocabulary, dim], targets i32 [...]
//   s_r    = log Σ_v exp(l_rv)
//   loss_r = w_r (s_r − l_r,target(r) + z s_r²)      0 where target(r) = kIgnoredTarget; w_r is 1 unless given
//   loss   = (1/n) Σ_r loss_r                        over the n rows that are not ignored; 0 if there are none
//
//   dl_r   = w_r ((1 + 2 z s_r) softmax(l_r) − onehot(target(r))) / n      dh_r = dl_r W          dW = Σ_r dl_r h_rᵀ
//
// z, 0 unless given, is the factor of the z-loss, which keeps the logits from drifting.
//
// Logits exist for a few hundred rows at a time: what is wanted of their gradients is computed, for an upstream
// gradient of 1, while they are there. Everything is f32 and contiguous; W may be bf16 or f16 when its gradient is not
// wanted. On a GPU h may be bf16: logits and dh are bf16 then, losses and dW f32; nothing waits for the device, so a
// graph can capture it; and targets are not checked: one outside the vocabulary makes the loss NaN.
#pragma once

#include "ops/matmul.h"
#include "ops/tape.h"

namespace furious {

inline constexpr int32_t kIgnoredTarget = -1;

struct CrossEntropyOptions {
  bool hidden_gradient = false;
  bool weight_gradient = false;
  Tensor place = {};       // memory for the gradient of the weight; undefined: it is made
  Tensor row_losses = {};  // where to write loss_r, f32 in the shape of targets; undefined: not wanted
  Tensor weights = {};     // w_r, f32 in the shape of targets; undefined: all 1
  double z_loss = 0;       // z
  MatmulPrecision precision = MatmulPrecision::f32;
};

struct CrossEntropyResult {
  Tensor loss;     // f32 [1]
  Tensor counted;  // n, i32 [1]
  Tensor hidden_gradient;
  Tensor weight_gradient;
};

CrossEntropyResult cross_entropy_forward(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                         const CrossEntropyOptions& options = {});

Variable cross_entropy(Tape& tape, const Variable& hidden, const Variable& weight, const Tensor& targets,
                       const Tensor& row_losses = {}, MatmulPrecision precision = MatmulPrecision::f32,
                       const Tensor& weights = {}, double z_loss = 0);

// Bytes of logits that exist at a time, at most.
int64_t most_logit_bytes(Device device);

}  // namespace furious
