// The quadratic part of a mixer on one packed span of one head: every query against every earlier key of the span.
//
// Score tiles live in registers and then, one strip of rows at a time, in the first-level cache; the score matrix is
// never stored. The decay of a tile that lies before its queries factors as exp(A_i − A_last)·exp(A_last − A_j), both
// at most 1, A_last being the tile's last key: one exponential per row and column. Only tiles on the diagonal take one
// per element. A tile whose factors all underflow is left out. None of this holds for a decay of either sign: there
// every tile takes one exponential per element, of a difference that was taken in double.

#if defined(FURIOUS_OPS_MIXER_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_MIXER_SCORES_INL_H_
#undef FURIOUS_OPS_MIXER_SCORES_INL_H_
#else
#define FURIOUS_OPS_MIXER_SCORES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "base/subnormals.h"
#include "ops/mixer/cpu/gemm-inl.h"
#include "ops/mixer/cpu/pack-inl.h"
#include "ops/mixer/polynomial.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

// What the inner loops tell apart. Softmax is the exponential score with sum norm, which needs a running maximum.
// Polynomials have coefficients at run time: the scores power and series, and all polynomials under a signed mask.
enum class Kind { kLinear, kSquared, kSoftmax, kExponential, kPolynomial };
enum class Mask { kCausal, kDecay, kSigned };  // signed: log-decays of either sign

constexpr size_t kBlock = 192;  // queries, and in the backward pass keys, that are handled together
static_assert(kBlock % kTile == 0 && kBlock % kRows == 0);

// One span of one head. Matrices are packed (gemm-inl.h); arrays reach to the end of the last strip.
struct Span {
  size_t length = 0;
  size_t first_query = 0;          // forward: q, y, sum and maximum begin with this row
  size_t keys_begin = 0;           // forward: k_tiles and v begin with this key, the first of a tile,
  size_t keys_end = 0;             // and end before this one
  size_t qk_dim = 0, v_dim = 0;    // true widths
  size_t qk_ld = 0, v_ld = 0;      // padded widths
  const float* q = nullptr;        // [length, qk_dim], scaled
  const float* k = nullptr;        // [length, qk_dim]
  const float* v = nullptr;        // [length, v_dim]
  const float* k_tiles = nullptr;  // [tiles][qk_dim][kTile]
  const float* v_tiles = nullptr;  // [tiles][v_dim][kTile]
  const double* decay = nullptr;   // A_t, from the start of the span; null without decay
  Polynomial polynomial{};         // f, for kPolynomial
  size_t window = 0;               // a row sees its last keys, itself among them; 0: all. For softmax without decay

  // The first key that a row sees, and those from which on all rows of a strip see what is not later than they are.
  size_t first_key(size_t row) const { return window > 0 && row >= window ? row - window + 1 : 0; }
  bool cuts(size_t strip, size_t key) const { return key < first_key(strip + kRows - 1); }

  // Forward: y and sum are added to; maximum is in use for softmax.
  float* y = nullptr;
  float* sum = nullptr;
  float* maximum = nullptr;

  // Backward. For norm none: reciprocal 1, delta 0.
  const float* g = nullptr;                           // gradient of the output
  const float* delta = nullptr;                       // g_i·o_i
  const float* reciprocal = nullptr;                  // 1/n_i, or 0 where n_i is too small
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;  // added to
  // With decay: Σ_j w_ij dw_ij and Σ_i w_ij dw_ij. In da, a sum of their differences over all later tokens, a pair
  // cancels but where t lies between its tokens. In f64 it does so to the last bit, so that rounding does not add up.
  double *row_term = nullptr, *column_term = nullptr;
};

// Scores without a state: all that a signed mask is compiled for.
template <Kind kKind>
constexpr bool kHasSignedMask = kKind != Kind::kLinear&& kKind != Kind::kSquared;

// Whether a pass of all queries over so many keys is worth waking threads for.
inline bool is_large(const Span& span, size_t keys) {
  return (span.length - span.first_query) * keys * (span.qk_dim + span.v_dim) > kWorthThreads;
}

// The decay between the rows and the columns of a tile, or of a block of keys.
struct TileDecay {
  float* row;     // exp(A_i − A_last), or the exponent itself for softmax
  float* column;  // exp(A_last − A_j), likewise
};

