#include "tensor/dtype.h"

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/names.h"

namespace furious {
namespace {

constexpr DType kAll[] = {DType::f32, DType::bf16, DType::f16, DType::i32, DType::f64};

}  // namespace

float16::float16(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) {
    bits = static_cast<uint16_t>(sign | 0x7E00u);
  } else if (magnitude >= 65520.0f) {
    bits = static_cast<uint16_t>(sign | 0x7C00u);
  } else if (magnitude < 0x1p-14f) {
    // Subnormal f16: adding a number with a unit in the last place of 2^-24 makes f32 arithmetic round to that unit.
    const float shifted = magnitude + 0.5f;
    bits = static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
  } else {
    const uint32_t m = u & 0x7FFFFFFFu;
    bits = static_cast<uint16_t>(sign | ((m + 0xFFFu + ((m >> 13) & 1u) - (112u << 23)) >> 13));
  }
}

float16::operator float() const {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t f32_exponent = exponent == 0x1Fu ? 0xFFu : exponent + 112u;
  return std::bit_cast<float>(sign | (f32_exponent << 23) | (mantissa << 13));
}

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f64:
      return 8;
    default:
      return 4;
  }
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i32:
      return "i32";
    case DType::f64:
      return "f64";
  }
  return "?";
}

DType dtype_from_name(std::string_view name) {
  std::vector<std::string> known;
  for (DType dtype : kAll) {
    if (name_of(dtype) == name) return dtype;
    known.emplace_back(name_of(dtype));
  }
  unknown_name("dtype", name, known);
}

}  // namespace furious
