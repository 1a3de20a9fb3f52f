// Arithmetic on registers: integers, floats, comparisons, selections.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "emulator/formats.h"
#include "emulator/machine.h"

namespace furious::emulator {
namespace {

using u16 = uint16_t;
using s16 = int16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

template <class D, class A, auto kOp>
void unary(Warp& w, const Instruction& i) {
  const A* const a = w.at<A>(i.a);
  for_lanes<D>(w, i.d, [=](int l) { return static_cast<D>(kOp(a[l])); });
}
template <class D, class A, class B, auto kOp>
void binary(Warp& w, const Instruction& i) {
  const A* const a = w.at<A>(i.a);
  const B* const b = w.at<B>(i.b);
  for_lanes<D>(w, i.d, [=](int l) { return static_cast<D>(kOp(a[l], b[l])); });
}
template <class D, class A, class B, class C, auto kOp>
void ternary(Warp& w, const Instruction& i) {
  const A* const a = w.at<A>(i.a);
  const B* const b = w.at<B>(i.b);
  const C* const c = w.at<C>(i.c);
  for_lanes<D>(w, i.d, [=](int l) { return static_cast<D>(kOp(a[l], b[l], c[l])); });
}

template <class T>
struct Double {};
template <>
struct Double<s16> {
  using Type = s32;
};
template <>
struct Double<u16> {
  using Type = u32;
};
template <>
struct Double<s32> {
  using Type = s64;
};
template <>
struct Double<u32> {
  using Type = u64;
};
template <>
struct Double<s64> {
  using Type = __int128;
};
template <>
struct Double<u64> {
  using Type = unsigned __int128;
};
template <class T>
using Doubled = typename Double<T>::Type;

// Calls f with a value of the type that a modifier names.
template <class F>
Handler with_integer(const std::string& type, F&& f) {
  if (type == "s16") return f(s16());
  if (type == "u16" || type == "b16") return f(u16());
  if (type == "s32") return f(s32());
  if (type == "u32" || type == "b32") return f(u32());
  if (type == "s64") return f(s64());
  if (type == "u64" || type == "b64") return f(u64());
  return nullptr;
}
template <class F>
Handler with_float(const std::string& type, F&& f) {
  if (type == "f32") return f(f32());
  if (type == "f64") return f(f64());
  return nullptr;
}
template <class F>
Handler with_number(const std::string& type, F&& f) {
  const Handler handler = with_integer(type, f);
  return handler ? handler : with_float(type, f);
}

int width_of(const std::string& type) {
  if (type == "pred") return 1;
  if (type == "f16x2" || type == "bf16x2") return 32;
  return std::stoi(type.substr(type.find_first_of("0123456789")));
}

// Wraps around, as integers of the device do.
template <class T>
using Unsigned = std::conditional_t<(sizeof(T) < 4), u32, std::make_unsigned_t<T>>;

template <class T>
T high_half(T a, T b) {
  return static_cast<T>((static_cast<Doubled<T>>(a) * static_cast<Doubled<T>>(b)) >> (8 * sizeof(T)));
}
template <class T>
T low_half(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
}

Handler integer_handler(const Statement& s, const std::string& type) {
  const std::string& op = s.opcode;
  const auto both = [&](auto f) { return with_integer(type, [&](auto x) -> Handler { return f(x); }); };
  if (op == "add")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) { return static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b); }>;
    });
  if (op == "sub")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) { return static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b); }>;
    });
  if (op == "mul" || op == "mad") {
    const bool add = op == "mad";
    if (s.has("wide"))
      return with_integer(type, [&](auto x) -> Handler {
        using T = decltype(x);
        using D = Doubled<T>;
        if constexpr (sizeof(T) == 8)
          return nullptr;
        else if (add)
          return ternary<D, T, T, D, [](T a, T b, D c) {
            return static_cast<std::make_unsigned_t<D>>(static_cast<D>(a) * static_cast<D>(b)) +
                   static_cast<std::make_unsigned_t<D>>(c);
          }>;
        else
          return binary<D, T, T, [](T a, T b) { return static_cast<D>(a) * static_cast<D>(b); }>;
      });
    const bool high = s.has("hi");
    return both([&](auto x) -> Handler {
      using T = decltype(x);
      if (add)
        return high ? Handler(ternary<T, T, T, T,
                                      [](T a, T b, T c) {
                                        return static_cast<Unsigned<T>>(high_half(a, b)) + static_cast<Unsigned<T>>(c);
                                      }>)
                    : Handler(ternary<T, T, T, T, [](T a, T b, T c) {
                        return static_cast<Unsigned<T>>(low_half(a, b)) + static_cast<Unsigned<T>>(c);
                      }>);
      return high ? Handler(binary<T, T, T, [](T a, T b) { return high_half(a, b); }>)
                  : Handler(binary<T, T, T, [](T a, T b) { return low_half(a, b); }>);
    });
  }
  if (op == "div")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) -> T {
        if (b == 0) return static_cast<T>(-1);
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(0 - static_cast<Unsigned<T>>(a));
        return static_cast<T>(a / b);
      }>;
    });
  if (op == "rem")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) -> T {
        if (b == 0) return static_cast<T>(-1);
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
        return static_cast<T>(a % b);
      }>;
    });
  if (op == "min")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) { return a < b ? a : b; }>;
    });
  if (op == "max")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) { return a < b ? b : a; }>;
    });
  if (op == "abs")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return unary<T, T, [](T a) { return a < 0 ? 0 - static_cast<Unsigned<T>>(a) : static_cast<Unsigned<T>>(a); }>;
    });
  if (op == "neg")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return unary<T, T, [](T a) { return 0 - static_cast<Unsigned<T>>(a); }>;
    });
  if (op == "and")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) { return a & b; }>;
    });
  if (op == "or")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) { return a | b; }>;
    });
  if (op == "xor")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, T, [](T a, T b) { return a ^ b; }>;
    });
  if (op == "not")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return unary<T, T, [](T a) { return ~a; }>;
    });
  if (op == "shl")
    return both([](auto x) -> Handler {
      using T = std::make_unsigned_t<decltype(x)>;
      return binary<T, T, u32, [](T a, u32 b) -> T { return b >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << b); }>;
    });
  if (op == "shr")
    return both([](auto x) -> Handler {
      using T = decltype(x);
      return binary<T, T, u32, [](T a, u32 b) -> T {
        if (b >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T{0};
        return static_cast<T>(a >> b);
      }>;
    });
  return nullptr;
}