template <Kind kKind>
HWY_INLINE void decay_factors(const double* decay, size_t count, double sign, double reference, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(sign * (decay[i] - reference));
  if constexpr (kKind == Kind::kSoftmax) return;
  for (size_t i = 0; i < count; i += kLanes) {
    const FloatVector x = hn::LoadU(kTag, out + i);
    hn::StoreU(hn::IfThenElseZero(x >= hn::Set(kTag, static_cast<float>(kErased)), hn::Exp(kTag, x)), kTag, out + i);
  }
}

// Exponents of the mask for a strip of rows against `keys` keys from `first_key` on: [kRows, ld] if it is signed, else
// those of the strip's first row, the only ones in use.
template <Mask kMask>
HWY_INLINE void mask_exponents(const double* decay, size_t length, size_t first_row, size_t first_key, size_t keys,
                               size_t ld, float* out) {
  for (size_t r = 0; r < (kMask == Mask::kSigned ? kRows : 1); ++r)
    for (size_t key = 0; key < keys; ++key) {
      const size_t at = std::min(first_key + key, length - 1);
      out[r * ld + key] = static_cast<float>(decay[first_row + r] - decay[at]);
    }
}

// A vector of scores of row `row` against keys from `key` on (both counted in the span): what multiplies f(S), or for
// softmax is added to the exponent. A signed mask takes every tile as if it were on the diagonal.
template <Kind kKind, Mask kMask, bool kDiagonal>
struct DecayOf {
  static_assert(kDiagonal || kMask != Mask::kSigned);
  TileDecay tile;     // off the diagonal
  const float* from;  // on it: mask_exponents()
  size_t ld;
  const double* decay;
  size_t first_row;
  size_t window = 0;

  // Which of these keys the row sees. Weights of the others are dropped after the product, not multiplied by zero: a
  // later key may have made them infinite.
  HWY_INLINE auto sees(size_t row, size_t key) const {
    const FloatVector distance =
        hn::Iota(kTag, static_cast<float>(static_cast<int64_t>(key) - static_cast<int64_t>(row)));
    const auto earlier = distance <= hn::Zero(kTag);
    if constexpr (kKind == Kind::kSoftmax && kMask == Mask::kCausal)
      if (window > 0) return hn::And(earlier, distance > hn::Set(kTag, -static_cast<float>(window)));
    return earlier;
  }

  // Signed: where the exponent is below its largest value, so that the weight moves with it.
  HWY_INLINE auto moves(size_t row, size_t tile_key) const {
    return hn::LoadU(kTag, from + (row - first_row) * ld + tile_key) < hn::Set(kTag, kLargestExponent);
  }

  // `tile_row`: row within the tile's row array; `tile_key`: key within its column array.
  HWY_INLINE FloatVector operator()(size_t row, size_t tile_row, size_t tile_key) const {
    static_assert(kMask != Mask::kCausal);
    constexpr bool kExponent = kKind == Kind::kSoftmax;
    if constexpr (!kDiagonal) {
      const FloatVector column = hn::LoadU(kTag, tile.column + tile_key);
      const FloatVector of_row = hn::Set(kTag, tile.row[tile_row]);
      return kExponent ? hn::Add(column, of_row) : hn::Mul(column, of_row);
    } else if constexpr (kMask == Mask::kSigned) {
      const FloatVector exponent =
          hn::Min(hn::LoadU(kTag, from + (row - first_row) * ld + tile_key), hn::Set(kTag, kLargestExponent));
      if constexpr (kExponent) return exponent;
      const auto alive = exponent >= hn::Set(kTag, static_cast<float>(kErased));
      return hn::IfThenElseZero(alive, hn::Exp(kTag, exponent));
    } else {
      const float within = static_cast<float>(decay[row] - decay[first_row]);
      const FloatVector exponent = hn::Add(hn::LoadU(kTag, from + tile_key), hn::Set(kTag, within));
      if constexpr (kExponent) return exponent;
      const auto alive = exponent >= hn::Set(kTag, static_cast<float>(kErased));
      return hn::IfThenElseZero(alive, hn::Exp(kTag, hn::Min(exponent, hn::Zero(kTag))));
    }
  }
};

