// Moving one head between strided tensors and packed f32 matrices.

#if defined(FURIOUS_OPS_MIXER_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_MIXER_PACK_INL_H_
#undef FURIOUS_OPS_MIXER_PACK_INL_H_
#else
#define FURIOUS_OPS_MIXER_PACK_INL_H_
#endif

#include <algorithm>

#include "ops/mixer/cpu/gemm-inl.h"
#include "ops/mixer/cpu/head_job.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

constexpr size_t kWorthThreads = 4 << 20;  // multiplications: some tens of microseconds
constexpr size_t kTile = 64;               // keys or tokens that lie side by side in a transposed tile

// out[row, column] = factor · in[first + row, column], zero up to `ld` columns and to whole strips of rows.
inline HWY_ATTR void pack_rows(const cpu::HeadRows& in, size_t first, size_t rows, size_t columns, float factor,
                               float* out, size_t ld) {
  with_float_type(in.dtype, [&](auto zero) HWY_ATTR {
    using T = decltype(zero);
    for (size_t row = 0; row < rows; ++row) {
      const T* from = in.row<T>(first + row);
      float* to = out + row * ld;
      for (size_t c = 0; c < columns; ++c) to[c] = static_cast<float>(from[c]) * factor;
      std::fill(to + columns, to + ld, 0.0f);
    }
  });
  std::fill(out + rows * ld, out + round_up(rows, kRows) * ld, 0.0f);
}

// out[first + row, column] = factor · in[row, column], rounded to the dtype of out.
inline HWY_ATTR void unpack_rows(const float* in, size_t ld, size_t first, size_t rows, size_t columns, float factor,
                                 const cpu::HeadRows& out) {
  with_float_type(out.dtype, [&](auto zero) HWY_ATTR {
    using T = decltype(zero);
    for (size_t row = 0; row < rows; ++row) {
      T* to = static_cast<T*>(out.data) + static_cast<int64_t>(first + row) * out.stride;
      for (size_t c = 0; c < columns; ++c) to[c] = static_cast<T>(in[row * ld + c] * factor);
    }
  });
}

// out[column, row] = in[row, column] for one tile of up to kTile rows; the rest of the tile is zero.
inline HWY_ATTR void transpose_tile(const float* in, size_t ld, size_t rows, size_t columns, float* out) {
  constexpr size_t kSide = 8;  // small squares, so that both sides stay in a few cache lines
  for (size_t c0 = 0; c0 < columns; c0 += kSide) {
    const size_t c1 = std::min(columns, c0 + kSide);
    for (size_t row = 0; row < rows; ++row)
      for (size_t c = c0; c < c1; ++c) out[c * kTile + row] = in[row * ld + c];
  }
  if (rows < kTile)
    for (size_t c = 0; c < columns; ++c) std::fill(out + c * kTile + rows, out + (c + 1) * kTile, 0.0f);
}

// Tile after tile of kTile rows: [tiles][columns][kTile].
inline HWY_ATTR void transpose_tiles(const float* in, size_t ld, size_t rows, size_t columns, float* out) {
  for (size_t row = 0; row < rows; row += kTile)
    transpose_tile(in + row * ld, ld, std::min(kTile, rows - row), columns, out + row * columns);
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#endif
