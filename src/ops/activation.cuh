// Activations in device code, for the kernels that apply one.
#pragma once

#include "ops/activation.h"

namespace furious::cuda {

__device__ inline float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

__device__ inline float silu(float x) {
  return x / (1.0f + expf(-x));
}

__device__ inline float silu_derivative(float x) {
  const float s = sigmoid(x);
  return s * (1.0f + x * (1.0f - s));
}

__device__ inline float activate(float x, Activation activation) {
  if (activation == Activation::silu) return silu(x);
  return activation == Activation::relu && x < 0.0f ? 0.0f : x;
}

// dx for the gradient dy of activate(x).
__device__ inline float activation_gradient(float x, float dy, Activation activation) {
  if (activation == Activation::silu) return dy * silu_derivative(x);
  return activation == Activation::relu && !(x > 0.0f) ? 0.0f : dy;
}

}  // namespace furious::cuda