template <Kind kKind>
HWY_INLINE FloatVector score(FloatVector s, const Polynomial& f) {
  if constexpr (kKind == Kind::kSquared) return hn::Mul(s, s);
  if constexpr (kKind == Kind::kExponential) return hn::Exp(kTag, hn::Min(s, hn::Set(kTag, kLargestExponent)));
  if constexpr (kKind == Kind::kPolynomial) {
    FloatVector sum = hn::Set(kTag, f.c[kLargestDegree]);
    HWY_UNROLL(4)
    for (int n = kLargestDegree - 1; n >= 0; --n) sum = hn::MulAdd(sum, s, hn::Set(kTag, f.c[n]));
    return sum;
  }
  return s;
}

// f' of a polynomial.
HWY_INLINE FloatVector score_slope(FloatVector s, const Polynomial& f) {
  FloatVector sum = hn::Set(kTag, kLargestDegree * f.c[kLargestDegree]);
  HWY_UNROLL(4)
  for (int n = kLargestDegree - 1; n >= 1; --n) sum = hn::MulAdd(sum, s, hn::Set(kTag, static_cast<float>(n) * f.c[n]));
  return sum;
}

// ---------------------------------------------------------------------------------------------------------- forward

// One strip of queries against one tile of keys: makes the weights [kRows, kTile], in registers first.
template <Kind kKind, Mask kMask, bool kDiagonal>
struct ForwardScores {
  const Span& span;
  size_t first_row, first_key, block_row;  // the strip's first row, the tile's first key, the strip's row in its block
  const DecayOf<kKind, kMask, kDiagonal>& decay;
  float* weights;
  float* partial;  // [kRows, kLanes]: row sums lane by lane; for softmax row maxima of this tile
  size_t panel;

  template <size_t kWidth>
  HWY_INLINE void operator()() const {
    FloatVector sums[kRows][kWidth];
    clear_strip(sums);
    const float* tile = span.k_tiles + (first_key - span.keys_begin) * span.qk_dim + panel;
    multiply_strip<false>(span.q + (first_row - span.first_query) * span.qk_ld, span.qk_ld, tile, kTile, span.qk_dim,
                          sums);
    HWY_UNROLL(6)
    for (size_t r = 0; r < kRows; ++r) {
      FloatVector gathered = hn::LoadU(kTag, partial + r * kLanes);
      HWY_UNROLL(4)
      for (size_t n = 0; n < kWidth; ++n) {
        const size_t key = panel + n * kLanes;
        FloatVector w = sums[r][n];
        if constexpr (kKind == Kind::kSoftmax) {
          if constexpr (kMask != Mask::kCausal) w = hn::Add(w, decay(first_row + r, block_row + r, key));
          if constexpr (kDiagonal)
            w = hn::IfThenElse(decay.sees(first_row + r, first_key + key), w,
                               hn::Set(kTag, -std::numeric_limits<float>::infinity()));
          gathered = hn::Max(gathered, w);
        } else {
          w = score<kKind>(w, span.polynomial);
          if constexpr (kMask != Mask::kCausal) w = hn::Mul(w, decay(first_row + r, block_row + r, key));
          if constexpr (kDiagonal) w = hn::IfThenElseZero(decay.sees(first_row + r, first_key + key), w);
          gathered = hn::Add(gathered, w);
        }
        hn::StoreU(w, kTag, weights + r * kTile + key);
      }
      hn::StoreU(gathered, kTag, partial + r * kLanes);
    }
  }
};

// y strip = rescale · y strip + weights · V.
struct ForwardValues {
  const float* weights;
  const float* v;
  size_t ld, keys;
  float* y;
  const float* rescale;  // per row, or null

  template <size_t kWidth>
  HWY_INLINE void operator()() const {
    FloatVector sums[kRows][kWidth];
    load_strip(y, ld, sums);
    if (rescale != nullptr) {
      HWY_UNROLL(6)
      for (size_t r = 0; r < kRows; ++r) {
        HWY_UNROLL(4)
        for (size_t n = 0; n < kWidth; ++n) sums[r][n] = hn::Mul(sums[r][n], hn::Set(kTag, rescale[r]));
      }
    }
    multiply_strip<false>(weights, kTile, v, ld, keys, sums);
    store_strip(sums, y, ld);
  }
};

template <class PerPanel>
HWY_INLINE void for_each_panel(size_t columns, PerPanel&& per_panel) {
  for (size_t c = 0; c < columns; c += kPanel) per_panel(c, (std::min(columns - c, kPanel) + kLanes - 1) / kLanes);
}

