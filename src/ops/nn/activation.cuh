// Activations in device code, for the kernels that apply one.
#pragma once

#include "ops/nn/activation.h"

namespace furious::cuda {

__device__ inline float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

__device__ inline float silu(float x) {
  return x / (1.0f + expf(-x));
}

// With errors near 2⁻²², for results that are rounded to 16 bits.
__device__ inline float fast_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// From the sigmoid s of x.
__device__ inline float silu_derivative(float x, float s) {
  return s * (1.0f + x * (1.0f - s));
}
__device__ inline float silu_derivative(float x) {
  return silu_derivative(x, sigmoid(x));
}

// ln(1 + e^x). Written so that NaN stays NaN.
__device__ inline float softplus(float x) {
  return (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x)));
}

// Beyond ± this, gelu_tanh is x or 0 to the last bit, and x² may overflow.
inline constexpr float kGeluEnd = 10;

// The exponent of gelu_tanh.
__device__ inline float gelu_exponent(float x) {
  return x * (kGeluLinear + kGeluCubic * x * x);
}

template <Activation kActivation>
__device__ float activate(float x) {
  if constexpr (kActivation == Activation::relu) return x < 0.0f ? 0.0f : x;
  if constexpr (kActivation == Activation::silu) return silu(x);
  if constexpr (kActivation == Activation::softplus) return softplus(x);
  if constexpr (kActivation == Activation::softplus2) return x * softplus(x);
  if constexpr (kActivation == Activation::sigmoid) return sigmoid(x);
  if constexpr (kActivation == Activation::log_sigmoid) return -softplus(-x);
  if constexpr (kActivation == Activation::gelu_tanh) return x * sigmoid(gelu_exponent(x));
  return x;
}

// dx for the gradient dy of activate(x).
template <Activation kActivation>
__device__ float activation_gradient(float x, float dy) {
  if constexpr (kActivation == Activation::relu) return x > 0.0f ? dy : 0.0f;
  if constexpr (kActivation == Activation::silu) return dy * silu_derivative(x);
  if constexpr (kActivation == Activation::softplus) return dy * sigmoid(x);
  if constexpr (kActivation == Activation::softplus2) return dy * (softplus(x) + x * sigmoid(x));
  if constexpr (kActivation == Activation::sigmoid) return dy * sigmoid(x) * sigmoid(-x);
  if constexpr (kActivation == Activation::log_sigmoid) return dy * sigmoid(-x);
  if constexpr (kActivation == Activation::gelu_tanh) {
    const float below = x > kGeluEnd ? kGeluEnd : x, at = below < -kGeluEnd ? -kGeluEnd : below;  // NaN stays NaN
    const float e = gelu_exponent(at), s = sigmoid(e);
    return dy * (s + at * (kGeluLinear + 3 * kGeluCubic * at * at) * s * sigmoid(-e));
  }
  return dy;
}

// For kernels that end with an activation and know none, relu and silu.
__device__ inline float activate(float x, Activation activation) {
  if (activation == Activation::silu) return activate<Activation::silu>(x);
  return activation == Activation::relu ? activate<Activation::relu>(x) : x;
}
__device__ inline float activation_gradient(float x, float dy, Activation activation) {
  if (activation == Activation::silu) return activation_gradient<Activation::silu>(x, dy);
  return activation == Activation::relu ? activation_gradient<Activation::relu>(x, dy) : dy;
}

}  // namespace furious::cuda
