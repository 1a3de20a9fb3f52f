#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mixer/cpu/recurrent_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again.
#include <cmath>
#include <limits>

#include "hwy/highway.h"
#include "ops/elementwise.h"
#include "ops/mixer/cpu/head-inl.h"
#include "ops/mixer/recurrent_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

// y += Σ_f phi[f] · s[f, :] for one panel of columns: one row, so reading the state decides the time.
struct RowProduct {
  const float* phi;
  size_t features;
  const float* s;
  size_t ld;
  float* y;

  template <size_t kWidth>
  HWY_INLINE void operator()() const {
    FloatVector sums[2][kWidth];  // two, so that one addition need not wait for the other
    HWY_UNROLL(4)
    for (size_t n = 0; n < kWidth; ++n) {
      sums[0][n] = hn::LoadU(kTag, y + n * kLanes);
      sums[1][n] = hn::Zero(kTag);
    }
    for (size_t f = 0; f < features; f += 2) {  // padding makes the number of features even
      HWY_UNROLL(2)
      for (size_t i = 0; i < 2; ++i) {
        HWY_UNROLL(4)
        for (size_t n = 0; n < kWidth; ++n)
          sums[i][n] =
              hn::MulAdd(hn::Set(kTag, phi[f + i]), hn::LoadU(kTag, s + (f + i) * ld + n * kLanes), sums[i][n]);
      }
    }
    HWY_UNROLL(4)
    for (size_t n = 0; n < kWidth; ++n) hn::StoreU(hn::Add(sums[0][n], sums[1][n]), kTag, y + n * kLanes);
  }
};

// One head of a slot, of its pending tokens those in [first, pending).
struct CachedHead {
  const CacheSlot& slot;
  size_t first, pending;
  int64_t head;
  const MixerShape& shape;

  float* row(Tensor CachePage::*member, size_t token) const {
    const Tensor& x = slot.pages[token / CachePage::kTokens].*member;
    const int64_t own = head / (shape.heads / x.size(0));
    return x.data<float>() + own * x.stride(0) + static_cast<int64_t>(token % CachePage::kTokens) * x.stride(1);
  }
  // Σ_{s>j} a_s for each token j of the window: its decay until now. Returns that of all of it, the first included.
  double decay_until_now(float* out) const {
    if (!slot.pages.empty() && slot.pages[0].log_decay) {
      double sum = 0;
      for (size_t j = pending; j-- > 0;) {
        out[j] = static_cast<float>(sum);
        sum += static_cast<double>(*row(&CachePage::log_decay, j));
      }
      return sum;
    }
    std::fill_n(out, pending, 0.0f);
    return 0;
  }
  // Calls f(token, count, rows, stride) for the window's rows of a part of the pages, page by page.
  template <class F>
  void for_each_page(Tensor CachePage::*part, F&& f) const {
    for (size_t j = first; j < pending;) {
      const size_t end = std::min(pending, (j / CachePage::kTokens + 1) * CachePage::kTokens);
      f(j, end - j, static_cast<const float*>(row(part, j)),
        static_cast<size_t>((slot.pages[j / CachePage::kTokens].*part).stride(1)));
      j = end;
    }
  }
};

// out[r] = q·row r, for kCount rows.
template <size_t kCount>
HWY_INLINE void inner_products(const float* q, const float* rows, size_t stride, size_t dim, float* out) {
  FloatVector totals[kCount];
  HWY_UNROLL(4)
  for (size_t r = 0; r < kCount; ++r) totals[r] = hn::Zero(kTag);
  size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const FloatVector x = hn::LoadU(kTag, q + i);
    HWY_UNROLL(4)
    for (size_t r = 0; r < kCount; ++r) totals[r] = hn::MulAdd(x, hn::LoadU(kTag, rows + r * stride + i), totals[r]);
  }
  for (size_t r = 0; r < kCount; ++r) {
    out[r] = sum_of_lanes(totals[r]);
    for (size_t c = i; c < dim; ++c) out[r] += q[c] * rows[r * stride + c];
  }
}

// y += Σ_r weights[r] · row r.
inline HWY_ATTR void add_rows(const float* weights, size_t count, const float* rows, size_t stride, size_t dim,
                              float* y) {
  const size_t even = count / 2 * 2, whole = dim / kLanes * kLanes;
  for_each_panel(whole, [&](size_t column, size_t vectors) HWY_ATTR {
    with_width(vectors, RowProduct{weights, even, rows + column, stride, y + column});
  });
  if (even < count)
    for (size_t c = 0; c < whole; c += kLanes)
      hn::StoreU(
          hn::MulAdd(hn::Set(kTag, weights[even]), hn::LoadU(kTag, rows + even * stride + c), hn::LoadU(kTag, y + c)),
          kTag, y + c);
  for (size_t c = whole; c < dim; ++c)
    for (size_t r = 0; r < count; ++r) y[c] += weights[r] * rows[r * stride + c];
}