// Turns a strip of exponents into softmax weights relative to the rows' new maxima.
inline HWY_ATTR void softmax_strip(const Span& span, size_t first_row, size_t keys, float* weights,
                                   const float* partial, float* rescale) {
  for (size_t r = 0; r < kRows; ++r) {
    const size_t row = first_row - span.first_query + r;
    const float before = span.maximum[row];
    const float after = std::max(before, hn::GetLane(hn::MaxOfLanes(kTag, hn::LoadU(kTag, partial + r * kLanes))));
    // A row may see none of the first keys that another row of its strip sees.
    const FloatVector shift = hn::Set(kTag, std::isinf(after) ? 0.0f : after);
    FloatVector total = hn::Zero(kTag);
    for (size_t key = 0; key < keys; key += kLanes) {
      const FloatVector w = hn::Exp(kTag, hn::Sub(hn::LoadU(kTag, weights + r * kTile + key), shift));
      total = hn::Add(total, w);
      hn::StoreU(w, kTag, weights + r * kTile + key);
    }
    rescale[r] = before == after ? 1.0f : std::exp(before - after);
    span.maximum[row] = after;
    span.sum[row] = span.sum[row] * rescale[r] + sum_of_lanes(total);
  }
}

template <Kind kKind, Mask kMask, bool kDiagonal>
HWY_INLINE void forward_strip(const Span& span, size_t first_row, size_t first_key, size_t keys, size_t block_row,
                              const TileDecay& tile, float* partial) {
  alignas(64) float weights[kRows * kTile];
  alignas(64) float from[(kMask == Mask::kSigned ? kRows : 1) * kTile];
  if constexpr (kMask != Mask::kCausal && kDiagonal)
    mask_exponents<kMask>(span.decay, span.length, first_row, first_key, kTile, kTile, from);
  const DecayOf<kKind, kMask, kDiagonal> decay{tile, from, kTile, span.decay, first_row, span.window};
  alignas(64) float maxima[kRows * kLanes];
  if constexpr (kKind == Kind::kSoftmax)
    std::fill(maxima, maxima + kRows * kLanes, -std::numeric_limits<float>::infinity());
  float* gathered = kKind == Kind::kSoftmax ? maxima : partial + block_row * kLanes;
  for_each_panel(keys, [&](size_t panel, size_t vectors) HWY_ATTR {
    with_width(vectors, ForwardScores<kKind, kMask, kDiagonal>{span, first_row, first_key, block_row, decay, weights,
                                                               gathered, panel});
  });
  alignas(64) float rescale[kRows];
  if constexpr (kKind == Kind::kSoftmax) softmax_strip(span, first_row, keys, weights, maxima, rescale);
  for_each_panel(span.v_ld, [&](size_t column, size_t vectors) HWY_ATTR {
    const float* v = span.v + (first_key - span.keys_begin) * span.v_ld + column;
    with_width(vectors,
               ForwardValues{weights, v, span.v_ld, keys, span.y + (first_row - span.first_query) * span.v_ld + column,
                             kKind == Kind::kSoftmax ? rescale : nullptr});
  });
}

// All earlier keys that the span has packed, for the queries [begin, end).
template <Kind kKind, Mask kMask>
HWY_NOINLINE void forward_block(const Span& span, size_t begin, size_t end) {
  alignas(64) float partial[kBlock * kLanes] = {};
  alignas(64) float row_factor[kBlock + kLanes];
  alignas(64) float column_factor[kTile + kLanes];
  const TileDecay tile{row_factor, column_factor};
  const size_t first = std::max(span.first_key(begin) / kTile * kTile, span.keys_begin);
  for (size_t first_key = first; first_key < std::min(end, span.keys_end); first_key += kTile) {
    const size_t keys_end = std::min(first_key + kTile, span.keys_end);
    if constexpr (kMask == Mask::kDecay) {
      const double reference = span.decay[keys_end - 1];
      if (kKind != Kind::kSoftmax && keys_end <= begin && span.decay[begin] - reference < kErased) continue;
      decay_factors<kKind>(span.decay + first_key, keys_end - first_key, -1, reference, column_factor);
      const size_t later = std::max(begin, keys_end);
      const size_t last = round_up(end - begin, kRows) + begin;
      if (later < last)
        decay_factors<kKind>(span.decay + later, last - later, 1, reference, row_factor + (later - begin));
    }
    for (size_t row = begin; row < end; row += kRows) {
      const size_t rows_end = std::min(row + kRows, span.length);
      if (rows_end <= first_key || keys_end <= span.first_key(row)) continue;
      const size_t keys = std::min(keys_end, rows_end) - first_key;
      if constexpr (kMask != Mask::kSigned) {
        if (keys_end <= row && !span.cuts(row, first_key)) {
          forward_strip<kKind, kMask, false>(span, row, first_key, keys, row - begin, tile, partial);
          continue;
        }
      }
      forward_strip<kKind, kMask, true>(span, row, first_key, keys, row - begin, tile, partial);
    }
  }
  if constexpr (kKind == Kind::kSoftmax) return;
  for (size_t row = begin; row < end; ++row)
    span.sum[row - span.first_query] += sum_of_lanes(hn::LoadU(kTag, partial + (row - begin) * kLanes));
}

