// cvt: conversions between types.
#include <algorithm>
#include <cmath>
#include <limits>

#include "emulator/formats.h"
#include "emulator/machine.h"

namespace furious::emulator {
namespace {

template <class D, class A>
void convert_integer(Warp& w, const Instruction& i) {
  const A* const a = w.at<A>(i.a);
  for_lanes<D>(w, i.d, [=](int l) { return static_cast<D>(a[l]); });
}

template <class Narrow, class Wide>
void take_low(unsigned char* to, const unsigned char* from) {
  for (int l = 0; l < kLanes; ++l)
    reinterpret_cast<Narrow*>(to)[l] = static_cast<Narrow>(reinterpret_cast<const Wide*>(from)[l]);
}
// The low ends of the registers of all lanes, as a register of that many bytes.
void take_low(unsigned char* to, const unsigned char* from, int bytes, int of_bytes) {
  switch (bytes << 4 | of_bytes) {
    case 0x12:
      return take_low<uint8_t, uint16_t>(to, from);
    case 0x14:
      return take_low<uint8_t, uint32_t>(to, from);
    case 0x18:
      return take_low<uint8_t, uint64_t>(to, from);
    case 0x24:
      return take_low<uint16_t, uint32_t>(to, from);
    case 0x28:
      return take_low<uint16_t, uint64_t>(to, from);
    default:
      return take_low<uint32_t, uint64_t>(to, from);
  }
}

// The register has the width of its declaration, which may be larger than that of the type.
template <class D>
Handler integer_handler(const std::string& source) {
  if (source == "s8") return convert_integer<D, int8_t>;
  if (source == "u8") return convert_integer<D, uint8_t>;
  if (source == "s16") return convert_integer<D, int16_t>;
  if (source == "u16") return convert_integer<D, uint16_t>;
  if (source == "s32") return convert_integer<D, int32_t>;
  if (source == "u32") return convert_integer<D, uint32_t>;
  if (source == "s64") return convert_integer<D, int64_t>;
  if (source == "u64") return convert_integer<D, uint64_t>;
  return nullptr;
}

Handler from_integer(const std::string& to, const std::string& from) {
  if (to == "s16" || to == "u16") return integer_handler<uint16_t>(from);
  if (to == "s32" || to == "u32") return integer_handler<uint32_t>(from);
  if (to == "s64" || to == "u64") return integer_handler<uint64_t>(from);
  if (to == "f32") return integer_handler<float>(from);
  if (to == "f64") return integer_handler<double>(from);
  return nullptr;
}

// To the nearest number of `mantissa` bits of fraction and exponents from 1 − bias; the largest instead of infinity.
uint32_t to_fp8(float x, int mantissa, int bias, float largest) {
  if (std::isnan(x)) return 0x7F;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::min(std::fabs(x), largest);
  if (size == 0) return sign;
  int exponent = 0;
  (void)std::frexp(size, &exponent);
  exponent = std::max(exponent - 1, 1 - bias);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, mantissa - exponent)));
  // A mantissa that rounds up carries into the exponent by itself.
  const auto bits = units + (static_cast<uint32_t>(exponent + bias - 1) << mantissa);
  return sign | bits;
}
uint32_t to_e4m3(float x) {
  return to_fp8(x, 3, 7, 448);
}
uint32_t to_e5m2(float x) {
  return to_fp8(x, 2, 15, 57344);
}

template <class D, class A, auto kOp>
void convert(Warp& w, const Instruction& i) {
  const A* const a = w.at<A>(i.a);
  for_lanes<D>(w, i.d, [=](int l) { return static_cast<D>(kOp(a[l])); });
}
template <auto kOp, class D = uint32_t>
void convert_pair(Warp& w, const Instruction& i) {
  const float *a = w.at<float>(i.a), *b = w.at<float>(i.b);
  for_lanes<D>(w, i.d, [=](int l) {
    return static_cast<D>(static_cast<uint32_t>(kOp(a[l])) << (4 * sizeof(D)) | static_cast<uint32_t>(kOp(b[l])));
  });
}