// The weights of the window's tokens, in place of their decays. Returns their sum. Both arrays have a vector of slack.
template <Kind kKind>
HWY_ATTR float window_weights(const CachedHead& cached, const Polynomial& f, const float* q, float* scores,
                              float* weights) {
  const auto dim = static_cast<size_t>(cached.shape.qk_dim);
  cached.for_each_page(&CachePage::k, [&](size_t token, size_t count, const float* rows, size_t stride) HWY_ATTR {
    size_t r = 0;
    for (; r + 4 <= count; r += 4) inner_products<4>(q, rows + r * stride, stride, dim, scores + token + r);
    for (; r < count; ++r) inner_products<1>(q, rows + r * stride, stride, dim, scores + token + r);
  });
  // Behind the last token: nothing.
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  std::fill_n(scores + cached.pending, kLanes, 0.0f);
  std::fill_n(weights + cached.pending, kLanes, kNothing);
  const FloatVector most = hn::Set(kTag, kLargestExponent);  // which only a signed mask can reach
  FloatVector largest = hn::Set(kTag, kNothing), total = hn::Zero(kTag);
  if constexpr (kKind == Kind::kSoftmax) {
    for (size_t j = cached.first; j < cached.pending; j += kLanes) {
      const FloatVector w = hn::Add(hn::Min(hn::LoadU(kTag, weights + j), most), hn::LoadU(kTag, scores + j));
      hn::StoreU(w, kTag, weights + j);
      largest = hn::Max(largest, w);
    }
    largest = hn::Set(kTag, hn::GetLane(hn::MaxOfLanes(kTag, largest)));
  }
  for (size_t j = cached.first; j < cached.pending; j += kLanes) {
    FloatVector w = hn::LoadU(kTag, weights + j);
    if constexpr (kKind == Kind::kSoftmax) {
      w = hn::Exp(kTag, hn::Sub(w, largest));
    } else {
      const FloatVector decay = hn::Min(w, most);
      const FloatVector factor =
          hn::IfThenElseZero(decay >= hn::Set(kTag, static_cast<float>(kErased)), hn::Exp(kTag, decay));
      w = hn::Mul(score<kKind>(hn::LoadU(kTag, scores + j), f), factor);
    }
    total = hn::Add(total, w);
    hn::StoreU(w, kTag, weights + j);
  }
  return sum_of_lanes(total);
}

// The state's part of y and n: exp(A)·φ(q)ᵀ[s, z].
inline HWY_ATTR float read_state(const HeadState& state, const float* q, float decay, bool sum_norm, float* y) {
  HWY_ALIGN float phi[kFeatureLd * kRows];
  float normalizer = 0;
  for (size_t f0 = 0; f0 < state.features; f0 += kFeatureBlock) {
    const size_t f1 = std::min(f0 + kFeatureBlock, state.features);
    expand(state, q, 0, 1, f0, f1, phi);
    for_each_panel(state.v_ld, [&](size_t column, size_t vectors) HWY_ATTR {
      with_width(vectors, RowProduct{phi, f1 - f0, state.s + f0 * state.v_ld + column, state.v_ld, y + column});
    });
    if (sum_norm) normalizer += dot(phi, state.z + f0, round_up(f1 - f0, kPad));
  }
  const FloatVector factor = hn::Set(kTag, decay);
  for (size_t c = 0; c < state.v_ld; c += kLanes) hn::StoreU(hn::Mul(factor, hn::LoadU(kTag, y + c)), kTag, y + c);
  return normalizer * decay;
}