template <Kind kKind, Mask kMask>
void scores_forward(const Span& span) {
  const size_t blocks = (span.length - span.first_query + kBlock - 1) / kBlock;
  parallel_for_if(is_large(span, span.keys_end - span.keys_begin), static_cast<int64_t>(blocks), [&](int64_t i) {
    const FlushSubnormals flush;
    const size_t begin = span.first_query + (blocks - 1 - static_cast<size_t>(i)) * kBlock;  // longest first
    forward_block<kKind, kMask>(span, begin, std::min(begin + kBlock, span.length));
  });
}

// --------------------------------------------------------------------------------------------------------- backward

// Scores of one strip against one tile, kept for the gradient pass.
struct StripScores {
  const float* q;
  size_t ld, depth;
  const float* k_tile;
  float* scores;
  template <size_t kWidth>
  HWY_INLINE void operator()() const {
    FloatVector sums[kRows][kWidth];
    clear_strip(sums);
    multiply_strip<false>(q, ld, k_tile, kTile, depth, sums);
    store_strip(sums, scores, kTile);
  }
};

using DoubleTag = hn::CappedTag<double, (kLanes + 1) / 2>;
using DoubleVector = hn::Vec<DoubleTag>;
constexpr DoubleTag kDoubleTag{};

// to[i] += x[i] in f64. Returns x, its upper half added to its lower.
HWY_INLINE DoubleVector add_exactly(FloatVector x, double* to) {
#if HWY_TARGET == HWY_SCALAR
  const DoubleVector all = hn::PromoteTo(kDoubleTag, x);
  hn::StoreU(hn::Add(hn::LoadU(kDoubleTag, to), all), kDoubleTag, to);
  return all;
#else
  const DoubleVector lower = hn::PromoteTo(kDoubleTag, hn::LowerHalf(x));
  const DoubleVector upper = hn::PromoteTo(kDoubleTag, hn::UpperHalf(hn::Half<FloatTag>(), x));
  hn::StoreU(hn::Add(hn::LoadU(kDoubleTag, to), lower), kDoubleTag, to);
  to += kLanes / 2;
  hn::StoreU(hn::Add(hn::LoadU(kDoubleTag, to), upper), kDoubleTag, to);
  return hn::Add(lower, upper);
#endif
}

// G = g·Vᵀ in registers; with the scores this gives p (what g is summed with into dv) and dS.
template <Kind kKind, Mask kMask, bool kDiagonal>
struct BackwardScores {
  const Span& span;
  size_t first_row, first_key, block_row, block_key;
  const DecayOf<kKind, kMask, kDiagonal>& decay;
  const float* scores;
  float *p, *ds;  // the block's [kBlock, kBlock], at this strip and tile
  size_t panel;

