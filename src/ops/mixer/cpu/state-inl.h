// The linear part of a mixer on one packed span of one head: the state that stands for everything before the span.
//
// φ is made for a block of tokens and a block of features at a time and multiplied at once; it never exists for a whole
// span. The normalizer's column of the state is kept apart (z): as a 65th column it would cost a whole vector.

#if defined(FURIOUS_OPS_MIXER_STATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_MIXER_STATE_INL_H_
#undef FURIOUS_OPS_MIXER_STATE_INL_H_
#else
#define FURIOUS_OPS_MIXER_STATE_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "base/subnormals.h"
#include "ops/mixer/cpu/gemm-inl.h"
#include "ops/mixer/cpu/pack-inl.h"
#include "ops/mixer/features.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

constexpr size_t kFeatureBlock = 192;
constexpr size_t kTokenBlock = 96;
constexpr size_t kFeatureLd = kFeatureBlock + kPad;  // a row's last vector may reach past the block

constexpr size_t kGroup = 4;  // sums in flight at once when z is added to
static_assert(kFeatureBlock % kRows == 0 && kFeatureBlock % (kGroup * kPad) == 0 && kTokenBlock % kRows == 0);

// The state of one head, or its gradient, in memory of its own or of a cache.
struct HeadState {
  FeatureMap map;
  size_t features = 0, width = 0, v_dim = 0, v_ld = 0;  // width: of x, with the 1 of a series
  cpu::Scratch<float> memory;
  float* s = nullptr;  // [features, v_ld], rows padded to whole strips
  float* z = nullptr;  // [features], padded to whole strips and groups of vectors

  static size_t numbers(size_t features, size_t v_dim) {
    const size_t rows = round_up(features, kRows);
    return rows * round_up(v_dim, kPad) + round_up(rows, kGroup * kPad);
  }

  explicit HeadState(const MixerShape& shape, float* numbers_of_cache = nullptr)
      : map(shape.features),
        features(static_cast<size_t>(shape.state_rows)),
        width(static_cast<size_t>(shape.features.width())),
        v_dim(static_cast<size_t>(shape.v_dim)),
        v_ld(round_up(v_dim, kPad)) {
    if (numbers_of_cache == nullptr) memory = cpu::Scratch<float>::zeros(numbers(features, v_dim));
    s = numbers_of_cache == nullptr ? memory.data() : numbers_of_cache;
    z = s + round_up(features, kRows) * v_ld;
  }

  // From and to [D, columns] with columns = v_dim or v_dim + 1.
  void load(const float* in, size_t columns) {
    for (size_t f = 0; f < features; ++f) {
      std::copy(in + f * columns, in + f * columns + v_dim, s + f * v_ld);
      if (columns > v_dim) z[f] = in[f * columns + v_dim];
    }
  }
  void store(float* out, size_t columns) const {
    for (size_t f = 0; f < features; ++f) {
      std::copy(s + f * v_ld, s + f * v_ld + v_dim, out + f * columns);
      if (columns > v_dim) out[f * columns + v_dim] = z[f];
    }
  }
};

// Whether a product of the state with so many tokens is worth waking threads for.
inline bool is_large(const HeadState& state, size_t tokens) {
  return state.features * state.v_ld * tokens > kWorthThreads;
}

// Calls f(run, offset, begin, end) for every run of features with a part in [first, last): the run's features that end
// with an index in [begin, end). `offset` is the first of them, counted from `first`.
template <int kDegree, class F>
HWY_INLINE void for_each_run(const FeatureMap& map, size_t first, size_t last, F&& f) {
  FeatureRuns<kDegree> run(map);
  size_t start = 0;  // the run's first feature
  do {
    const auto size = static_cast<size_t>(run.size()), lowest = static_cast<size_t>(run.lowest());
    const size_t begin = std::max(start, first);
    const size_t end = std::min(start + size, last);
    if (begin < end) f(run, begin - first, lowest + begin - start, lowest + end - start);
    start += size;
  } while (start < last && run.next());
}