template <Kind kKind>
void read_head(const MixerSpec& spec, const CachedHead& cached, const float* q_in, float* out) {
  const MixerShape& shape = cached.shape;
  const auto v_dim = static_cast<size_t>(shape.v_dim);
  alignas(64) float q[kLargestDim + 2 * kPad] = {};
  alignas(64) float y[kLargestDim + kPad] = {};
  for (int64_t c = 0; c < shape.qk_dim; ++c) q[c] = q_in[c] * shape.scale;
  if (shape.features.one) q[shape.qk_dim] = 1;
  std::vector<float> memory(2 * (cached.pending + kLanes));
  float* const scores = memory.data();
  float* const weights = scores + cached.pending + kLanes;
  const double since_fold = cached.decay_until_now(weights);
  float normalizer = 0;
  if (cached.slot.state && !(since_fold < kErased)) {
    const int64_t own = cached.head / (shape.heads / shape.state_heads);
    const HeadState state(shape, cached.slot.state.data<float>() + own * cached.slot.state.stride(0));
    normalizer = read_state(state, q, static_cast<float>(std::exp(since_fold)), spec.norm == Norm::sum, y);
  }
  normalizer += window_weights<kKind>(cached, polynomial_of(spec), q, scores, weights);
  cached.for_each_page(&CachePage::v, [&](size_t token, size_t count, const float* rows, size_t stride)
                                          HWY_ATTR { add_rows(weights + token, count, rows, stride, v_dim, y); });
  const float factor = spec.norm == Norm::sum ? reciprocal_of<kKind>(normalizer) : 1.0f;
  for (size_t c = 0; c < v_dim; ++c) out[c] = y[c] * factor;
}

// Row i of q and out, [rows, heads, dim], belongs to tokens[i].
void read_cache(const MixerSpec& spec, const MixerShape& shape, const std::vector<CachedToken>& tokens, const Tensor& q,
                const Tensor& out) {
  int64_t per_head = 0;
  for (const CachedToken& token : tokens)
    per_head += token.pending * (shape.qk_dim + shape.v_dim) + (token.slot->state ? shape.state_rows * shape.v_dim : 0);
  const bool worth_threads = static_cast<size_t>(shape.heads * per_head) > kWorthThreads / 8;
  with_kind(spec, [&]<Kind kKind, Mask>() {
    parallel_for_if(worth_threads, static_cast<int64_t>(tokens.size()) * shape.heads, [&](int64_t i) {
      const FlushSubnormals flush;
      const int64_t row = i / shape.heads, head = i % shape.heads;
      const int64_t q_head = head / (shape.heads / shape.q_heads);
      const CachedToken& token = tokens[static_cast<size_t>(row)];
      const int64_t first = spec.window > 0 ? std::max<int64_t>(0, token.pending - spec.window) : 0;
      read_head<kKind>(spec, {*token.slot, static_cast<size_t>(first), static_cast<size_t>(token.pending), head, shape},
                       q.data<float>() + row * q.stride(0) + q_head * q.stride(1), out.data<float>() + i * shape.v_dim);
    });
  });
}

void fold_head(const MixerSpec& spec, const CachedHead& cached, float* state_numbers) {
  const MixerShape& shape = cached.shape;
  const SpanLayout layout(shape, cached.pending, true);
  const auto k = layout.qk_matrix(), v = layout.v_matrix();
  std::vector<float> weights(cached.pending);
  const double total = cached.decay_until_now(weights.data());
  for (float& w : weights) w = w < static_cast<float>(kErased) ? 0.0f : std::exp(w);
  std::memset(k.data(), 0, (layout.rows * layout.qk_ld + kPad) * sizeof(float));
  std::memset(v.data(), 0, layout.rows * layout.v_ld * sizeof(float));
  for (size_t j = 0; j < cached.pending; ++j) {
    const float* from = cached.row(&CachePage::v, j);
    std::copy_n(cached.row(&CachePage::k, j), layout.qk_dim, k.data() + j * layout.qk_ld);
    for (size_t c = 0; c < layout.v_dim; ++c) v.data()[j * layout.v_ld + c] = from[c] * weights[j];
  }
  layout.set_ones(cached.pending, k.data());
  const HeadState state(shape, state_numbers);
  state_update(state, static_cast<float>(std::exp(total)), k.data(), layout.qk_ld, cached.pending, v.data(),
               spec.norm == Norm::sum ? weights.data() : nullptr);
}

void fold_cache(const MixerSpec& spec, const MixerShape& shape, std::span<const CacheFold> folds) {
  int64_t pending = 0;
  for (const CacheFold& fold : folds) pending += fold.slot->pending;
  const int64_t states = shape.state_heads, work = states * pending * shape.state_rows * shape.v_dim;
  const auto heads = static_cast<int64_t>(folds.size()) * states;
  parallel_for_if(static_cast<size_t>(work) > kWorthThreads, heads, [&](int64_t i) {
    const FlushSubnormals flush;
    const CacheFold& fold = folds[static_cast<size_t>(i / states)];
    const int64_t own = i % states, head = own * (shape.heads / states);  // the first of those that share it
    fold_head(spec, {*fold.slot, 0, static_cast<size_t>(fold.slot->pending), head, shape},
              fold.state.data<float>() + own * fold.state.stride(0));
  });
}

