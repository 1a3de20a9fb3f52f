// Counter-based random numbers: number i of (seed, stream) is a pure function of the three, with the same bits on every
// device and for every number of threads.
//
// The generator is Philox 4x32 with 10 rounds (Salmon et al., 2011). Normal numbers use Box-Muller, with logarithm and
// sine composed of operations that IEEE 754 defines to the last bit: those of the CPU's and GPU's math libraries give
// different bits.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FURIOUS_HOST_DEVICE __host__ __device__
#else
#define FURIOUS_HOST_DEVICE
#endif

namespace furious {

struct RandomBits {
  uint32_t word[4];
};

// 128 random bits for one counter value.
FURIOUS_HOST_DEVICE inline RandomBits random_bits(uint64_t seed, uint64_t stream, uint64_t counter) {
  uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), static_cast<uint32_t>(stream),
                   static_cast<uint32_t>(stream >> 32)};
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c[0], c[1], c[2], c[3]}};
}

// Uniform in [0, 1) with 24 bits: exact in f32.
FURIOUS_HOST_DEVICE inline float uniform_from_bits(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

namespace random_detail {

// Multiplication and addition, each rounded: a compiler could otherwise fuse them on one device and not on the other.
FURIOUS_HOST_DEVICE inline double multiply_add(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(__dmul_rn(a, b), c);
#else
  return a * b + c;
#endif
}

FURIOUS_HOST_DEVICE inline double multiply(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

FURIOUS_HOST_DEVICE inline double square_root(double x) {
#ifdef __CUDA_ARCH__
  return __dsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

// ln(n / 2^32) for n in [1, 2^32]: n = m·2^e with m in [1, 2), ln m by the series of 2·artanh((m−1)/(m+1)) after m is
// reduced to [1/√2, √2]. Error below 1e-13, far below the precision of the f32 result.
FURIOUS_HOST_DEVICE inline double log_of_fraction(uint64_t n) {
  int e = 0;
  while ((n >> e) > 1) ++e;
  double m = static_cast<double>(n) / static_cast<double>(uint64_t{1} << e);
  if (m > 1.4142135623730951) {
    m = multiply(m, 0.5);
    ++e;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = multiply(s, s);
  double series = 1.0 / 21;
  for (int k = 19; k >= 1; k -= 2) series = multiply_add(series, s2, 1.0 / k);
  return multiply_add(static_cast<double>(e - 32), 0.6931471805599453, multiply(multiply(2.0, s), series));
}

// cos and sin of 2π·n/2^32, by Taylor series on an eighth of the circle and its symmetries.
FURIOUS_HOST_DEVICE inline void circle_point(uint32_t n, double& cosine, double& sine) {
  const uint32_t octant = n >> 29;
  const uint32_t within = n & 0x1FFFFFFFu;
  const uint32_t reflected = octant & 1 ? 0x20000000u - within : within;
  const double x = multiply(static_cast<double>(reflected), 6.283185307179586 / 4294967296.0);
  const double x2 = multiply(x, x);
  double c = 1.0;
  double s = 1.0;
  for (int k = 16; k >= 2; k -= 2) {
    c = multiply_add(multiply(c, x2), -1.0 / (k * (k - 1)), 1.0);
    s = multiply_add(multiply(s, x2), -1.0 / (k * (k + 1)), 1.0);
  }
  s = multiply(s, x);
  const bool swap = ((octant + 1) & 2) != 0;
  cosine = swap ? s : c;
  sine = swap ? c : s;
  if (octant >= 2 && octant < 6) cosine = -cosine;
  if (octant >= 4) sine = -sine;
}

}  // namespace random_detail

// Two independent standard normal numbers from two random words.
FURIOUS_HOST_DEVICE inline void normal_from_bits(uint32_t a, uint32_t b, float& first, float& second) {
  const double log_uniform = random_detail::log_of_fraction(uint64_t{a} + 1);
  const double radius = random_detail::square_root(random_detail::multiply(-2.0, log_uniform));
  double cosine = 0;
  double sine = 0;
  random_detail::circle_point(b, cosine, sine);
  first = static_cast<float>(random_detail::multiply(radius, cosine));
  second = static_cast<float>(random_detail::multiply(radius, sine));
}

// Four uniform or normal numbers share one counter value: element i of (seed, stream) is number i % 4 of counter i / 4.
FURIOUS_HOST_DEVICE inline void four_uniform(uint64_t seed, uint64_t stream, uint64_t counter, float out[4]) {
  const RandomBits bits = random_bits(seed, stream, counter);
  for (int i = 0; i < 4; ++i) out[i] = uniform_from_bits(bits.word[i]);
}

FURIOUS_HOST_DEVICE inline void four_normal(uint64_t seed, uint64_t stream, uint64_t counter, float out[4]) {
  const RandomBits bits = random_bits(seed, stream, counter);
  normal_from_bits(bits.word[0], bits.word[1], out[0], out[1]);
  normal_from_bits(bits.word[2], bits.word[3], out[2], out[3]);
}

}  // namespace furious