// out[token, feature − first] = φ(x[token])[feature], zero up to a whole strip of features.
inline HWY_ATTR void expand(const HeadState& state, const float* x, size_t ld, size_t tokens, size_t first, size_t last,
                            float* out) {
  with_degree(state.map, [&]<int kDegree>() HWY_ATTR {
    for_each_run<kDegree>(state.map, first, last, [&](const auto& run, size_t at, size_t begin, size_t end) HWY_ATTR {
      const auto factors = run.factors();
      const bool repeats = kDegree > 1 && begin == static_cast<size_t>(run.lowest());
      for (size_t t = 0; t < tokens; ++t) {
        const float* row = x + t * ld;
        float* to = out + t * kFeatureLd + at;
        const float prefix = run.product(row);
        const FloatVector factor = hn::Set(kTag, prefix * factors.each);
        // The last vector may spill into the next run's features, which are written after it.
        for (size_t b = begin; b < end; b += kLanes)
          hn::StoreU(hn::Mul(factor, hn::LoadU(kTag, row + b)), kTag, to + (b - begin));
        if (repeats) to[0] = factors.repeated * prefix * row[begin];
      }
    });
  });
  for (size_t t = 0; t < tokens; ++t)
    std::fill(out + t * kFeatureLd + (last - first), out + (t + 1) * kFeatureLd, 0.0f);
  std::fill(out + tokens * kFeatureLd, out + round_up(tokens, kRows) * kFeatureLd, 0.0f);
}

// partial[token, lane] += lanes of φ[token]·z for a block of features: dot products whose lanes are added up later.
inline HWY_ATTR void dot_rows(const float* phi, size_t tokens, const float* z, size_t features, float* partial) {
  for (size_t t = 0; t < tokens; t += kRows) {
    FloatVector totals[kRows];
    HWY_UNROLL(6)
    for (size_t r = 0; r < kRows; ++r) totals[r] = hn::LoadU(kTag, partial + (t + r) * kLanes);
    for (size_t f = 0; f < features; f += kLanes) {
      const FloatVector column = hn::LoadU(kTag, z + f);
      HWY_UNROLL(6)
      for (size_t r = 0; r < kRows; ++r)
        totals[r] = hn::MulAdd(hn::LoadU(kTag, phi + (t + r) * kFeatureLd + f), column, totals[r]);
    }
    HWY_UNROLL(6)
    for (size_t r = 0; r < kRows; ++r) hn::StoreU(totals[r], kTag, partial + (t + r) * kLanes);
  }
}

// z += Σ_t φ[t] one_t for a block of features; both reach to whole groups of vectors.
inline HWY_ATTR void add_rows(const float* phi, size_t tokens, const float* one, size_t features, float* z) {
  for (size_t f = 0; f < features; f += kGroup * kLanes) {
    FloatVector totals[kGroup];
    HWY_UNROLL(4)
    for (size_t i = 0; i < kGroup; ++i) totals[i] = hn::LoadU(kTag, z + f + i * kLanes);
    for (size_t t = 0; t < tokens; ++t) {
      const FloatVector factor = hn::Set(kTag, one[t]);
      HWY_UNROLL(4)
      for (size_t i = 0; i < kGroup; ++i)
        totals[i] = hn::MulAdd(factor, hn::LoadU(kTag, phi + t * kFeatureLd + f + i * kLanes), totals[i]);
    }
    HWY_UNROLL(4)
    for (size_t i = 0; i < kGroup; ++i) hn::StoreU(totals[i], kTag, z + f + i * kLanes);
  }
}

HWY_INLINE float dot(const float* a, const float* b, size_t count) {
  FloatVector total = hn::Zero(kTag);
  for (size_t i = 0; i < count; i += kLanes) total = hn::MulAdd(hn::LoadU(kTag, a + i), hn::LoadU(kTag, b + i), total);
  return sum_of_lanes(total);
}