template <class D, class A>
D to_integer(A x) {
  // What a NaN becomes depends on the types.
  if (std::isnan(x))
    return sizeof(D) == 8 || sizeof(A) == 8 ? static_cast<D>(uint64_t{1} << (8 * sizeof(D) - 1)) : D{0};
  if (x >= std::ldexp(A{1}, static_cast<int>(8 * sizeof(D)) - (std::is_signed_v<D> ? 1 : 0)))
    return std::numeric_limits<D>::max();
  if (x < static_cast<A>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  return static_cast<D>(x);
}
enum class Round : uint8_t { none, nearest, zero, down, up };
template <Round kRound, class A>
A whole(A x) {
  if (kRound == Round::nearest) return std::nearbyint(x);
  if (kRound == Round::zero) return std::trunc(x);
  if (kRound == Round::down) return std::floor(x);
  if (kRound == Round::up) return std::ceil(x);
  return x;
}
template <class A, Round kRound>
Handler float_to_whole(const std::string& to) {
  if (to == "s32") return convert<int32_t, A, [](A x) { return to_integer<int32_t>(whole<kRound>(x)); }>;
  if (to == "u32") return convert<uint32_t, A, [](A x) { return to_integer<uint32_t>(whole<kRound>(x)); }>;
  if (to == "s64") return convert<int64_t, A, [](A x) { return to_integer<int64_t>(whole<kRound>(x)); }>;
  if (to == "u64") return convert<uint64_t, A, [](A x) { return to_integer<uint64_t>(whole<kRound>(x)); }>;
  if (to == (sizeof(A) == 4 ? "f32" : "f64")) return convert<A, A, [](A x) { return whole<kRound>(x); }>;
  return nullptr;
}
template <class A>
Handler float_to_whole(const Statement& s, const std::string& to) {
  if (s.has("rni")) return float_to_whole<A, Round::nearest>(to);
  if (s.has("rzi")) return float_to_whole<A, Round::zero>(to);
  if (s.has("rmi")) return float_to_whole<A, Round::down>(to);
  if (s.has("rpi")) return float_to_whole<A, Round::up>(to);
  return nullptr;
}

Handler pair_handler(const Statement& s, const std::string& to) {
  if (!s.has("rn")) return nullptr;
  if (s.has("satfinite")) {
    if (to == "e4m3x2") return convert_pair<to_e4m3, uint16_t>;
    if (to == "e5m2x2") return convert_pair<to_e5m2, uint16_t>;
    return nullptr;
  }
  if (to == "bf16x2") return convert_pair<to_bf16>;
  if (to == "f16x2") return convert_pair<to_f16>;
  return nullptr;
}

template <class A>
A saturated(A x) {
  return std::isnan(x) ? A{0} : std::fmin(std::fmax(x, A{0}), A{1});
}

Handler float_handler(const Statement& s, const std::string& to, const std::string& from) {
  const bool whole = s.has("rni") || s.has("rzi") || s.has("rmi") || s.has("rpi"), nearest = s.has("rn");
  if (s.has("satfinite") || (s.has("sat") && (whole || nearest))) return nullptr;
  if (s.has("sat")) {
    if (to == "f32" && from == to) return convert<float, float, saturated<float>>;
    if (to == "f64" && from == to) return convert<double, double, saturated<double>>;
    return nullptr;
  }
  if (whole)
    return from == "f32" ? float_to_whole<float>(s, to) : from == "f64" ? float_to_whole<double>(s, to) : nullptr;
  if (to == "f32" && from == "bf16") return convert<float, uint16_t, from_bf16>;
  if (to == "f32" && from == "f16") return convert<float, uint16_t, from_f16>;
  if (to == "bf16" && from == "f32" && nearest) return convert<uint16_t, float, to_bf16>;
  if (to == "f16" && from == "f32" && nearest) return convert<uint16_t, float, to_f16>;
  if (to == "tf32" && from == "f32" && s.has("rna")) return convert<float, float, to_tf32>;
  if (to == "tf32" && from == "f32" && nearest) return convert<float, float, to_tf32_even>;
  if (to == "f32" && from == "f64" && nearest) return convert<float, double, [](double x) { return x; }>;
  if (to == "f64" && from == "f32") return convert<double, float, [](float x) { return x; }>;
  return nullptr;
}

}  // namespace

bool translate_conversion(Translator& t, const Statement& s, Instruction& i) {
  if (s.opcode != "cvt") return false;
  if (s.modifiers.size() < 2) return false;
  const std::string &from = s.modifiers.back(), &to = s.modifiers[s.modifiers.size() - 2];
  const Operand& result = s.operands[0];
  if (s.operands.size() == 3) {
    i.run = pair_handler(s, to);
    i.d = t.value(result, t.bits_of(result));
    i.a = t.value(s.operands[1], 32);
    i.b = t.value(s.operands[2], 32);
    return i.run != nullptr && from == "f32";
  }
  const bool integer = from[0] == 's' || from[0] == 'u', to_float = to[0] == 'f';
  // Between integers nothing is rounded; to a float an integer is rounded to the nearest.
  if (integer && (s.has("sat") || s.has("rn") != to_float)) return false;
  i.run = integer ? from_integer(to, from) : float_handler(s, to, from);
  if (!i.run) return false;
  const Operand& source = s.operands[1];
  i.d = t.value(result, t.bits_of(result));
  const int used = std::stoi(from.substr(from.find_first_of("0123456789")));
  // A part of a wider register is its low end, which lies at another distance from lane to lane.
  const int declared = source.kind == Operand::Kind::reg ? t.bits_of(source) : std::max(used, 16);
  i.a = t.value(source, declared);
  if (declared > used) {
    i.extra = reinterpret_cast<uint64_t>(i.run);
    i.bytes = static_cast<uint8_t>(used / 8);
    i.wide = static_cast<uint8_t>(declared / 8);
    i.e = t.sink(std::max(used, 16));
    i.run = [](Warp& w, const Instruction& n) {
      take_low(w.at<unsigned char>(n.e), w.at<unsigned char>(n.a), n.bytes, n.wide);
      Instruction inner;
      inner.d = n.d;
      inner.a = n.e;
      reinterpret_cast<Handler>(n.extra)(w, inner);
    };
  }
  // A result narrower than its register would be packed wrongly.
  const int result_bits = std::stoi(to.substr(to.find_first_of("0123456789")));
  return result_bits == t.bits_of(result) || to == "tf32";
}

}  // namespace furious::emulator