// Copies between the packed state and the public layout, one way or the other.
void convert_cache(const MixerSpec&, const MixerShape& shape, const Tensor& packed, const Tensor& open,
                   bool to_packed) {
  const auto columns = static_cast<size_t>(shape.state_columns);
  parallel_for(shape.state_heads, [&](int64_t i) {
    const FlushSubnormals flush;
    HeadState state(shape, packed.data<float>() + i * packed.stride(0));
    float* rows = open.data<float>() + i * open.stride(1);
    if (to_packed)
      state.load(rows, columns);
    else
      state.store(rows, columns);
  });
}

int64_t packed_numbers(const MixerShape& shape) {
  return static_cast<int64_t>(
      HeadState::numbers(static_cast<size_t>(shape.state_rows), static_cast<size_t>(shape.v_dim)));
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious {

HWY_EXPORT(read_cache);
HWY_EXPORT(fold_cache);
HWY_EXPORT(convert_cache);
HWY_EXPORT(packed_numbers);

int64_t cpu::head_state_numbers(const MixerShape& shape) {
  return HWY_DYNAMIC_DISPATCH(packed_numbers)(shape);
}

namespace {

// Token `at` of a slot, [heads, dim].
void append_token(const CacheSlot& slot, int64_t at, const Tensor& k, const Tensor& v, const Tensor& log_decay) {
  const CachePage& page = slot.pages[at / CachePage::kTokens];
  const int64_t in_page = at % CachePage::kTokens;
  copy(page.k.select(1, in_page), k);
  copy(page.v.select(1, in_page), v);
  if (log_decay) copy(page.log_decay.select(1, in_page), log_decay);
}

Tensor row_of(const Tensor& x, int64_t row) {
  return x ? x.select(0, row) : x;
}

}  // namespace

void cpu::cache_append(const MixerSpec&, const MixerShape&, const CacheSlot& slot, const Tensor& k, const Tensor& v,
                       const Tensor& log_decay) {
  const Tensor ks = row_of(k, 0), vs = row_of(v, 0), decays = row_of(log_decay, 0);
  for (int64_t t = 0; t < k.size(1); ++t)
    append_token(slot, slot.pending + t, row_of(ks, t), row_of(vs, t), row_of(decays, t));
}

void cpu::cache_step(const MixerSpec& spec, const MixerShape& shape, const CacheRecords&,
                     const std::vector<CacheSlot>& slots, const SlotRows& rows, const Tensor& q, const Tensor& k,
                     const Tensor& v, const Tensor& log_decay, const Tensor& out, bool) {
  std::vector<CachedToken> tokens;
  for (int64_t i = 0; i < rows.size(); ++i) {
    const CacheSlot& slot = slots[rows.slots[i]];
    append_token(slot, slot.pending, row_of(k, i), row_of(v, i), row_of(log_decay, i));
    tokens.push_back({&slot, slot.pending + 1});
  }
  HWY_DYNAMIC_DISPATCH(read_cache)(spec, shape, tokens, q, out);
}

void cpu::cache_gather(const MixerSpec&, const MixerShape&, const CacheSlot& slot, const Tensor& k, const Tensor& v,
                       const Tensor& log_decay) {
  const auto gather = [&](const Tensor& to, Tensor CachePage::*part) {
    for (int64_t h = 0; to && h < to.size(2); ++h)
      for (int64_t t = 0; t < to.size(1); t += CachePage::kTokens) {
        const int64_t count = std::min(CachePage::kTokens, to.size(1) - t);
        copy(to.select(0, 0).select(1, h).slice(0, t, count),
             (slot.pages[t / CachePage::kTokens].*part).select(0, h).slice(0, 0, count));
      }
  };
  gather(k, &CachePage::k);
  gather(v, &CachePage::v);
  gather(log_decay, &CachePage::log_decay);
}

void cpu::cache_fold(const MixerSpec& spec, const MixerShape& shape, std::span<const CacheFold> folds) {
  HWY_DYNAMIC_DISPATCH(fold_cache)(spec, shape, folds);
}

void cpu::cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state) {
  HWY_DYNAMIC_DISPATCH(convert_cache)(spec, shape, state, from, true);
}

void cpu::cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to) {
  HWY_DYNAMIC_DISPATCH(convert_cache)(spec, shape, state, to, false);
}

}  // namespace furious
#endif
