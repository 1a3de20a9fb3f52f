// The arithmetic of sampling that must have the same bits on every device: only additions, multiplications, divisions
// and conversions, each rounded by itself, and integers. Subnormal numbers never matter, since a CPU may be set to
// treat them as zero.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "base/random.h"

namespace furious::sampling {

inline constexpr uint64_t kStream = 0x73616d706c65;  // "sample"
inline constexpr int kWeightBits = 30;
inline constexpr uint32_t kLargestWeight = 1u << kWeightBits;
inline constexpr float kLog2E = 1.44269504f;

FURIOUS_HOST_DEVICE inline float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

FURIOUS_HOST_DEVICE inline float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

FURIOUS_HOST_DEVICE inline float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

FURIOUS_HOST_DEVICE inline uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

FURIOUS_HOST_DEVICE inline float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

FURIOUS_HOST_DEVICE inline float minus_infinity() {
  return float_of(0xFF800000u);
}
FURIOUS_HOST_DEVICE inline bool is_finite(float x) {
  return (bits_of(x) & 0x7F800000u) != 0x7F800000u;
}
// A logit as all else sees it: one that is not finite is that of a banned token; zeros and subnormals are +0.
FURIOUS_HOST_DEVICE inline float usable(float logit) {
  if (!is_finite(logit)) return minus_infinity();
  return (bits_of(logit) & 0x7F800000u) == 0 ? 0.0f : logit;
}

// What becomes of a logit by a bias and by the penalties. A banned token stays banned, and no other becomes one.
FURIOUS_HOST_DEVICE inline float bounded(float x) {
  return usable(x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x);
}
FURIOUS_HOST_DEVICE inline float biased(float logit, float bias) {
  if (logit == minus_infinity() || bias == minus_infinity()) return minus_infinity();
  return bounded(add(logit, bias));
}
FURIOUS_HOST_DEVICE inline float penalized(float logit, int count, float repetition, float frequency, float presence) {
  if (logit == minus_infinity()) return logit;
  const float changed = bounded(logit > 0 ? divide(logit, repetition) : multiply(logit, repetition));
  const float lowered = bounded(add(changed, -multiply(frequency, static_cast<float>(count))));
  return bounded(add(lowered, -presence));
}

// Larger for larger logits, which usable() has seen.
FURIOUS_HOST_DEVICE inline uint32_t ordered(float logit) {
  const uint32_t bits = bits_of(logit);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// The same, and among equals larger for smaller ids: no two tokens have the same rank.
FURIOUS_HOST_DEVICE inline uint64_t rank_of(float logit, uint32_t id) {
  return static_cast<uint64_t>(ordered(logit)) << 32 | static_cast<uint32_t>(~id);
}
FURIOUS_HOST_DEVICE inline float logit_of_rank(uint64_t rank) {
  const uint32_t high = static_cast<uint32_t>(rank >> 32);
  return float_of(high & 0x80000000u ? high & 0x7FFFFFFFu : ~high);
}
FURIOUS_HOST_DEVICE inline uint32_t id_of_rank(uint64_t rank) {
  return ~static_cast<uint32_t>(rank);
}

// round(2^30 · 2^((logit − largest) · scale)), scale in [0, 2^100]: 2^y = 2^n · 2^f with n = round(y) and a polynomial
// for 2^f (error below 1e-8, so the rounding of f32 is the larger part). Adding 1.5·2^23 rounds y to an integer and
// leaves that in the low bits.
FURIOUS_HOST_DEVICE inline uint32_t weight_of(float logit, float largest, float scale) {
  const float difference = add(logit, -largest);
  float y = multiply(difference < -FLT_MAX ? -FLT_MAX : difference, scale);
  y = y < -40.0f ? -40.0f : y;
  const float shifted = add(y, 12582912.0f);
  const float f = add(y, -add(shifted, -12582912.0f));
  float power = 0x1.44138ap-13f;
  power = add(multiply(power, f), 0x1.5f089p-10f);
  power = add(multiply(power, f), 0x1.3b2a54p-7f);
  power = add(multiply(power, f), 0x1.c6af6cp-5f);
  power = add(multiply(power, f), 0x1.ebfbep-3f);
  power = add(multiply(power, f), 0x1.62e43p-1f);
  power = add(multiply(power, f), 1.0f);
  const uint32_t exponent = bits_of(shifted) - bits_of(12582912.0f) + kWeightBits;
  const float scaled = float_of(bits_of(power) + (exponent << 23));
  const auto weight = static_cast<int32_t>(add(scaled, 0.5f));
  return logit == minus_infinity() ? 0u : static_cast<uint32_t>(weight);
}

FURIOUS_HOST_DEVICE inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// The least mass that is top_p of all; top_p is 2^64 times the option, and 0 stands for 1.
FURIOUS_HOST_DEVICE inline uint64_t enough_of(uint64_t all, uint64_t top_p) {
  if (top_p == 0) return UINT64_MAX;
  return multiply_high(all, top_p) + (all * top_p != 0 ? 1 : 0);
}

// A round of rejections: the random numbers, and what each trial draws: ⌊u · mass⌋ with a u of 64 bits.
inline constexpr int kTrials = 2;
FURIOUS_HOST_DEVICE inline RandomBits round_bits(uint64_t seed, uint64_t position, int round) {
  return random_bits(seed, kStream + static_cast<uint64_t>(round), position);
}
FURIOUS_HOST_DEVICE inline uint64_t drawn_from(uint64_t mass, const RandomBits& bits, int trial) {
  return multiply_high(mass, static_cast<uint64_t>(bits.word[2 * trial + 1]) << 32 | bits.word[2 * trial]);
}
// The ranks that a round compares all tokens with: those of the drawn tokens, and a pivot halfway from the larger of
// them to `most`, a logit that was kept. Whatever is not kept can be left out of the next round, so the pivot makes
// rounds few where few tokens of many are kept.
inline constexpr int kThresholds = kTrials + 1;
FURIOUS_HOST_DEVICE inline void add_pivot(uint64_t (&thresholds)[kThresholds], float most) {
  const float low = logit_of_rank(thresholds[0] > thresholds[1] ? thresholds[0] : thresholds[1]);
  const float pivot = usable(add(usable(multiply(0.5f, low)), usable(multiply(0.5f, most))));
  thresholds[kTrials] = static_cast<uint64_t>(ordered(pivot)) << 32;  // below all tokens of that logit
}
static_assert(kTrials == 2);

}  // namespace furious::sampling
