// The backward pass of the parallel and the chunked form (math.md's formulas; the parallel form is one chunk).
//
// The state before a span and the gradient of the state after it are needed at different times, and both are too large
// to keep per chunk. So there are two sweeps: forwards with the state, for what the past gives to dq; backwards with
// the state's gradient, for dk and dv and all that happens inside the spans.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mixer/cpu/backward_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again.
#include <optional>

#include "hwy/highway.h"
#include "ops/elementwise.h"
#include "ops/mixer/cpu/head-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

template <Kind kKind, Mask kMask>
class BackwardHead {
 public:
  BackwardHead(const MixerSpec& spec, const MixerShape& shape, const cpu::HeadJob& job)
      : shape_(shape),
        job_(job),
        sum_norm_(spec.norm == Norm::sum),
        polynomial_(polynomial_of(spec)),
        window_(static_cast<size_t>(spec.window)),
        has_state_(shape.state_rows > 0 && (job.chunk < job.length || job.initial_state || job.initial_state_gradient ||
                                            job.final_state_gradient)),
        layout_(shape, job.chunk, has_state_) {}

  void run() {
    if (has_state_ && (job_.chunk < job_.length || job_.initial_state)) forward_sweep();
    backward_sweep();
    if (kDecay) write_decay_gradient();
  }

 private:
  static constexpr bool kDecay = kMask != Mask::kCausal;

  size_t length_of(size_t first) const { return std::min(job_.chunk, job_.length - first); }

  // q, g, δ, 1/n and A of the span that starts at `first`.
  void load_queries(size_t first, size_t length) {
    layout_.pack_qk(job_.q, first, length, shape_.scale, q_.data());
    pack_rows(job_.out_gradient, first, length, layout_.v_dim, 1.0f, g_.data(), layout_.v_ld);
    pack_rows(job_.out, first, length, layout_.v_dim, 1.0f, y_.data(), layout_.v_ld);
    const size_t rows = round_up(length, kRows);
    for (size_t t = 0; t < rows; ++t) {
      const bool inside = t < length;
      reciprocal_.data()[t] = !inside ? 0.0f : sum_norm_ ? reciprocal_of<kKind>(job_.normalizer[first + t]) : 1.0f;
      maximum_.data()[t] = inside && kKind == Kind::kSoftmax ? job_.maximum[first + t] : 0.0f;
      minus_delta_.data()[t] =
          inside && sum_norm_ ? -dot(g_.data() + t * layout_.v_ld, y_.data() + t * layout_.v_ld, layout_.v_ld) : 0.0f;
      delta_.data()[t] = -minus_delta_.data()[t];
    }
    if (kDecay) accumulate_decay(job_, first, length, decay_.data());
  }

  void load_keys(size_t first, size_t length) {
    layout_.pack_qk(job_.k, first, length, 1.0f, k_.data());
    pack_rows(job_.v, first, length, layout_.v_dim, 1.0f, v_.data(), layout_.v_ld);
  }

  const double* decay() const { return kDecay ? decay_.data() : nullptr; }

  // dq of what came through the state, into past_dq_.
  void forward_sweep() {
    past_dq_ = cpu::Scratch<float>::zeros((job_.length + kRows) * layout_.qk_ld);
    HeadState state(shape_);
    if (job_.initial_state) state.load(job_.initial_state, static_cast<size_t>(shape_.state_columns));
    for (size_t first = 0; first < job_.length; first += job_.chunk) {
      const size_t length = length_of(first);
      load_queries(first, length);
      if (first > 0 || job_.initial_state) {
        const size_t reached = decay_from_start(decay(), length, factor_.data());
        for (size_t t = 0; t < reached; ++t) factor_.data()[t] *= reciprocal_.data()[t];
        state_chain(state, q_.data(), layout_.qk_ld, reached, g_.data(), sum_norm_ ? minus_delta_.data() : nullptr,
                    factor_.data(), past_dq_.data() + first * layout_.qk_ld);
      }
      if (first + length < job_.length) {
        load_keys(first, length);
        const size_t from = decay_to_end(decay(), length, factor_.data());
        scale_rows(v_.data(), layout_.v_ld, length, factor_.data());
        state_update(state, decay_of_span(decay(), length), k_.data() + from * layout_.qk_ld, layout_.qk_ld,
                     length - from, v_.data() + from * layout_.v_ld, sum_norm_ ? factor_.data() + from : nullptr);
      }
    }
  }