  template <size_t kWidth>
  HWY_INLINE void operator()() const {
    FloatVector sums[kRows][kWidth];
    clear_strip(sums);
    const float* tile = span.v_tiles + first_key * span.v_dim + panel;
    multiply_strip<false>(span.g + first_row * span.v_ld, span.v_ld, tile, kTile, span.v_dim, sums);
    HWY_UNROLL(6)
    for (size_t r = 0; r < kRows; ++r) {
      const FloatVector delta = hn::Set(kTag, span.delta[first_row + r]);
      const FloatVector reciprocal = hn::Set(kTag, span.reciprocal[first_row + r]);
      DoubleVector row_total = hn::Zero(kDoubleTag);
      HWY_UNROLL(4)
      for (size_t n = 0; n < kWidth; ++n) {
        const size_t key = panel + n * kLanes;
        const FloatVector s = hn::LoadU(kTag, scores + r * kTile + key);
        const FloatVector dw = hn::Sub(sums[r][n], delta);
        FloatVector weight, gradient;
        if constexpr (kKind == Kind::kSoftmax) {
          FloatVector exponent = s;
          if constexpr (kMask != Mask::kCausal)
            exponent = hn::Add(exponent, decay(first_row + r, block_row + r, block_key + key));
          exponent = hn::Sub(exponent, hn::Set(kTag, span.maximum[first_row + r]));
          weight = hn::Mul(hn::Exp(kTag, exponent), reciprocal);
          gradient = hn::Mul(weight, dw);
        } else if constexpr (kKind == Kind::kExponential) {
          weight = score<kKind>(s, span.polynomial);
          if constexpr (kMask != Mask::kCausal)
            weight = hn::Mul(weight, decay(first_row + r, block_row + r, block_key + key));
          gradient = hn::Mul(weight, dw);
        } else if constexpr (kKind == Kind::kPolynomial) {
          FloatVector factor = hn::Set(kTag, 1.0f);
          if constexpr (kMask != Mask::kCausal) factor = decay(first_row + r, block_row + r, block_key + key);
          weight = hn::Mul(hn::Mul(score<kKind>(s, span.polynomial), factor), reciprocal);
          gradient = hn::Mul(hn::Mul(hn::Mul(score_slope(s, span.polynomial), factor), reciprocal), dw);
        } else {
          // (S·decay)/n first: neither S/n nor dw/n alone is sure to be finite.
          FloatVector factor = kKind == Kind::kSquared ? s : hn::Set(kTag, 1.0f);
          if constexpr (kMask != Mask::kCausal)
            factor = hn::Mul(factor, decay(first_row + r, block_row + r, block_key + key));
          factor = hn::Mul(factor, reciprocal);
          weight = hn::Mul(s, factor);
          gradient = hn::Mul(kKind == Kind::kSquared ? hn::Add(factor, factor) : factor, dw);
        }
        if constexpr (kDiagonal) {
          const auto seen = decay.sees(first_row + r, first_key + key);
          weight = hn::IfThenElseZero(seen, weight);
          gradient = hn::IfThenElseZero(seen, gradient);
        }
        if constexpr (kMask != Mask::kCausal) {
          FloatVector term = hn::Mul(weight, dw);
          if constexpr (kDiagonal) term = hn::IfThenElseZero(decay.sees(first_row + r, first_key + key), term);
          if constexpr (kMask == Mask::kSigned)
            term = hn::IfThenElseZero(decay.moves(first_row + r, block_key + key), term);
          row_total = hn::Add(row_total, add_exactly(term, span.column_term + first_key + key));
        }
        if constexpr (kKind == Kind::kExponential)  // where f is flat, S has no gradient
          gradient = hn::IfThenElseZero(s < hn::Set(kTag, kLargestExponent), gradient);
        hn::StoreU(weight, kTag, p + r * kBlock + key);
        hn::StoreU(gradient, kTag, ds + r * kBlock + key);
      }
      if constexpr (kMask != Mask::kCausal)
        span.row_term[first_row + r] += hn::GetLane(hn::SumOfLanes(kDoubleTag, row_total));
    }
  }
};

template <Kind kKind, Mask kMask, bool kDiagonal>
HWY_INLINE void backward_strip(const Span& span, size_t row, size_t keys_begin, size_t keys, size_t block_row,
                               const TileDecay& tile, float* p, float* ds) {
  alignas(64) float scores[kRows * kTile];
  alignas(64) float from[(kMask == Mask::kSigned ? kRows : 1) * kBlock];
  if constexpr (kMask != Mask::kCausal && kDiagonal)
    mask_exponents<kMask>(span.decay, span.length, row, keys_begin, round_up(keys, kPad), kBlock, from);
  for (size_t tile_key = 0; tile_key < keys; tile_key += kTile) {
    const size_t first_key = keys_begin + tile_key;
    const DecayOf<kKind, kMask, kDiagonal> decay{
        {tile.row, tile.column}, from + tile_key, kBlock, span.decay, row, span.window};
    for_each_panel(std::min(kTile, keys - tile_key), [&](size_t panel, size_t vectors) HWY_ATTR {
      with_width(vectors, StripScores{span.q + row * span.qk_ld, span.qk_ld, span.qk_dim,
                                      span.k_tiles + first_key * span.qk_dim + panel, scores + panel});
      with_width(vectors, BackwardScores<kKind, kMask, kDiagonal>{
                              span, row, first_key, block_row, kDiagonal ? 0 : tile_key, decay, scores,
                              p + block_row * kBlock + tile_key, ds + block_row * kBlock + tile_key, panel});
    });
  }
  gemm<false>(kRows, span.qk_ld, keys, ds + block_row * kBlock, kBlock, span.k + keys_begin * span.qk_ld, span.qk_ld,
              span.dq + row * span.qk_ld, span.qk_ld);
}

