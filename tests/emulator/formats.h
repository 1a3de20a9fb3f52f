// Floats of fewer bits. From f32 they are rounded to the nearest, ties to even; a NaN has no sign.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace furious::emulator {

inline float from_bf16(uint16_t x) {
  return std::bit_cast<float>(uint32_t{x} << 16);
}
inline uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::isnan(x) ? uint16_t{0x7FFF} : static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t x) {
  return static_cast<float>(std::bit_cast<_Float16>(x));
}
inline uint16_t to_f16(float x) {
  return std::isnan(x) ? uint16_t{0x7FFF} : std::bit_cast<uint16_t>(static_cast<_Float16>(x));
}

// tf32 is an f32 whose lowest 13 bits are 0. To the nearest, ties away from zero, as cvt.rna does, or to even, as cvt.rn
// does; tensor cores cut.
inline float to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000) & ~uint32_t{0x1FFF});
}
inline float to_tf32_even(float x) {
  if (!std::isfinite(x)) return x;
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0xFFF + (bits >> 13 & 1)) & ~uint32_t{0x1FFF});
}
inline float cut_to_tf32(float x) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & ~uint32_t{0x1FFF});
}

}  // namespace furious::emulator
