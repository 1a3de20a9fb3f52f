#include "ops/nn/rope_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/nn/rope_cpu.cpp"
#include <hwy/foreach_target.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {
namespace {

struct Pairs {
  FloatVector first;
  FloatVector second;
};

HWY_INLINE Pairs turn(Pairs x, FloatVector cosine, FloatVector sine) {
  return {hn::NegMulAdd(x.second, sine, hn::Mul(x.first, cosine)),
          hn::MulAdd(x.first, sine, hn::Mul(x.second, cosine))};
}

HWY_INLINE Pairs load_interleaved(WholeVector, const float* from) {
  Pairs pairs;
  hn::LoadInterleaved2(kTag, from, pairs.first, pairs.second);
  return pairs;
}

HWY_INLINE Pairs load_interleaved(PartialVector part, const float* from) {
  float padded[2 * kLanes] = {};
  std::memcpy(padded, from, 2 * part.count * sizeof(float));
  return load_interleaved(WholeVector(), padded);
}

HWY_INLINE void store_interleaved(WholeVector, Pairs pairs, float* to) {
  hn::StoreInterleaved2(pairs.first, pairs.second, kTag, to);
}

HWY_INLINE void store_interleaved(PartialVector part, Pairs pairs, float* to) {
  float padded[2 * kLanes];
  store_interleaved(WholeVector(), pairs, padded);
  std::memcpy(to, padded, 2 * part.count * sizeof(float));
}

template <RopePairing kPairing>
void rotate_row(float* y, const float* x, const float* angles, float direction, int64_t half) {
  for_each_vector(half, [&](int64_t i, auto memory) HWY_ATTR {
    const FloatVector cosine = memory.load(angles + i);
    const FloatVector sine = hn::Mul(memory.load(angles + half + i), set(direction));
    if constexpr (kPairing == RopePairing::halves) {
      const Pairs turned = turn({memory.load(x + i), memory.load(x + half + i)}, cosine, sine);
      memory.store(turned.first, y + i);
      memory.store(turned.second, y + half + i);
    } else {
      store_interleaved(memory, turn(load_interleaved(memory, x + 2 * i), cosine, sine), y + 2 * i);
    }
  });
}

template <RopePairing kPairing>
void rotate(const Tensor& y_tensor, const Tensor& x_tensor, std::span<const float* const> angles, bool inverse) {
  const Rows y(y_tensor);
  const Rows x(x_tensor);
  const int64_t heads = x_tensor.size(2);
  const float direction = inverse ? -1.0f : 1.0f;
  parallel_rows(x.count(), x.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      rotate_row<kPairing>(y[row], x[row], angles[row / heads], direction, x.size() / 2);
  });
}

}  // namespace

void rope_rotate_rows(const Tensor& y, const Tensor& x, std::span<const float* const> angles, RopePairing pairing,
                      bool inverse) {
  if (pairing == RopePairing::halves)
    rotate<RopePairing::halves>(y, x, angles, inverse);
  else
    rotate<RopePairing::interleaved>(y, x, angles, inverse);
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious::cpu {

HWY_EXPORT(rope_rotate_rows);

void rope_rotate_rows(const Tensor& y, const Tensor& x, std::span<const float* const> angles, RopePairing pairing,
                      bool inverse) {
  HWY_DYNAMIC_DISPATCH(rope_rotate_rows)(y, x, angles, pairing, inverse);
}

}  // namespace furious::cpu
#endif
