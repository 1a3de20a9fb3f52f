// AdamW (Loshchilov and Hutter, 2019), one pass over a parameter and its two moments, at step t = 1, 2, …:
//
//   g ← gradient_scale · gradient                       (gradient clipping)
//   m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
//   p ← (1 − lr·weight_decay) p − lr · m̂ / (√v̂ + ε)     m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)
//
// All f32, contiguous and on one device. Every element is computed alone, so the same bits for any number of threads.
#pragma once

#include <functional>
#include <span>

#include "tensor/tensor.h"

namespace furious {

struct AdamW {
  double learning_rate = 1e-3;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
};

struct AdamWTensors {
  Tensor parameter, gradient, first_moment, second_moment;
};

struct AdamWConstants {  // the formula above with everything that is the same for all elements worked out
  float gradient_scale;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float decay;        // 1 − lr·weight_decay
  float step_size;    // lr / (1 − β₁ᵗ)
  float denominator;  // 1 / √(1 − β₂ᵗ)
  float epsilon;
  float learning_rate;
};
inline constexpr int64_t kAdamWConstants = sizeof(AdamWConstants) / sizeof(float);

// For the tensors of `numbers` below.
AdamWConstants adamw_constants(const AdamW& options, int64_t step, double gradient_scale = 1);

// All of a model at once: on a GPU a single launch.
void adamw_update(std::span<const AdamWTensors> tensors, const AdamW& options, int64_t step, double gradient_scale = 1);
void adamw_update(const Tensor& parameter, const Tensor& gradient, const Tensor& first_moment,
                  const Tensor& second_moment, const AdamW& options, int64_t step, double gradient_scale = 1);

// √ Σ g² over all elements of all tensors, summed in double in an order that threads do not change. NaN or infinite if,
// and only if, an element is not finite. An undefined tensor counts as zero. Waits for the device.
double gradient_norm(std::span<const Tensor> gradients);

// The same two for a step that waits for nothing and can be captured in a graph: what changes from step to step lies
// on the device, `numbers` (f32 [kAdamWConstants]) in the order of AdamWConstants. clip_gradients writes the norm (f64
// [1]) and, into the numbers, the scale that brings a norm above `most` down to it (`most` 0: any norm is left). Where
// the norm is not finite the scale is NaN, and the update changes nothing. Where the gradients given are a part of all,
// `add_others` is called with the sum of their squares (f64 [1]), to add those of the rest.
void clip_gradients(const Tensor& norm, const Tensor& numbers, std::span<const Tensor> gradients, double most,
                    const std::function<void(const Tensor& squares)>& add_others = {});
void adamw_update(std::span<const AdamWTensors> tensors, const Tensor& numbers);

}  // namespace furious
