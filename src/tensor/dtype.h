// Element types. The CPU computes in f32; bf16 and f16 are storage types there; i32 holds tokens and positions; f64 is
// for the reference implementations in tests.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace furious {

enum class DType : uint8_t { f32, bf16, f16, i32, f64 };

struct bfloat16 {
  uint16_t bits = 0;

  bfloat16() = default;
  explicit bfloat16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const bool is_nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    // Round to nearest, ties to even; a NaN stays a NaN.
    bits = static_cast<uint16_t>(is_nan ? (u >> 16) | 0x40u : (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

struct float16 {
  uint16_t bits = 0;

  float16() = default;
  explicit float16(float value);
  explicit operator float() const;
};

size_t size_of(DType dtype);
std::string_view name_of(DType dtype);
DType dtype_from_name(std::string_view name);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<bfloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<float16> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};

// Calls f with a value of the C++ type of a floating dtype.
template <class F>
decltype(auto) with_float_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bf16:
      return f(bfloat16{});
    case DType::f16:
      return f(float16{});
    case DType::f64:
      return f(double{});
    default:
      return f(float{});
  }
}

}  // namespace furious