// y_i += φ(x_i)ᵀ s, sum_i += φ(x_i)·z for `tokens` rows of x. `sum` may be null.
inline HWY_ATTR void state_read(const HeadState& state, const float* x, size_t ld, size_t tokens, float* y,
                                float* sum) {
  const size_t blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
  parallel_for_if(is_large(state, tokens), static_cast<int64_t>(blocks), [&](int64_t block) HWY_ATTR {
    const FlushSubnormals flush;
    const size_t t0 = static_cast<size_t>(block) * kTokenBlock;
    const size_t count = std::min(kTokenBlock, tokens - t0);
    const cpu::Scratch<float> memory(kTokenBlock * (kFeatureLd + kLanes));
    float* phi = memory.data();
    float* partial = phi + kTokenBlock * kFeatureLd;
    std::fill(partial, partial + kTokenBlock * kLanes, 0.0f);
    for (size_t f0 = 0; f0 < state.features; f0 += kFeatureBlock) {
      const size_t f1 = std::min(f0 + kFeatureBlock, state.features);
      expand(state, x + t0 * ld, ld, count, f0, f1, phi);
      gemm<false>(count, state.v_ld, f1 - f0, phi, kFeatureLd, state.s + f0 * state.v_ld, state.v_ld,
                  y + t0 * state.v_ld, state.v_ld);
      if (sum != nullptr) dot_rows(phi, count, state.z + f0, f1 - f0, partial);
    }
    for (size_t t = 0; sum != nullptr && t < count; ++t)
      sum[t0 + t] += sum_of_lanes(hn::LoadU(kTag, partial + t * kLanes));
  });
}

// s = decay·s + Σ_t φ(x_t) value_tᵀ, z = decay·z + Σ_t φ(x_t) one_t. Rows of `value` are v_ld apart.
inline HWY_ATTR void state_update(const HeadState& state, float decay, const float* x, size_t ld, size_t tokens,
                                  const float* value, const float* one) {
  const size_t blocks = (state.features + kFeatureBlock - 1) / kFeatureBlock;
  parallel_for_if(is_large(state, tokens), static_cast<int64_t>(blocks), [&](int64_t block) HWY_ATTR {
    const FlushSubnormals flush;
    const size_t f0 = static_cast<size_t>(block) * kFeatureBlock;
    const size_t f1 = std::min(f0 + kFeatureBlock, state.features);
    float* s = state.s + f0 * state.v_ld;
    const FloatVector factor = hn::Set(kTag, decay);
    for (size_t i = 0; i < (f1 - f0) * state.v_ld; i += kLanes)
      hn::StoreU(hn::Mul(factor, hn::LoadU(kTag, s + i)), kTag, s + i);
    for (size_t f = f0; f < f1; f += kLanes)
      hn::StoreU(hn::Mul(factor, hn::LoadU(kTag, state.z + f)), kTag, state.z + f);
    const cpu::Scratch<float> memory(kTokenBlock * kFeatureLd);
    float* phi = memory.data();
    for (size_t t0 = 0; t0 < tokens; t0 += kTokenBlock) {
      const size_t count = std::min(kTokenBlock, tokens - t0);
      expand(state, x + t0 * ld, ld, count, f0, f1, phi);
      gemm<true>(f1 - f0, state.v_ld, count, phi, kFeatureLd, value + t0 * state.v_ld, state.v_ld, s, state.v_ld);
      if (one != nullptr) add_rows(phi, count, one + t0, f1 - f0, state.z + f0);
    }
  });
}

