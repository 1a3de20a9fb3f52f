// The forward pass of the parallel and the chunked form, and of the last queries of a KV cache. The parallel form is
// the chunked one with a single chunk.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mixer/cpu/forward_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again.
#include <bit>
#include <limits>
#include <optional>

#include "hwy/highway.h"
#include "ops/mixer/cpu/head-inl.h"
#include "ops/mixer/recurrent_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

// What the queries of a span gather from their keys.
struct Gathered {
  cpu::Scratch<float> y, sum, maximum;

  explicit Gathered(const SpanLayout& layout)
      : y(layout.v_matrix()), sum(layout.per_row()), maximum(layout.per_row()) {}

  // Nothing yet, for so many queries of the span.
  void begin(const SpanLayout& layout, size_t queries, Span& span) const {
    const size_t rows = round_up(queries, kRows);
    std::fill(y.data(), y.data() + rows * layout.v_ld, 0.0f);
    std::fill(sum.data(), sum.data() + rows, 0.0f);
    std::fill(maximum.data(), maximum.data() + rows, -std::numeric_limits<float>::infinity());
    span.y = y.data();
    span.sum = sum.data();
    span.maximum = maximum.data();
  }

  // Divides by the normalizers and writes the results of queries from `first` on.
  template <Kind kKind>
  void end(const SpanLayout& layout, const MixerSpec& spec, size_t first, size_t queries,
           const cpu::HeadJob& job) const {
    if (spec.norm == Norm::sum) {
      const auto factor = layout.per_row();
      for (size_t t = 0; t < queries; ++t) factor.data()[t] = reciprocal_of<kKind>(sum.data()[t]);
      scale_rows(y.data(), layout.v_ld, queries, factor.data());
      if (job.normalizer != nullptr) std::copy_n(sum.data(), queries, job.normalizer + first);
      if (job.maximum != nullptr) std::copy_n(maximum.data(), queries, job.maximum + first);
    }
    unpack_rows(y.data(), layout.v_ld, first, queries, layout.v_dim, 1.0f, job.out);
  }
};

template <Kind kKind, Mask kMask>
void forward_head(const MixerSpec& spec, const MixerShape& shape, const cpu::HeadJob& job) {
  const bool sum_norm = spec.norm == Norm::sum;
  const bool has_state = shape.state_rows > 0 && (job.chunk < job.length || job.initial_state || job.final_state);
  const SpanLayout layout(shape, job.chunk, has_state);
  const auto q = layout.qk_matrix(), k = layout.qk_matrix(), k_tiles = layout.qk_tiles(), v = layout.v_matrix();
  const auto factor = layout.per_row();
  const Gathered gathered(layout);
  const auto decay = layout.decays();
  const auto columns = static_cast<size_t>(shape.state_columns);

  std::optional<HeadState> state;
  if (has_state) state.emplace(shape);
  bool has_past = job.initial_state != nullptr;
  if (has_past) state->load(job.initial_state, columns);

  for (size_t first = 0; first < job.length; first += job.chunk) {
    const size_t length = std::min(job.chunk, job.length - first);
    Span span = layout.span(length);
    layout.pack_qk(job.q, first, length, shape.scale, q.data());
    layout.pack_qk(job.k, first, length, 1.0f, k.data());
    pack_rows(job.v, first, length, layout.v_dim, 1.0f, v.data(), layout.v_ld);
    transpose_tiles(k.data(), layout.qk_ld, length, layout.qk_dim, k_tiles.data());
    span.q = q.data();
    span.k_tiles = k_tiles.data();
    span.v = v.data();
    span.polynomial = polynomial_of(spec);
    span.window = static_cast<size_t>(spec.window);
    if (kMask != Mask::kCausal) {
      accumulate_decay(job, first, length, decay.data());
      span.decay = decay.data();
    }
    gathered.begin(layout, length, span);

    if (has_past) {
      const size_t reached = decay_from_start(span.decay, length, factor.data());
      state_read(*state, q.data(), layout.qk_ld, reached, span.y, sum_norm ? span.sum : nullptr);
      scale_rows(span.y, layout.v_ld, reached, factor.data());
      for (size_t t = 0; t < reached; ++t) span.sum[t] *= factor.data()[t];
    }
    scores_forward<kKind, kMask>(span);
    gathered.end<kKind>(layout, spec, first, length, job);

    if (state && (first + length < job.length || job.final_state)) {
      const size_t from = decay_to_end(span.decay, length, factor.data());
      scale_rows(v.data(), layout.v_ld, length, factor.data());
      state_update(*state, decay_of_span(span.decay, length), k.data() + from * layout.qk_ld, layout.qk_ld,
                   length - from, v.data() + from * layout.v_ld, sum_norm ? factor.data() + from : nullptr);
      has_past = true;
    }
  }
  if (job.final_state) state->store(job.final_state, columns);
}

// Keys that are packed together: with dimension 64 they stay in the second-level cache.
constexpr size_t kSection = 512;
static_assert(kSection % kTile == 0);

