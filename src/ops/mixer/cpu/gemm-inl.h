// Matrix products of operands that lie packed in cache, kept in registers while they grow: the inner loops of every
// form. Rows come in strips of kRows, columns in vectors; a strip of up to kVectors vectors fills the register file.
//
// Packed matrices: rows padded to a multiple of kRows, columns to a multiple of kPad, padding zero.

#if defined(FURIOUS_OPS_MIXER_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_MIXER_GEMM_INL_H_
#undef FURIOUS_OPS_MIXER_GEMM_INL_H_
#else
#define FURIOUS_OPS_MIXER_GEMM_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

constexpr size_t kRows = 6;
constexpr size_t kVectors = HWY_MAX_BYTES >= 64 ? 4 : 2;  // 24 of 32 registers, or 12 of 16, hold results
constexpr size_t kPanel = kVectors * kLanes;
constexpr size_t kPad = 16;

constexpr size_t round_up(size_t n, size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// sums[r][n] += Σ_k a(r, k) · b(k, n). a(r, k) is a[r·lda + k], or a[k·lda + r] when the left operand is transposed.
template <bool kTransposed, size_t kWidth>
HWY_INLINE void multiply_strip(const float* HWY_RESTRICT a, size_t lda, const float* HWY_RESTRICT b, size_t ldb,
                               size_t depth, FloatVector (&sums)[kRows][kWidth]) {
  for (size_t k = 0; k < depth; ++k) {
    FloatVector right[kWidth];
    HWY_UNROLL(4)
    for (size_t n = 0; n < kWidth; ++n) right[n] = hn::LoadU(kTag, b + k * ldb + n * kLanes);
    HWY_UNROLL(6)
    for (size_t r = 0; r < kRows; ++r) {
      const FloatVector left = hn::Set(kTag, kTransposed ? a[k * lda + r] : a[r * lda + k]);
      HWY_UNROLL(4)
      for (size_t n = 0; n < kWidth; ++n) sums[r][n] = hn::MulAdd(left, right[n], sums[r][n]);
    }
  }
}

template <size_t kWidth>
HWY_INLINE void clear_strip(FloatVector (&sums)[kRows][kWidth]) {
  HWY_UNROLL(6)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t n = 0; n < kWidth; ++n) sums[r][n] = hn::Zero(kTag);
  }
}

template <size_t kWidth>
HWY_INLINE void load_strip(const float* c, size_t ldc, FloatVector (&sums)[kRows][kWidth]) {
  HWY_UNROLL(6)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t n = 0; n < kWidth; ++n) sums[r][n] = hn::LoadU(kTag, c + r * ldc + n * kLanes);
  }
}

template <size_t kWidth>
HWY_INLINE void store_strip(const FloatVector (&sums)[kRows][kWidth], float* c, size_t ldc) {
  HWY_UNROLL(6)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t n = 0; n < kWidth; ++n) hn::StoreU(sums[r][n], kTag, c + r * ldc + n * kLanes);
  }
}

// Calls f.template operator()<width>() for a number of vectors known only at run time.
template <class F>
HWY_INLINE void with_width(size_t vectors, F&& f) {
  if constexpr (kVectors == 4) {
    switch (vectors) {
      case 4:
        return f.template operator()<4>();
      case 3:
        return f.template operator()<3>();
      case 2:
        return f.template operator()<2>();
      default:
        return f.template operator()<1>();
    }
  } else {
    return vectors >= 2 ? f.template operator()<2>() : f.template operator()<1>();
  }
}

template <bool kTransposed>
struct StripProduct {
  const float* a;
  size_t lda;
  const float* b;
  size_t ldb;
  size_t rows, depth;
  float* c;
  size_t ldc;

  template <size_t kWidth>
  HWY_INLINE void operator()() const {
    for (size_t r = 0; r < rows; r += kRows) {
      FloatVector sums[kRows][kWidth];
      load_strip(c + r * ldc, ldc, sums);
      multiply_strip<kTransposed>(kTransposed ? a + r : a + r * lda, lda, b, ldb, depth, sums);
      store_strip(sums, c + r * ldc, ldc);
    }
  }
};

// c += a·b, or aᵀ·b with a transposed left operand [depth, rows]. `rows` and `columns` are rounded up to whole strips
// and vectors, which the padding of the operands covers.
template <bool kTransposed>
HWY_NOINLINE void gemm(size_t rows, size_t columns, size_t depth, const float* a, size_t lda, const float* b,
                       size_t ldb, float* c, size_t ldc) {
  for (size_t n = 0; n < columns; n += kPanel) {
    const size_t vectors = (std::min(columns - n, kPanel) + kLanes - 1) / kLanes;
    with_width(vectors, StripProduct<kTransposed>{a, lda, b + n, ldb, rows, depth, c + n, ldc});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#endif