  void backward_sweep() {
    std::optional<HeadState> gradient;  // of the state after the span
    if (has_state_) gradient.emplace(shape_);
    if (gradient) future_dk_ = layout_.qk_matrix();
    bool has_future = job_.final_state_gradient != nullptr;
    const auto columns = static_cast<size_t>(shape_.state_columns);
    if (has_future) gradient->load(job_.final_state_gradient, columns);
    for (size_t last = job_.length; last > 0;) {
      const size_t first = (last - 1) / job_.chunk * job_.chunk;
      const size_t length = last - first;
      load_queries(first, length);
      load_keys(first, length);
      backward_span(first, length);
      if (has_future) from_future(*gradient, length);
      write_span(first, length, has_future);
      if (gradient && (first > 0 || job_.initial_state_gradient)) {
        to_past(*gradient, length);
        has_future = true;
      }
      last = first;
    }
    if (job_.initial_state_gradient) gradient->store(job_.initial_state_gradient, columns);
  }

  // Everything inside the span; dq starts from what the past gave.
  void backward_span(size_t first, size_t length) {
    const size_t rows = round_up(length, kRows);
    transpose_tiles(k_.data(), layout_.qk_ld, length, layout_.qk_dim, k_tiles_.data());
    transpose_tiles(v_.data(), layout_.v_ld, length, layout_.v_dim, v_tiles_.data());
    std::fill(dq_.data(), dq_.data() + rows * layout_.qk_ld, 0.0f);
    if (past_dq_.data() != nullptr)
      std::copy_n(past_dq_.data() + first * layout_.qk_ld, length * layout_.qk_ld, dq_.data());
    std::fill(dk_.data(), dk_.data() + rows * layout_.qk_ld, 0.0f);
    std::fill(dv_.data(), dv_.data() + rows * layout_.v_ld, 0.0f);
    if (kDecay) std::fill(row_term_.data(), row_term_.data() + rows, 0.0);
    if (kDecay) std::fill(column_term_.data(), column_term_.data() + round_up(rows, kTile) + kPad, 0.0);
    Span span = layout_.span(length);
    span.q = q_.data();
    span.k = k_.data();
    span.v = v_.data();
    span.g = g_.data();
    span.k_tiles = k_tiles_.data();
    span.v_tiles = v_tiles_.data();
    span.decay = decay();
    span.polynomial = polynomial_;
    span.window = window_;
    span.maximum = maximum_.data();
    span.delta = delta_.data();
    span.reciprocal = reciprocal_.data();
    span.dq = dq_.data();
    span.dk = dk_.data();
    span.dv = dv_.data();
    span.row_term = row_term_.data();
    span.column_term = column_term_.data();
    scores_backward<kKind, kMask>(span);
  }

