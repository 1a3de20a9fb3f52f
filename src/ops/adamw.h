// AdamW (Loshchilov and Hutter, 2019), one pass over a parameter and its two moments, at step t = 1, 2, …:
//
//   g ← gradient_scale · gradient                       (gradient clipping)
//   m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
//   p ← (1 − lr·weight_decay) p − lr · m̂ / (√v̂ + ε)     m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)
//
// All f32, contiguous and on one device. Every element is computed alone, so the same bits for any number of threads.
#pragma once

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

// All of a model at once: on a GPU a single launch.
void adamw_update(std::span<const AdamWTensors> tensors, const AdamW& options, int64_t step, double gradient_scale = 1);
void adamw_update(const Tensor& parameter, const Tensor& gradient, const Tensor& first_moment,
                  const Tensor& second_moment, const AdamW& options, int64_t step, double gradient_scale = 1);

// √ Σ g² over all elements of all tensors, summed in double in an order that threads do not change. NaN or infinite if,
// and only if, an element is not finite. A tensor that is not there counts as zero. Waits for the device.
double gradient_norm(std::span<const Tensor> gradients);

struct AdamWConstants {  // the formula above with everything that is the same for all elements worked out
  float gradient_scale;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float decay;        // 1 − lr·weight_decay
  float step_size;    // lr / (1 − β₁ᵗ)
  float denominator;  // 1 / √(1 − β₂ᵗ)
  float epsilon;
};

namespace cpu {
void adamw_update(std::span<const AdamWTensors> tensors, const AdamWConstants& constants);
void adamw_update(int64_t count, const AdamWConstants& constants, float* parameter, const float* gradient,
                  float* first_moment, float* second_moment);
double gradient_norm(std::span<const Tensor> gradients);
double sum_of_squares(const float* x, int64_t count);
}  // namespace cpu
namespace cuda {
void adamw_update(std::span<const AdamWTensors> tensors, const AdamWConstants& constants);
double gradient_norm(std::span<const Tensor> gradients);
}  // namespace cuda

}  // namespace furious
