// Vectors of floats: the vocabulary of all CPU kernels. Compiled once per instruction set, and included after
// hwy/foreach_target.h by files that are.
#if defined(FURIOUS_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_SIMD_INL_H_
#undef FURIOUS_OPS_SIMD_INL_H_
#else
#define FURIOUS_OPS_SIMD_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "ops/rows.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
constexpr FloatTag kTag{};
constexpr int64_t kLanes = HWY_LANES(float);

// For what is left of a row: rounds as a full vector does, so that it does not matter where a row is cut.
constexpr hn::CappedTag<float, 1> kOneLane{};

// How a loop over a row reads and writes memory: whole vectors, and a last one that is not full. Lanes past the end
// read as zero and are not written.
struct WholeVector {
  HWY_INLINE FloatVector load(const float* from) const { return hn::LoadU(kTag, from); }
  HWY_INLINE void store(FloatVector v, float* to) const { hn::StoreU(v, kTag, to); }
};

struct PartialVector {
  size_t count;

#if HWY_MEM_OPS_MIGHT_FAULT
  HWY_INLINE FloatVector load(const float* from) const {
    HWY_ALIGN float lanes[kLanes] = {};
    std::memcpy(lanes, from, count * sizeof(float));
    return hn::Load(kTag, lanes);
  }
  HWY_INLINE void store(FloatVector v, float* to) const {
    HWY_ALIGN float lanes[kLanes];
    hn::Store(v, kTag, lanes);
    std::memcpy(to, lanes, count * sizeof(float));
  }
#else
  HWY_INLINE FloatVector load(const float* from) const {
    return hn::MaskedLoad(hn::FirstN(kTag, count), kTag, from);
  }
  HWY_INLINE void store(FloatVector v, float* to) const {
    hn::BlendedStore(v, hn::FirstN(kTag, count), kTag, to);
  }
#endif
};

// body(i, memory) for the vectors that start at i = 0, kLanes, ...; memory is a WholeVector or a PartialVector. Bodies
// are lambdas marked HWY_ATTR.
template <class Body>
HWY_INLINE void for_each_vector(int64_t count, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, WholeVector());
  if (i < count) body(i, PartialVector{static_cast<size_t>(count - i)});
}

template <class Body, class... Pointers>
HWY_INLINE void for_each_vector_of_row(Body& body, int64_t size, Pointers... row) {
  for_each_vector(size, [&](int64_t i, auto memory) HWY_ATTR { body(memory, (row + i)...); });
}

// body(memory, pointers...) for every vector of every row of tensors of one shape, in parallel over the rows; pointers
// are one float* per tensor.
template <class Body, class... OtherRows>
void map_rows(Body body, const Rows<float>& first, const OtherRows&... others) {
  parallel_rows(first.count(), first.size(), [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t row = begin; row < end; ++row) for_each_vector_of_row(body, first.size(), first[row], others[row]...);
  });
}

HWY_INLINE FloatVector set(float value) {
  return hn::Set(kTag, value);
}

HWY_INLINE float sum_of_lanes(FloatVector v) {
  return hn::GetLane(hn::SumOfLanes(kTag, v));
}

// σ(x) and σ(−x) = 1 − σ(x), each with full relative precision: e^−|x| cannot overflow.
struct Sigmoid {
  FloatVector value;
  FloatVector complement;
};

HWY_INLINE Sigmoid sigmoid(FloatVector x) {
  const FloatVector one = set(1.0f);
  const FloatVector e = hn::Exp(kTag, hn::Neg(hn::Abs(x)));
  const FloatVector larger = hn::Div(one, hn::Add(one, e));
  const FloatVector smaller = hn::Mul(e, larger);
  const auto negative = hn::Lt(x, hn::Zero(kTag));
  return {hn::IfThenElse(negative, smaller, larger), hn::IfThenElse(negative, larger, smaller)};
}

HWY_INLINE FloatVector silu(FloatVector x) {
  return hn::Mul(x, sigmoid(x).value);
}

// d silu / dx = σ(x) (1 + x σ(−x)), beside silu itself.
struct SiluWithDerivative {
  FloatVector value;
  FloatVector derivative;
};

HWY_INLINE SiluWithDerivative silu_with_derivative(FloatVector x) {
  const Sigmoid s = sigmoid(x);
  return {hn::Mul(x, s.value), hn::Mul(s.value, hn::MulAdd(x, s.complement, set(1.0f)))};
}

// ln(1 + e^x) = max(x, 0) + ln(1 + e^−|x|). The comparison is written so that NaN stays NaN.
HWY_INLINE FloatVector softplus(FloatVector x) {
  const FloatVector zero = hn::Zero(kTag);
  const FloatVector positive_part = hn::IfThenElse(hn::Lt(x, zero), zero, x);
  return hn::Add(positive_part, hn::Log1p(kTag, hn::Exp(kTag, hn::Neg(hn::Abs(x)))));
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