  // dk and dv through the state after the span; dk also by itself, into future_dk_.
  void from_future(const HeadState& gradient, size_t length) {
    const size_t from = decay_to_end(decay(), length, factor_.data());
    const size_t reaching = length - from;
    const float* k = k_.data() + from * layout_.qk_ld;
    const float* v = v_.data() + from * layout_.v_ld;
    const float* factor = factor_.data() + from;
    std::fill(y_.data(), y_.data() + round_up(reaching, kRows) * layout_.v_ld, 0.0f);
    state_read(gradient, k, layout_.qk_ld, reaching, y_.data(), nullptr);
    scale_rows(y_.data(), layout_.v_ld, reaching, factor);
    float* dv = dv_.data() + from * layout_.v_ld;
    for (size_t i = 0; i < reaching * layout_.v_ld; ++i) dv[i] += y_.data()[i];
    std::fill(ones_.data(), ones_.data() + reaching, 1.0f);
    std::fill(future_dk_.data(), future_dk_.data() + length * layout_.qk_ld, 0.0f);
    state_chain(gradient, k, layout_.qk_ld, reaching, v, sum_norm_ ? ones_.data() : nullptr, factor,
                future_dk_.data() + from * layout_.qk_ld);
    for (size_t i = 0; i < length * layout_.qk_ld; ++i) dk_.data()[i] += future_dk_.data()[i];
  }

  // The gradient of the state before the span: decayed, plus what the span's queries read. 1/n goes to the query, an
  // equal part to each of its factors in φ: g/n alone may overflow. Its sign goes to g.
  void to_past(const HeadState& gradient, size_t length) {
    for (size_t t = 0; t < length; ++t) {
      const float r = std::fabs(reciprocal_.data()[t]);
      const int degree = shape_.features.degree;
      factor_.data()[t] = degree == 1 ? r : degree == 2 ? std::sqrt(r) : std::pow(r, 1 / static_cast<float>(degree));
    }
    scale_rows(q_.data(), layout_.qk_ld, length, factor_.data());
    const size_t reached = decay_from_start(decay(), length, factor_.data());
    for (size_t t = 0; t < reached; ++t)
      if (reciprocal_.data()[t] < 0) factor_.data()[t] = -factor_.data()[t];
    scale_rows(g_.data(), layout_.v_ld, reached, factor_.data());
    for (size_t t = 0; t < reached; ++t) minus_delta_.data()[t] *= factor_.data()[t];
    state_update(gradient, decay_of_span(decay(), length), q_.data(), layout_.qk_ld, reached, g_.data(),
                 sum_norm_ ? minus_delta_.data() : nullptr);
  }

  void write_span(size_t first, size_t length, bool has_future) {
    unpack_rows(dq_.data(), layout_.qk_ld, first, length, layout_.qk_dim, shape_.scale, job_.dq);
    unpack_rows(dk_.data(), layout_.qk_ld, first, length, layout_.qk_dim, 1.0f, job_.dk);
    unpack_rows(dv_.data(), layout_.v_ld, first, length, layout_.v_dim, 1.0f, job_.dv);
    if (!kDecay) return;
    for (size_t t = 0; t < length; ++t) {
      double term = row_term_.data()[t] - column_term_.data()[t];
      if (has_state_) {  // φ is homogeneous: x·∂/∂x of a weight is its degree times the weight
        const float *q = q_.data() + t * layout_.qk_ld, *k = k_.data() + t * layout_.qk_ld;
        const double degree = shape_.features.degree;
        if (past_dq_.data()) term += exact_dot(q, past_dq_.data() + (first + t) * layout_.qk_ld) / degree;
        if (has_future) term -= exact_dot(k, future_dk_.data() + t * layout_.qk_ld) / degree;
      }
      decay_gradient_.data()[first + t] = term;
    }
  }

  double exact_dot(const float* a, const float* b) const {
    double sum = 0;
    for (size_t c = 0; c < layout_.qk_ld; ++c) sum += static_cast<double>(a[c]) * static_cast<double>(b[c]);
    return sum;
  }

  // da_t = Σ_{s≥t} dA_s. The final state is decayed by all of A, so it adds to every token's.
  void write_decay_gradient() {
    double sum = 0;
    if (job_.final_state_gradient) {
      const size_t count = static_cast<size_t>(shape_.state_rows * shape_.state_columns);
      for (size_t i = 0; i < count; ++i)
        sum += static_cast<double>(job_.final_state[i]) * static_cast<double>(job_.final_state_gradient[i]);
    }
    for (size_t t = job_.length; t-- > 0;) {
      sum += decay_gradient_.data()[t];
      job_.log_decay_gradient[static_cast<int64_t>(t) * job_.log_decay_gradient_stride] = static_cast<float>(sum);
    }
  }