f32 flushed(f32 x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
template <class T>
T smaller(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
T larger(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}
// The nearest f64 of a·b + c, and on which side of it the exact value lies. The product of two f32 is an f64.
struct Sum {
  f64 nearest;
  int side;
  bool negative;  // whether a zero is, rounded toward -infinity
};
Sum sum_of(f32 a, f32 b, f32 c) {
  const f64 product = static_cast<f64>(a) * static_cast<f64>(b), addend = static_cast<f64>(c);
  const f64 nearest = product + addend, part = nearest - product;
  const f64 rest = (product - (nearest - part)) + (addend - part);  // what the sum has lost, exactly
  return {nearest, rest > 0 ? 1 : rest < 0 ? -1 : 0, std::signbit(product) || std::signbit(addend)};
}
// Toward −infinity, zero or +infinity.
template <int kDirection>
f32 rounded(Sum sum) {
  const f32 nearest = static_cast<f32>(sum.nearest);
  const f64 at = static_cast<f64>(nearest);
  // On which side of `nearest` the exact value lies.
  const int side = sum.nearest > at ? 1 : sum.nearest < at ? -1 : sum.side;
  if (kDirection < 0 && sum.nearest == 0) return sum.negative ? -0.0f : 0.0f;
  if (kDirection < 0 && side < 0) return std::nextafterf(nearest, -INFINITY);
  if (kDirection > 0 && side > 0) return std::nextafterf(nearest, INFINITY);
  if (kDirection == 0 && side * (std::signbit(nearest) ? -1 : 1) < 0) return std::nextafterf(nearest, 0.0f);
  return nearest;
}

// Of f32; other types are not rounded in a direction.
template <int kDirection>
Handler directed_handler(const std::string& op) {
  if (op == "add") return binary<f32, f32, f32, [](f32 a, f32 b) { return rounded<kDirection>(sum_of(a, 1, b)); }>;
  if (op == "sub") return binary<f32, f32, f32, [](f32 a, f32 b) { return rounded<kDirection>(sum_of(a, 1, -b)); }>;
  if (op == "fma")
    return ternary<f32, f32, f32, f32, [](f32 a, f32 b, f32 c) { return rounded<kDirection>(sum_of(a, b, c)); }>;
  return nullptr;
}

Handler float_handler(const Statement& s, const std::string& type) {
  const std::string& op = s.opcode;
  if (s.has("rz") || s.has("rm") || s.has("rp")) {
    if (type != "f32") return nullptr;
    return s.has("rz") ? directed_handler<0>(op) : s.has("rm") ? directed_handler<-1>(op) : directed_handler<1>(op);
  }
  if (type == "f32" && op == "ex2")
    return s.has("ftz") ? Handler(unary<f32, f32, [](f32 a) { return flushed(std::exp2(flushed(a))); }>)
                        : Handler(unary<f32, f32, [](f32 a) { return std::exp2(a); }>);
  if (s.has("ftz") && type != "f64") return nullptr;
  return with_float(type, [&](auto x) -> Handler {
    using T = decltype(x);
    if (op == "add") return binary<T, T, T, [](T a, T b) { return a + b; }>;
    if (op == "sub") return binary<T, T, T, [](T a, T b) { return a - b; }>;
    if (op == "mul") return binary<T, T, T, [](T a, T b) { return a * b; }>;
    if (op == "fma" || op == "mad") return ternary<T, T, T, T, [](T a, T b, T c) { return std::fma(a, b, c); }>;
    if (op == "div") return binary<T, T, T, [](T a, T b) { return a / b; }>;
    if (op == "rcp") return unary<T, T, [](T a) { return 1 / a; }>;
    if (op == "sqrt") return unary<T, T, [](T a) { return std::sqrt(a); }>;
    if (op == "rsqrt") return unary<T, T, [](T a) { return 1 / std::sqrt(a); }>;
    if (op == "min") return binary<T, T, T, [](T a, T b) { return smaller(a, b); }>;
    if (op == "max") return binary<T, T, T, [](T a, T b) { return larger(a, b); }>;
    if (op == "abs") return unary<T, T, [](T a) { return std::fabs(a); }>;
    if (op == "neg") return unary<T, T, [](T a) { return -a; }>;
    if (op == "lg2") return unary<T, T, [](T a) { return std::log2(a); }>;
    if (op == "sin") return unary<T, T, [](T a) { return std::sin(a); }>;
    if (op == "cos") return unary<T, T, [](T a) { return std::cos(a); }>;
    if (op == "tanh") return unary<T, T, [](T a) { return std::tanh(a); }>;
    if (op == "copysign") return binary<T, T, T, [](T a, T b) { return std::copysign(b, a); }>;
    return nullptr;
  });
}

f32 low_bf16(u32 x) {
  return from_bf16(static_cast<u16>(x));
}
f32 high_bf16(u32 x) {
  return from_bf16(static_cast<u16>(x >> 16));
}
u32 pair_of_bf16(f32 low, f32 high) {
  return to_bf16(low) | u32{to_bf16(high)} << 16;
}
// Rounded once: the f32 in between has its lowest bit set if it is not exact, so that it is no tie.
u16 fma_bf16(f32 a, f32 b, f32 c) {
  const f32 zero = rounded<0>(sum_of(a, b, c));
  const bool exact = zero == rounded<1>(sum_of(a, b, c)) && zero == rounded<-1>(sum_of(a, b, c));
  return to_bf16(exact || !std::isfinite(zero) ? zero : std::bit_cast<f32>(std::bit_cast<u32>(zero) | 1));
}

Handler pair_handler(const Statement& s) {
  if (s.opcode == "mul")
    return binary<u32, u32, u32,
                  [](u32 a, u32 b) { return pair_of_bf16(low_bf16(a) * low_bf16(b), high_bf16(a) * high_bf16(b)); }>;
  if (s.opcode == "fma")
    return ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) {
      return fma_bf16(low_bf16(a), low_bf16(b), low_bf16(c)) | u32{fma_bf16(high_bf16(a), high_bf16(b), high_bf16(c))}
                                                                   << 16;
    }>;
  if (s.opcode == "add")
    return binary<u32, u32, u32,
                  [](u32 a, u32 b) { return pair_of_bf16(low_bf16(a) + low_bf16(b), high_bf16(a) + high_bf16(b)); }>;
  return nullptr;
}

// Comparisons. The result goes to predicate d and its opposite to e, if there is one; combined with predicate c where
// extra names and, or, xor.
template <class T, auto kOp>
void compare(Warp& w, const Instruction& i) {
  const T* const a = w.at<T>(i.a);
  const T* const b = w.at<T>(i.b);
  uint32_t result = 0;
  for (int l = 0; l < kLanes; ++l) result |= static_cast<uint32_t>(kOp(a[l], b[l])) << l;
  uint32_t opposite = ~result;
  if (i.extra != 0) {
    const uint32_t other = i.list[0] != 0 ? ~w.predicate(i.c) : w.predicate(i.c);
    const auto combine = [&](uint32_t x) { return i.extra == 1 ? x & other : i.extra == 2 ? x | other : x ^ other; };
    result = combine(result);
    opposite = combine(opposite);
  }
  w.predicate(i.d) = (w.predicate(i.d) & ~w.active) | (result & w.active);
  if (i.e != 0) w.predicate(i.e) = (w.predicate(i.e) & ~w.active) | (opposite & w.active);
}

template <class T>
Handler comparison(const std::string& name) {
  if (name == "eq") return compare<T, [](T a, T b) { return a == b; }>;
  if (name == "ne") {
    if constexpr (std::is_floating_point_v<T>)
      return compare<T, [](T a, T b) { return (a < b || a > b); }>;
    else
      return compare<T, [](T a, T b) { return a != b; }>;
  }
  if (name == "lt" || name == "lo") return compare<T, [](T a, T b) { return a < b; }>;
  if (name == "le" || name == "ls") return compare<T, [](T a, T b) { return a <= b; }>;
  if (name == "gt" || name == "hi") return compare<T, [](T a, T b) { return (a > b); }>;
  if (name == "ge" || name == "hs") return compare<T, [](T a, T b) { return a >= b; }>;
  if constexpr (std::is_floating_point_v<T>) {
    if (name == "equ") return compare<T, [](T a, T b) { return !(a < b || (a > b)); }>;
    if (name == "neu") return compare<T, [](T a, T b) { return a != b; }>;
    if (name == "ltu") return compare<T, [](T a, T b) { return !(a >= b); }>;
    if (name == "leu") return compare<T, [](T a, T b) { return !(a > b); }>;
    if (name == "gtu") return compare<T, [](T a, T b) { return !(a <= b); }>;
    if (name == "geu") return compare<T, [](T a, T b) { return !(a < b); }>;
    if (name == "num") return compare<T, [](T a, T b) { return !std::isnan(a) && !std::isnan(b); }>;
    if (name == "nan") return compare<T, [](T a, T b) { return std::isnan(a) || std::isnan(b); }>;
  }
  return nullptr;
}

bool translate_setp(Translator& t, const Statement& s, Instruction& i) {
  const std::string& type = s.modifiers.back();
  const std::string& name = s.modifiers.front();
  i.run = with_number(type, [&](auto x) -> Handler { return comparison<decltype(x)>(name); });
  if (!i.run) return false;
  const Operand& to = s.operands[0];
  if (to.kind == Operand::Kind::vector) {
    i.d = to.parts[0].kind == Operand::Kind::none ? t.sink(1) : t.predicate(to.parts[0]);
    i.e = t.predicate(to.parts[1]);
  } else {
    i.d = t.predicate(to);
  }
  const int width = width_of(type);
  i.a = t.value(s.operands[1], width);
  i.b = t.value(s.operands[2], width);
  i.extra = s.has("and") ? 1 : s.has("or") ? 2 : s.has("xor") ? 3 : 0;
  if (i.extra != 0) {
    i.c = t.predicate_or_opposite(s.operands[3]);
    i.list = {s.operands[3].negated};
  }
  return true;
}

template <int kOp>  // and, or, xor, not, mov
void logic(Warp& w, const Instruction& i) {
  const uint32_t a = w.predicate(i.a), b = w.predicate(i.b);
  const uint32_t x = kOp == 0 ? a & b : kOp == 1 ? a | b : kOp == 2 ? a ^ b : kOp == 3 ? ~a : a;
  w.predicate(i.d) = (w.predicate(i.d) & ~w.active) | (x & w.active);
}

template <class T>
void select(Warp& w, const Instruction& i) {
  const T* const a = w.at<T>(i.a);
  const T* const b = w.at<T>(i.b);
  const uint32_t p = w.predicate(i.c);
  for_lanes<T>(w, i.d, [=](int l) { return p >> l & 1 ? a[l] : b[l]; });
}

template <class T>
void move(Warp& w, const Instruction& i) {
  const T* const a = w.at<T>(i.a);
  for_lanes<T>(w, i.d, [=](int l) { return a[l]; });
}
// A register from its parts, or the parts of a register; T is a part.
template <class D, class T>
void join(Warp& w, const Instruction& i) {
  D result[kLanes] = {};
  for (size_t n = 0; n < i.list.size(); ++n)
    for (int l = 0; l < kLanes; ++l)
      result[l] = static_cast<D>(result[l] | static_cast<D>(w.at<T>(i.list[n])[l]) << (8 * sizeof(T) * n));
  for_lanes<D>(w, i.d, [&](int l) { return result[l]; });
}
template <class D, class T>
void part(Warp& w, const Instruction& i) {
  D source[kLanes];
  std::memcpy(source, w.at<D>(i.a), sizeof(source));
  for (size_t n = 0; n < i.list.size(); ++n)
    for_lanes<T>(w, i.list[n], [&](int l) { return static_cast<T>(source[l] >> (8 * sizeof(T) * n)); });
}

// Advances with every reading, so that waiting for a time ends.
template <class T>
void clock_handler(Warp& w, const Instruction& i) {
  static uint64_t clock = 0;
  clock += 100;
  for_lanes<T>(w, i.d, [](int) { return static_cast<T>(clock); });
}

Handler join_handler(int whole, int each, bool forwards) {
  if (whole == 64 && each == 32) return forwards ? Handler(join<u64, u32>) : Handler(part<u64, u32>);
  if (whole == 64 && each == 16) return forwards ? Handler(join<u64, u16>) : Handler(part<u64, u16>);
  if (whole == 32 && each == 16) return forwards ? Handler(join<u32, u16>) : Handler(part<u32, u16>);
  return nullptr;
}

Handler move_handler(int width) {
  return width == 16   ? Handler(move<u16>)
         : width == 32 ? Handler(move<u32>)
         : width == 64 ? Handler(move<u64>)
                       : nullptr;
}

bool translate_move(Translator& t, const Statement& s, Instruction& i) {
  const std::string& type = s.modifiers.back();
  const Operand &to = s.operands[0], &from = s.operands[1];
  const int width = width_of(type);
  if (type == "pred") {
    i.run = logic<4>;
    i.d = t.predicate(to);
    i.a = i.b = t.predicate(from);
  } else if (from.kind == Operand::Kind::vector) {
    const int each = width / static_cast<int>(from.parts.size());
    i.run = join_handler(width, each, true);
    i.d = t.value(to, width);
    for (const Operand& p : from.parts) i.list.push_back(t.value(p, each));
  } else if (to.kind == Operand::Kind::vector) {
    const int each = width / static_cast<int>(to.parts.size());
    i.run = join_handler(width, each, false);
    i.a = t.value(from, width);
    for (const Operand& p : to.parts) i.list.push_back(p.kind == Operand::Kind::none ? t.sink(each) : t.value(p, each));
  } else {
    const bool clock = from.kind == Operand::Kind::reg && t.is_clock(from);
    i.run = !clock        ? move_handler(width)
            : width == 64 ? Handler(clock_handler<uint64_t>)
                          : Handler(clock_handler<uint32_t>);
    i.d = t.value(to, width);
    i.a = t.value(from, width);
  }
  return i.run != nullptr;
}

u32 permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64{b} << 32 | a;
  u32 result = 0;
  for (int n = 0; n < 4; ++n) {
    const u32 which = selector >> (4 * n);
    u32 byte = static_cast<u32>(bytes >> (8 * (which & 7))) & 0xFF;
    if (which & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << (8 * n);
  }
  return result;
}
template <class T>
T insert_bits(T a, T b, u32 place, u32 count) {
  place &= 0xFF;
  count &= 0xFF;
  T result = b;
  for (u32 n = 0; n < count && place + n < 8 * sizeof(T); ++n) {
    const T bit = T{1} << (place + n);
    result = (result & ~bit) | (a >> n & 1 ? bit : T{0});
  }
  return result;
}

bool translate_bits(Translator& t, const Statement& s, Instruction& i) {
  const std::string& op = s.opcode;
  const std::string& type = s.modifiers.empty() ? s.opcode : s.modifiers.back();
  const auto operands = [&](std::initializer_list<int> widths) {
    uint32_t* const places[] = {&i.d, &i.a, &i.b, &i.c, &i.e};
    size_t n = 0;
    for (const int width : widths) {
      *places[n] = t.value(s.operands[n], width);
      ++n;
    }
    return true;
  };
  if (op == "popc") {
    i.run = type == "b32" ? Handler(unary<u32, u32, [](u32 a) { return std::popcount(a); }>)
                          : Handler(unary<u32, u64, [](u64 a) { return std::popcount(a); }>);
    return operands({32, width_of(type)});
  }
  if (op == "clz") {
    i.run = type == "b32" ? Handler(unary<u32, u32, [](u32 a) { return std::countl_zero(a); }>)
                          : Handler(unary<u32, u64, [](u64 a) { return std::countl_zero(a); }>);
    return operands({32, width_of(type)});
  }
  if (op == "brev" && type == "b32") {
    i.run = unary<u32, u32, [](u32 a) {
      u32 r = 0;
      for (int n = 0; n < 32; ++n) r |= (a >> n & 1) << (31 - n);
      return r;
    }>;
    return operands({32, 32});
  }
  if (op == "prmt") {
    i.run = ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return permute(a, b, c); }>;
    return operands({32, 32, 32, 32});
  }
  if (op == "bmsk" && s.has("clamp")) {
    i.run = binary<u32, u32, u32,
                   [](u32 a, u32 b) { return insert_bits<u32>(~0u, 0, std::min(a, 32u), std::min(b, 32u)); }>;
    return operands({32, 32, 32});
  }
  if (op == "bfi") {
    const int width = width_of(type);
    i.run = width == 32 ? Handler([](Warp& w, const Instruction& n) {
      const u32 *a = w.at<u32>(n.a), *b = w.at<u32>(n.b), *c = w.at<u32>(n.c), *e = w.at<u32>(n.e);
      for_lanes<u32>(w, n.d, [=](int l) { return insert_bits(a[l], b[l], c[l], e[l]); });
    })
                        : Handler([](Warp& w, const Instruction& n) {
                            const u64 *a = w.at<u64>(n.a), *b = w.at<u64>(n.b);
                            const u32 *c = w.at<u32>(n.c), *e = w.at<u32>(n.e);
                            for_lanes<u64>(w, n.d, [=](int l) { return insert_bits(a[l], b[l], c[l], e[l]); });
                          });
    return operands({width, width, width, 32, 32});
  }
  if (op == "bfe") {
    i.run = type == "u32" ? Handler(ternary<u32, u32, u32, u32,
                                            [](u32 a, u32 b, u32 c) -> u32 {
                                              b &= 0xFF, c &= 0xFF;
                                              if (b >= 32 || c == 0) return 0;
                                              return (a >> b) & (c >= 32 ? ~0u : (1u << c) - 1);
                                            }>)
                          : nullptr;
    return i.run && operands({32, 32, 32, 32});
  }
  if (op == "shf") {
    const bool left = s.has("l"), wrap = s.has("wrap");
    if (left)
      i.run =
          wrap
              ? Handler(
                    ternary<u32, u32, u32, u32,
                            [](u32 a, u32 b, u32 c) { return static_cast<u32>((u64{b} << 32 | a) << (c & 31) >> 32); }>)
              : Handler(ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) {
                  return static_cast<u32>((u64{b} << 32 | a) << std::min(c, 32u) >> 32);
                }>);
    else
      i.run =
          wrap ? Handler(ternary<u32, u32, u32, u32,
                                 [](u32 a, u32 b, u32 c) { return static_cast<u32>((u64{b} << 32 | a) >> (c & 31)); }>)
               : Handler(ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) {
                   return static_cast<u32>((u64{b} << 32 | a) >> std::min(c, 32u));
                 }>);
    return operands({32, 32, 32, 32});
  }
  return false;
}

}  // namespace