// Adds what the queries of one block and the keys of one block give to each other's gradients.
template <Kind kKind, Mask kMask>
HWY_NOINLINE void backward_pair(const Span& span, size_t query_block, size_t key_block) {
  const size_t row_begin = query_block * kBlock;
  const size_t row_end = std::min(row_begin + kBlock, span.length);
  const size_t key_begin = key_block * kBlock;
  const size_t key_end = std::min(key_begin + kBlock, span.length);
  const bool diagonal = query_block == key_block;
  if (key_end <= span.first_key(row_begin)) return;
  alignas(64) float row_factor[kBlock + kLanes];
  alignas(64) float column_factor[kBlock + kLanes];
  if constexpr (kMask == Mask::kDecay) {
    const double reference = span.decay[key_end - 1];
    if (kKind != Kind::kSoftmax && !diagonal && span.decay[row_begin] - reference < kErased) return;
    if (!diagonal) {
      decay_factors<kKind>(span.decay + row_begin, round_up(row_end - row_begin, kRows), 1, reference, row_factor);
      decay_factors<kKind>(span.decay + key_begin, key_end - key_begin, -1, reference, column_factor);
    }
  }
  const cpu::Scratch<float> memory(2 * kBlock * kBlock);
  float* p = memory.data();
  float* ds = p + kBlock * kBlock;
  const TileDecay tile{row_factor, column_factor};
  for (size_t row = row_begin; row < row_end; row += kRows) {
    if (diagonal || kMask == Mask::kSigned || span.cuts(row, key_begin)) {
      const size_t keys = std::min(row + kRows, key_end) - key_begin;
      backward_strip<kKind, kMask, true>(span, row, key_begin, keys, row - row_begin, tile, p, ds);
    } else if constexpr (kMask != Mask::kSigned) {
      backward_strip<kKind, kMask, false>(span, row, key_begin, key_end - key_begin, row - row_begin, tile, p, ds);
    }
  }
  const size_t rows = row_end - row_begin;
  // On the diagonal a strip of keys is seen only by the rows from itself on.
  const size_t strip = diagonal ? kRows : kBlock;
  for (size_t key = 0; key < key_end - key_begin; key += strip) {
    const size_t first = diagonal ? key : 0;
    const size_t keys = std::min(strip, key_end - key_begin - key);
    gemm<true>(keys, span.qk_ld, rows - first, ds + first * kBlock + key, kBlock,
               span.q + (row_begin + first) * span.qk_ld, span.qk_ld, span.dk + (key_begin + key) * span.qk_ld,
               span.qk_ld);
    gemm<true>(keys, span.v_ld, rows - first, p + first * kBlock + key, kBlock,
               span.g + (row_begin + first) * span.v_ld, span.v_ld, span.dv + (key_begin + key) * span.v_ld, span.v_ld);
  }
}

// Pairs of one distance between blocks touch disjoint gradients, so each distance is one parallel loop: every sum has
// one order, whatever the number of threads.
template <Kind kKind, Mask kMask>
void scores_backward(const Span& span) {
  const size_t blocks = (span.length + kBlock - 1) / kBlock;
  for (size_t distance = 0; distance < blocks; ++distance) {
    parallel_for_if(is_large(span, kBlock), static_cast<int64_t>(blocks - distance), [&](int64_t key_block) {
      const FlushSubnormals flush;
      backward_pair<kKind, kMask>(span, static_cast<size_t>(key_block) + distance, static_cast<size_t>(key_block));
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#endif