// Queries of the last tokens alone. Keys come in sections, so that the memory does not grow with their number.
template <Kind kKind, Mask kMask>
void forward_last_queries(const MixerSpec& spec, const MixerShape& shape, const cpu::HeadJob& job) {
  const size_t queries = job.length - job.first_query;
  const SpanLayout of_queries(shape, queries, false), of_keys(shape, std::min(kSection, job.length), false);
  const auto q = of_queries.qk_matrix();
  const auto k = of_keys.qk_matrix(), k_tiles = of_keys.qk_tiles(), v = of_keys.v_matrix();
  const Gathered gathered(of_queries);
  Span span = of_queries.span(job.length);
  span.first_query = job.first_query;
  of_queries.pack_qk(job.q, 0, queries, shape.scale, q.data());
  span.q = q.data();
  span.k_tiles = k_tiles.data();
  span.v = v.data();
  span.polynomial = polynomial_of(spec);
  span.window = static_cast<size_t>(spec.window);
  cpu::Scratch<double> decay;
  if (kMask != Mask::kCausal) {
    // A power of two: the prompt that is read in chunks, each a little longer, uses this memory again.
    decay = cpu::Scratch<double>(std::bit_ceil(job.length + kRows));
    accumulate_decay(job, 0, job.length, decay.data());
    span.decay = decay.data();
  }
  gathered.begin(of_queries, queries, span);
  for (size_t first = span.first_key(job.first_query) / kTile * kTile; first < job.length; first += kSection) {
    const size_t count = std::min(kSection, job.length - first);
    span.keys_begin = first;
    span.keys_end = first + count;
    pack_rows(job.k, first, count, of_keys.qk_dim, 1.0f, k.data(), of_keys.qk_ld);
    pack_rows(job.v, first, count, of_keys.v_dim, 1.0f, v.data(), of_keys.v_ld);
    transpose_tiles(k.data(), of_keys.qk_ld, count, of_keys.qk_dim, k_tiles.data());
    scores_forward<kKind, kMask>(span);
  }
  gathered.end<kKind>(of_queries, spec, 0, queries, job);
}

void forward_call(const MixerCall& call) {
  with_kind(call.spec, [&]<Kind kKind, Mask kMask>() {
    cpu::for_each_job(call, [&](int64_t index) {
      const cpu::HeadJob job = cpu::forward_job(call, index);
      if (job.first_query > 0)
        forward_last_queries<kKind, kMask>(call.spec, call.shape, job);
      else
        forward_head<kKind, kMask>(call.spec, call.shape, job);
    });
  });
}

// The rows of head `head` in a part of the pages of a slot, whose addresses are in `starts`.
cpu::HeadRows rows_of_pages(const Tensor& part, int64_t head, const MixerShape& shape,
                            const std::vector<const float*>& starts) {
  cpu::HeadRows rows;
  rows.stride = part.stride(1);
  rows.pages = starts.data();
  rows.page_rows = CachePage::kTokens;
  rows.page_offset = head / (shape.heads / part.size(0)) * part.stride(0);
  return rows;
}

void forward_pages(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& q,
                   const Tensor& out) {
  const auto starts_of = [&](Tensor CachePage::*part) {
    std::vector<const float*> starts;
    for (const CachePage& page : slot.pages) starts.push_back((page.*part).data<float>());
    return starts;
  };
  const auto k = starts_of(&CachePage::k), v = starts_of(&CachePage::v);
  const auto decays = spec.decay ? starts_of(&CachePage::log_decay) : std::vector<const float*>();
  const int64_t queries = q.size(1), work = queries * slot.pending * shape.heads * (shape.qk_dim + shape.v_dim);
  with_kind(spec, [&]<Kind kKind, Mask kMask>() {
    cpu::for_each_head(shape.heads, (queries + kBlock - 1) / kBlock, work, [&](int64_t head) {
      const CachePage& page = slot.pages.front();
      cpu::HeadJob job;
      job.length = static_cast<size_t>(slot.pending);
      job.first_query = static_cast<size_t>(slot.pending - queries);
      job.q = cpu::HeadRows(q, 0, 0, head, shape.heads);
      job.k = rows_of_pages(page.k, head, shape, k);
      job.v = rows_of_pages(page.v, head, shape, v);
      job.out = cpu::HeadRows(out, 0, 0, head, shape.heads);
      if (spec.decay) job.log_decay = rows_of_pages(page.log_decay, head, shape, decays);
      forward_last_queries<kKind, kMask>(spec, shape, job);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious {

HWY_EXPORT(forward_call);
HWY_EXPORT(forward_pages);

void cpu::mixer_forward(const MixerCall& call) {
  HWY_DYNAMIC_DISPATCH(forward_call)(call);
}

void cpu::cache_read(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& q,
                     const Tensor& out) {
  HWY_DYNAMIC_DISPATCH(forward_pages)(spec, shape, slot, q, out);
}

}  // namespace furious
#endif