// The chain rule through φ for one tile of kTile tokens, tokens lying side by side: dx += (∂φ/∂x)ᵀ dphi for the
// features [first, last).
inline HWY_ATTR void contract(const HeadState& state, size_t first, size_t last, const float* dphi, const float* x,
                              float* dx) {
  with_degree(state.map, [&]<int kDegree>() HWY_ATTR {
    for_each_run<kDegree>(state.map, first, last, [&](const auto& run, size_t at, size_t begin, size_t end) HWY_ATTR {
      constexpr int kPrefix = kDegree - 1;
      const auto factors = run.factors();
      const FloatVector each = hn::Set(kTag, factors.each), repeated = hn::Set(kTag, factors.repeated);
      const auto lowest = static_cast<size_t>(run.lowest());
      for (size_t n = 0; n < kTile; n += kLanes) {
        // Π x[prefix] over all places but one, or over all.
        const auto product = [&](int without) HWY_ATTR {
          FloatVector y = hn::Set(kTag, 1.0f);
          for (int i = 0; i < kPrefix; ++i)
            if (i != without) y = hn::Mul(y, hn::LoadU(kTag, x + static_cast<size_t>(run.prefix[i]) * kTile + n));
          return y;
        };
        const FloatVector prefix = product(-1);
        FloatVector sum = hn::Zero(kTag);
        for (size_t b = begin; b < end; ++b) {
          const FloatVector t = hn::Mul(kPrefix > 0 && b == lowest ? repeated : each,
                                        hn::LoadU(kTag, dphi + (at + b - begin) * kTile + n));
          float* db = dx + b * kTile + n;
          sum = hn::MulAdd(t, hn::LoadU(kTag, x + b * kTile + n), sum);
          hn::StoreU(hn::MulAdd(t, prefix, hn::LoadU(kTag, db)), kTag, db);
        }
        for (int i = 0; i < kPrefix; ++i) {
          float* da = dx + static_cast<size_t>(run.prefix[i]) * kTile + n;
          hn::StoreU(hn::MulAdd(sum, product(i), hn::LoadU(kTag, da)), kTag, da);
        }
      }
    });
  });
}

// dx_t += factor_t · (∂φ/∂x)(x_t)ᵀ (s·value_t + z·one_t): the gradient of what state_read does, for x. All matrices
// packed; `one` may be null.
inline HWY_ATTR void state_chain(const HeadState& state, const float* x, size_t ld, size_t tokens, const float* value,
                                 const float* one, const float* factor, float* dx) {
  const size_t tiles = (tokens + kTile - 1) / kTile;
  parallel_for_if(is_large(state, tokens), static_cast<int64_t>(tiles), [&](int64_t tile) HWY_ATTR {
    const FlushSubnormals flush;
    const size_t t0 = static_cast<size_t>(tile) * kTile;
    const size_t count = std::min(kTile, tokens - t0);
    const size_t dim = state.width;
    const cpu::Scratch<float> memory((2 * dim + state.v_dim + kFeatureBlock) * kTile);
    float* x_tile = memory.data();
    float* dx_tile = x_tile + dim * kTile;
    float* value_tile = dx_tile + dim * kTile;
    float* dphi = value_tile + state.v_dim * kTile;
    transpose_tile(x + t0 * ld, ld, count, dim, x_tile);
    transpose_tile(value + t0 * state.v_ld, state.v_ld, count, state.v_dim, value_tile);
    std::fill(dx_tile, dx_tile + dim * kTile, 0.0f);
    alignas(64) float ones[kTile] = {};
    if (one != nullptr) std::copy(one + t0, one + t0 + count, ones);
    for (size_t f0 = 0; f0 < state.features; f0 += kFeatureBlock) {
      const size_t f1 = std::min(f0 + kFeatureBlock, state.features);
      for (size_t f = 0; f < round_up(f1 - f0, kRows); ++f) {
        const FloatVector z = hn::Set(kTag, one != nullptr ? state.z[f0 + f] : 0.0f);
        for (size_t n = 0; n < kTile; n += kLanes)
          hn::StoreU(hn::Mul(z, hn::Load(kTag, ones + n)), kTag, dphi + f * kTile + n);
      }
      gemm<false>(f1 - f0, kTile, state.v_dim, state.s + f0 * state.v_ld, state.v_ld, value_tile, kTile, dphi, kTile);
      contract(state, f0, f1, dphi, x_tile, dx_tile);
    }
    for (size_t t = 0; t < count; ++t)
      for (size_t c = 0; c < dim; ++c) dx[(t0 + t) * ld + c] += factor[t0 + t] * dx_tile[c * kTile + t];
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#endif
