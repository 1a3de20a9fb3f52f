// The forward pass of the parallel and the chunked form. The parallel form is the chunked one with a single chunk.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mixer/cpu/forward_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again.
#include <limits>
#include <optional>

#include "hwy/highway.h"
#include "ops/mixer/cpu/head-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

template <Kind kKind, Mask kMask>
void forward_head(const MixerSpec& spec, const MixerShape& shape, const cpu::HeadJob& job) {
  const bool sum_norm = spec.norm == Norm::sum;
  const bool has_state = shape.state_rows > 0 && (job.chunk < job.length || job.initial_state || job.final_state);
  const SpanLayout layout(shape, job.chunk, has_state);
  const auto q = layout.qk_matrix(), k = layout.qk_matrix(), k_tiles = layout.qk_tiles();
  const auto v = layout.v_matrix(), y = layout.v_matrix();
  const auto sum = layout.per_row(), maximum = layout.per_row(), factor = layout.per_row();
  const auto decay = layout.decays();
  const auto columns = static_cast<size_t>(shape.state_columns);

  std::optional<HeadState> state;
  if (has_state) state.emplace(shape);
  bool has_past = job.initial_state != nullptr;
  if (has_past) state->load(job.initial_state, columns);

  for (size_t first = 0; first < job.length; first += job.chunk) {
    const size_t length = std::min(job.chunk, job.length - first);
    const size_t queries = length - job.first_query;  // with a first query there is one chunk
    Span span = layout.span(length);
    span.first_query = job.first_query;
    layout.pack_qk(job.q, first, queries, shape.scale, q.data());
    layout.pack_qk(job.k, first, length, 1.0f, k.data());
    pack_rows(job.v, first, length, layout.v_dim, 1.0f, v.data(), layout.v_ld);
    transpose_tiles(k.data(), layout.qk_ld, length, layout.qk_dim, k_tiles.data());
    span.q = q.data();
    span.k_tiles = k_tiles.data();
    span.v = v.data();
    span.y = y.data();
    span.sum = sum.data();
    span.maximum = maximum.data();
    span.polynomial = polynomial_of(spec);
    span.window = static_cast<size_t>(spec.window);
    if (kMask != Mask::kCausal) {
      accumulate_decay(job, first, length, decay.data());
      span.decay = decay.data();
    }
    const size_t rows = round_up(queries, kRows);
    std::fill(y.data(), y.data() + rows * layout.v_ld, 0.0f);
    std::fill(sum.data(), sum.data() + rows, 0.0f);
    std::fill(maximum.data(), maximum.data() + rows, -std::numeric_limits<float>::infinity());

    if (has_past) {
      const size_t reached = decay_from_start(span.decay, length, factor.data());
      state_read(*state, q.data(), layout.qk_ld, reached, y.data(), sum_norm ? sum.data() : nullptr);
      scale_rows(y.data(), layout.v_ld, reached, factor.data());
      for (size_t t = 0; t < reached; ++t) sum.data()[t] *= factor.data()[t];
    }
    scores_forward<kKind, kMask>(span);

    if (sum_norm) {
      for (size_t t = 0; t < queries; ++t) factor.data()[t] = reciprocal_of<kKind>(sum.data()[t]);
      scale_rows(y.data(), layout.v_ld, queries, factor.data());
      std::copy(sum.data(), sum.data() + queries, job.normalizer + first);
      if (kKind == Kind::kSoftmax) std::copy(maximum.data(), maximum.data() + queries, job.maximum + first);
    }
    unpack_rows(y.data(), layout.v_ld, first, queries, layout.v_dim, 1.0f, job.out);

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

void forward_call(const MixerCall& call) {
  with_kind(call.spec, [&]<Kind kKind, Mask kMask>() {
    cpu::for_each_job(
        call, [&](int64_t index) { forward_head<kKind, kMask>(call.spec, call.shape, cpu::forward_job(call, index)); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious {

HWY_EXPORT(forward_call);

void cpu::mixer_forward(const MixerCall& call) {
  HWY_DYNAMIC_DISPATCH(forward_call)(call);
}

}  // namespace furious
#endif