bool translate_arithmetic(Translator& t, const Statement& s, Instruction& i) {
  const std::string& op = s.opcode;
  if (op == "setp") return translate_setp(t, s, i);
  if (op == "mov") return translate_move(t, s, i);
  if (translate_bits(t, s, i)) return true;
  if (s.modifiers.empty()) return false;
  const std::string& type = s.modifiers.back();
  if (op == "selp") {
    const int width = width_of(type);
    i.run = width == 16   ? Handler(select<u16>)
            : width == 32 ? Handler(select<u32>)
            : width == 64 ? Handler(select<u64>)
                          : nullptr;
    if (!i.run) return false;
    i.d = t.value(s.operands[0], width);
    i.a = t.value(s.operands[1], width);
    i.b = t.value(s.operands[2], width);
    i.c = t.predicate(s.operands[3]);
    return true;
  }
  if (type == "pred") {
    i.run = op == "and" ? logic<0> : op == "or" ? logic<1> : op == "xor" ? logic<2> : op == "not" ? logic<3> : nullptr;
    if (!i.run) return false;
    i.d = t.predicate(s.operands[0]);
    i.a = t.predicate(s.operands[1]);
    i.b = s.operands.size() > 2 ? t.predicate(s.operands[2]) : i.a;
    return true;
  }
  if (type.find_first_of("0123456789") == std::string::npos) return false;
  i.run = type == "bf16x2" ? pair_handler(s) : integer_handler(s, type);
  if (!i.run) i.run = float_handler(s, type);
  if (!i.run) return false;
  const int width = width_of(type), wide = s.has("wide") ? 2 * width : width;
  const bool shifts = op == "shl" || op == "shr";
  i.d = t.value(s.operands[0], wide);
  i.a = t.value(s.operands[1], width);
  if (s.operands.size() > 2) i.b = t.value(s.operands[2], shifts ? 32 : width);
  if (s.operands.size() > 3) i.c = t.value(s.operands[3], wide);
  return true;
}

}  // namespace furious::emulator