  const MixerShape& shape_;
  const cpu::HeadJob& job_;
  const bool sum_norm_;
  const Polynomial polynomial_;
  const size_t window_;
  const bool has_state_;
  const SpanLayout layout_;
  cpu::Scratch<float> past_dq_, future_dk_;
  const cpu::Scratch<float> q_ = layout_.qk_matrix(), k_ = layout_.qk_matrix(), k_tiles_ = layout_.qk_tiles();
  const cpu::Scratch<float> v_ = layout_.v_matrix(), v_tiles_ = layout_.v_tiles();
  const cpu::Scratch<float> g_ = layout_.v_matrix(), y_ = layout_.v_matrix();
  const cpu::Scratch<float> dq_ = layout_.qk_matrix(), dk_ = layout_.qk_matrix(), dv_ = layout_.v_matrix();
  const cpu::Scratch<float> delta_ = layout_.per_row(), minus_delta_ = layout_.per_row();
  const cpu::Scratch<float> reciprocal_ = layout_.per_row(), maximum_ = layout_.per_row();
  const cpu::Scratch<float> factor_ = layout_.per_row(), ones_ = layout_.per_row();
  const cpu::Scratch<double> row_term_ = layout_.terms(), column_term_ = layout_.terms();
  const cpu::Scratch<double> decay_ = layout_.decays();
  const cpu::Scratch<double> decay_gradient_ = cpu::Scratch<double>(job_.length);
};

void backward_call(const MixerCall& call, const cpu::BackwardTensors& tensors) {
  with_kind(call.spec, [&]<Kind kKind, Mask kMask>() {
    cpu::for_each_job(call, [&](int64_t index) {
      const cpu::HeadJob job = cpu::backward_job(call, index, tensors);
      BackwardHead<kKind, kMask>(call.spec, call.shape, job).run();
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious {
namespace cpu {
namespace {

// A tensor with a head for every head of the call: the output itself, or scratch that is summed into it later.
Tensor per_head(const Tensor& out, const MixerShape& shape) {
  if (out.size(2) == shape.heads) return out;
  return Tensor::empty({shape.batch, shape.length, shape.heads, out.size(3)}, DType::f32);
}

void sum_heads(const Tensor& from, const Tensor& out) {
  if (from.raw() == out.raw()) return;
  const int64_t group = from.size(2) / out.size(2);
  const int64_t dim = out.size(3);
  const Tensor total = Tensor::empty({out.size(0), out.size(1), out.size(2), dim}, DType::f32);
  parallel_ranges(out.size(0) * out.size(1) * out.size(2), 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* to = total.data<float>() + i * dim;
      const float* row = from.data<float>() + i * group * dim;
      std::copy(row, row + dim, to);
      for (int64_t h = 1; h < group; ++h)
        for (int64_t c = 0; c < dim; ++c) to[c] += row[h * dim + c];
    }
  });
  furious::copy(out, total);
}

}  // namespace
}  // namespace cpu

HWY_EXPORT(backward_call);

void cpu::mixer_backward(const MixerCall& call, const Tensor& out_gradient, const Tensor& final_state_gradient,
                         const MixerGradients& gradients) {
  BackwardTensors tensors{out_gradient, final_state_gradient, gradients};
  tensors.gradients.q = per_head(gradients.q, call.shape);
  tensors.gradients.k = per_head(gradients.k, call.shape);
  tensors.gradients.v = per_head(gradients.v, call.shape);
  HWY_DYNAMIC_DISPATCH(backward_call)(call, tensors);
  sum_heads(tensors.gradients.q, gradients.q);
  sum_heads(tensors.gradients.k, gradients.k);
  sum_heads(tensors.gradients.v, gradients.v);
}

}  // namespace furious
#endif
