// The score function f with decay, for the tile kernels. For a pair with S = scale·x, x = q·k, it is a polynomial in x
// whose coefficients hold the scale, or an exponential.
#pragma once

#include "gpu/mma.cuh"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/polynomial.h"

namespace furious::cuda {

// What kernels know of a score when they are compiled. A squared one has no decay that grows.
enum class ScoreKind : uint8_t { exponential, polynomial, squared };

struct ScoreFunction {
  float value[kLargestDegree + 1], slope[kLargestDegree];  // of the polynomial and its derivative
  float scale;
  float largest_score;  // where an exponential without normalizer saturates
  float largest_decay,
      saturated;  // the exponent of the mask is cut off at the first, without derivative from the second

  __device__ float polynomial(float x) const {
    float y = value[kLargestDegree];
#pragma unroll
    for (int i = kLargestDegree - 1; i >= 0; --i) y = fmaf(y, x, value[i]);
    return y;
  }
  __device__ float derivative(float x) const {
    float y = slope[kLargestDegree - 1];
#pragma unroll
    for (int i = kLargestDegree - 2; i >= 0; --i) y = fmaf(y, x, slope[i]);
    return y;
  }
  // The logarithm of the weight of an exponential; `decay` is A_i − A_j.
  __device__ float exponent(float x, float decay) const {
    return fminf(scale * x, largest_score) + fminf(decay, largest_decay);
  }
  __device__ float decay_factor(float decay) const {
    return fast_exp2(fminf(decay, largest_decay) * kLog2e);
  }

  struct Weight {
    float w, slope;  // the weight of the pair, and its derivative to x
  };
  // `shift`: what was taken from exponents in the forward pass.
  template <ScoreKind kKind>
  __device__ Weight weight(float x, float decay, float shift) const {
    if constexpr (kKind == ScoreKind::exponential) {
      const float w = fast_exp2((exponent(x, decay) - shift) * kLog2e);
      return {w, scale * x < largest_score ? scale * w : 0.0f};
    } else if constexpr (kKind == ScoreKind::squared) {
      const float d = decay_factor(decay) * value[2] * x;
      return {d * x, 2 * d};
    } else {
      const float d = decay_factor(decay);
      return {polynomial(x) * d, derivative(x) * d};
    }
  }
  // The same with a factor that holds the decay and token_constant(), and a slope without slope_constant(): what is
  // left to multiply per pair.
  template <ScoreKind kKind>
  __device__ Weight plain_weight(float x, float factor) const {
    if constexpr (kKind == ScoreKind::squared) return {factor * x * x, factor * x};
    return {polynomial(x) * factor, derivative(x) * factor};
  }
  template <ScoreKind kKind>
  __device__ float token_constant() const {
    return kKind == ScoreKind::squared ? value[2] : 1.0f;
  }
  template <ScoreKind kKind>
  static constexpr __device__ float slope_constant() {
    return kKind == ScoreKind::squared ? 2.0f : 1.0f;
  }
};

inline ScoreFunction score_function(const MixerSpec& spec, float scale) {
  ScoreFunction f = {};
  f.scale = scale;
  f.largest_score = spec.norm == Norm::sum ? INFINITY : kLargestExponent;
  f.largest_decay = spec.signed_decay ? kLargestExponent : 0.0f;
  f.saturated = spec.signed_decay ? kLargestExponent : INFINITY;
  const Polynomial polynomial = polynomial_of(spec);
  float power = 1;
  for (int n = 0; n <= kLargestDegree; ++n, power *= scale) {
    f.value[n] = polynomial.c[n] * power;
    if (n > 0) f.slope[n - 1] = static_cast<float>(n) * f.value[n];
  }
  return f;
}

}  // namespace furious::cuda
