// One document of one head as a row of spans: what the forward and the backward pass over it share.

#if defined(FURIOUS_OPS_MIXER_HEAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_MIXER_HEAD_INL_H_
#undef FURIOUS_OPS_MIXER_HEAD_INL_H_
#else
#define FURIOUS_OPS_MIXER_HEAD_INL_H_
#endif

#include <cmath>

#include "ops/mixer/cpu/head_job.h"
#include "ops/mixer/cpu/scores-inl.h"
#include "ops/mixer/cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

// Calls f.template operator()<kind, mask>() for the spec.
template <class F>
void with_kind(const MixerSpec& spec, F&& f) {
  const auto with_mask = [&]<Kind kKind>() {
    if constexpr (kHasSignedMask<kKind>)
      if (spec.signed_decay) return f.template operator()<kKind, Mask::kSigned>();
    if (spec.decay) return f.template operator()<kKind, Mask::kDecay>();
    f.template operator()<kKind, Mask::kCausal>();
  };
  if (spec.score == Score::exponential)
    return spec.norm == Norm::sum ? with_mask.template operator()<Kind::kSoftmax>()
                                  : with_mask.template operator()<Kind::kExponential>();
  if (spec.score == Score::linear && !spec.signed_decay) return with_mask.template operator()<Kind::kLinear>();
  if (spec.score == Score::squared && !spec.signed_decay) return with_mask.template operator()<Kind::kSquared>();
  with_mask.template operator()<Kind::kPolynomial>();
}

// The sizes of a span's packed matrices and the memory they take.
struct SpanLayout {
  size_t chunk, qk_dim, v_dim;
  bool one;  // queries and keys are followed by a 1, which the features of a series count as an element
  size_t qk_ld, v_ld, rows;

  SpanLayout(const MixerShape& shape, size_t chunk_length, bool has_state)
      : chunk(chunk_length),
        qk_dim(static_cast<size_t>(shape.qk_dim)),
        v_dim(static_cast<size_t>(shape.v_dim)),
        one(has_state && shape.features.one),
        qk_ld(round_up(qk_dim + (one ? 1 : 0), kPad)),
        v_ld(round_up(v_dim, kPad)),
        rows(round_up(chunk, kRows)) {}

  // One vector of slack: expand() reads whole vectors from inside the last row.
  cpu::Scratch<float> qk_matrix() const { return cpu::Scratch<float>(rows * qk_ld + kPad); }
  cpu::Scratch<float> v_matrix() const { return cpu::Scratch<float>(rows * v_ld + kPad); }
  cpu::Scratch<float> qk_tiles() const { return cpu::Scratch<float>(round_up(chunk, kTile) * qk_dim); }
  cpu::Scratch<float> v_tiles() const { return cpu::Scratch<float>(round_up(chunk, kTile) * v_dim); }
  cpu::Scratch<float> per_row() const { return cpu::Scratch<float>(round_up(rows, kTile) + kPad); }
  cpu::Scratch<double> terms() const { return cpu::Scratch<double>(round_up(rows, kTile) + kPad); }
  cpu::Scratch<double> decays() const { return cpu::Scratch<double>(rows + kRows); }

  void pack_qk(const cpu::HeadRows& in, size_t first, size_t length, float factor, float* out) const {
    pack_rows(in, first, length, qk_dim, factor, out, qk_ld);
    set_ones(length, out);
  }
  void set_ones(size_t length, float* matrix) const {
    for (size_t t = 0; one && t < length; ++t) matrix[t * qk_ld + qk_dim] = 1;
  }

  Span span(size_t length) const {
    Span span;
    span.length = span.keys_end = length;
    span.qk_dim = qk_dim;
    span.v_dim = v_dim;
    span.qk_ld = qk_ld;
    span.v_ld = v_ld;
    return span;
  }
};

// A_t for the tokens [first, first + length) of a job, summed from `first`; padding, as long as a strip that begins
// with the last token, repeats the last.
inline void accumulate_decay(const cpu::HeadJob& job, size_t first, size_t length, double* out) {
  double sum = 0;
  for (size_t t = 0; t < length; ++t) {
    sum += static_cast<double>(*job.log_decay.row<float>(first + t));
    out[t] = sum;
  }
  std::fill(out + length, out + length + kRows, sum);
}

// exp(A_t): how much of the state before a span reaches its tokens. Returns how many tokens it reaches at all.
inline size_t decay_from_start(const double* decay, size_t length, float* out) {
  if (decay == nullptr) {
    std::fill(out, out + length, 1.0f);
    return length;
  }
  size_t reached = 0;
  while (reached < length && !(decay[reached] < kErased)) ++reached;
  for (size_t t = 0; t < length; ++t) out[t] = t < reached ? static_cast<float>(std::exp(decay[t])) : 0.0f;
  return reached;
}

// exp(A_end − A_t): how much of each token reaches the state after a span. Returns the first token that does at all.
inline size_t decay_to_end(const double* decay, size_t length, float* out) {
  if (decay == nullptr) {
    std::fill(out, out + length, 1.0f);
    return 0;
  }
  size_t first = length;
  while (first > 0 && !(decay[length - 1] - decay[first - 1] < kErased)) --first;
  for (size_t t = 0; t < length; ++t)
    out[t] = t < first ? 0.0f : static_cast<float>(std::exp(decay[length - 1] - decay[t]));
  return first;
}

inline float decay_of_span(const double* decay, size_t length) {
  return decay == nullptr ? 1.0f : static_cast<float>(std::exp(decay[length - 1]));
}

// row t of a packed matrix *= factor[t].
inline HWY_ATTR void scale_rows(float* matrix, size_t ld, size_t rows, const float* factor) {
  for (size_t t = 0; t < rows; ++t) {
    const FloatVector by = hn::Set(kTag, factor[t]);
    for (size_t c = 0; c < ld; c += kLanes)
      hn::StoreU(hn::Mul(by, hn::LoadU(kTag, matrix + t * ld + c)), kTag, matrix + t * ld + c);
  }
}

// 1/n, or 0 where n is too small. Squares and exponentials sum to a negative n by rounding only.
template <Kind kKind>
inline float reciprocal_of(float normalizer) {
  const float size = kKind == Kind::kLinear || kKind == Kind::kPolynomial ? std::fabs(normalizer) : normalizer;
  return size < kSmallestNormalizer ? 0.0f : 1.0f / normalizer;
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#endif
