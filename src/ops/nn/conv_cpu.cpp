#include "ops/nn/conv_kernels.h"

#include <optional>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/nn/conv_cpu.cpp"
#include <hwy/foreach_target.h>

#include "ops/block_sum.h"
#include "ops/nn/activation-inl.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {
namespace {

// Tokens that are worked on together: all of them for one vector of channels, then all for the next, so that taps and
// the window stay in registers. Rows often lie a multiple of 4 KiB apart and then share one set of the L1 cache, which
// speaks for few; the backward pass computes kWindow - 1 tokens twice per tile, which speaks for more.
constexpr int64_t kForwardTile = 8;
constexpr int64_t kBackwardTile = 16;
constexpr int64_t kLargestWindow = 4;

// Rows of a [batch, length, channels] tensor by row and token.
struct TokenRows {
  explicit TokenRows(const Tensor& tensor)
      : data(tensor.data<float>()), batch_stride(tensor.stride(0)), token_stride(tensor.stride(1)) {}
  float* at(int64_t batch, int64_t token) const { return data + batch * batch_stride + token * token_stride; }

  float* data;
  int64_t batch_stride;
  int64_t token_stride;
};

// The taps of one vector of channels out of weight [channels, kWindow].
template <int kWindow>
HWY_INLINE void load_taps(WholeVector, const float* weight, FloatVector* taps) {
  if constexpr (kWindow == 2) hn::LoadInterleaved2(kTag, weight, taps[0], taps[1]);
  if constexpr (kWindow == 3) hn::LoadInterleaved3(kTag, weight, taps[0], taps[1], taps[2]);
  if constexpr (kWindow == 4) hn::LoadInterleaved4(kTag, weight, taps[0], taps[1], taps[2], taps[3]);
}

template <int kWindow>
HWY_INLINE void load_taps(PartialVector part, const float* weight, FloatVector* taps) {
  float padded[kLanes * kWindow] = {};
  std::memcpy(padded, weight, part.count * kWindow * sizeof(float));
  load_taps<kWindow>(WholeVector(), padded, taps);
}

template <int kWindow>
HWY_INLINE FloatVector convolve(const FloatVector* taps, const FloatVector* window, FloatVector bias) {
  FloatVector sum = bias;
  for (int s = 0; s < kWindow; ++s) sum = hn::MulAdd(taps[s], window[s], sum);
  return sum;
}

template <int kWindow>
HWY_INLINE void push(FloatVector* window, FloatVector newest) {
  for (int s = 0; s + 1 < kWindow; ++s) window[s] = window[s + 1];
  window[kWindow - 1] = newest;
}

// Leaves room for one push: window[1..] are the inputs before token 0. No row stands for zeros.
template <int kWindow, class Memory>
HWY_INLINE void load_past(Memory memory, const float* const* x, int64_t channel, FloatVector* window) {
  window[0] = hn::Zero(kTag);
  for (int s = 0; s + 1 < kWindow; ++s) window[s + 1] = x[s] ? memory.load(x[s] + channel) : hn::Zero(kTag);
}

// y[i] for i < count from the rows x[i] ... x[i + kWindow - 1].
template <int kWindow, Activation kActivation>
void forward_tile(float* const* y, const float* const* x, int64_t count, const float* weight, const float* bias,
                  int64_t channels) {
  for_each_vector(channels, [&](int64_t channel, auto memory) HWY_ATTR {
    FloatVector taps[kWindow];
    FloatVector window[kWindow];
    load_taps<kWindow>(memory, weight + channel * kWindow, taps);
    load_past<kWindow>(memory, x, channel, window);
    const FloatVector offset = memory.load(bias + channel);
    for (int64_t i = 0; i < count; ++i) {
      push<kWindow>(window, memory.load(x[i + kWindow - 1] + channel));
      memory.store(activate<kActivation>(convolve<kWindow>(taps, window, offset)), y[i] + channel);
    }
  });
}

// What the gradient of one tile of tokens is made of. dx[i] for i < count needs dy of the kWindow - 1 tokens behind it
// too; those that the document does not have count as zero (`known` is how many there are). dy[i] belongs to
// x[i + kWindow - 1].
struct BackwardTile {
  float* dx[kBackwardTile];
  const float* dy[kBackwardTile + kLargestWindow - 1];
  const float* x[kBackwardTile + 2 * (kLargestWindow - 1)];
  int64_t count = 0;
  int64_t known = 0;
};

template <int kWindow>
HWY_INLINE FloatVector convolve_reversed(const FloatVector* taps, const FloatVector* window) {
  FloatVector sum = hn::Mul(taps[kWindow - 1], window[0]);
  for (int s = 1; s < kWindow; ++s) sum = hn::MulAdd(taps[kWindow - 1 - s], window[s], sum);
  return sum;
}

// Adds to sums: kWindow rows of dweight (transposed), then dbias.
template <int kWindow, Activation kActivation>
void backward_tile(const BackwardTile& tile, const float* weight, const float* bias, int64_t channels, float* sums) {
  for_each_vector(channels, [&](int64_t channel, auto memory) HWY_ATTR {
    FloatVector taps[kWindow];
    FloatVector window[kWindow];
    FloatVector dpre_window[kWindow];
    FloatVector dtaps[kWindow];
    load_taps<kWindow>(memory, weight + channel * kWindow, taps);
    load_past<kWindow>(memory, tile.x, channel, window);
    for (int s = 0; s < kWindow; ++s) {
      dpre_window[s] = hn::Zero(kTag);
      dtaps[s] = memory.load(sums + s * channels + channel);
    }
    const FloatVector offset = memory.load(bias + channel);
    FloatVector dbias = memory.load(sums + kWindow * channels + channel);
    for (int64_t i = 0; i < tile.count + kWindow - 1; ++i) {
      FloatVector dpre = hn::Zero(kTag);
      if (i < tile.known) {
        push<kWindow>(window, memory.load(tile.x[i + kWindow - 1] + channel));
        dpre = activation_gradient<kActivation>(convolve<kWindow>(taps, window, offset),
                                                memory.load(tile.dy[i] + channel));
      }
      if (i < tile.count) {
        for (int s = 0; s < kWindow; ++s) dtaps[s] = hn::MulAdd(dpre, window[s], dtaps[s]);
        dbias = hn::Add(dbias, dpre);
      }
      push<kWindow>(dpre_window, dpre);
      if (i >= kWindow - 1)
        memory.store(convolve_reversed<kWindow>(taps, dpre_window), tile.dx[i - (kWindow - 1)] + channel);
    }
    for (int s = 0; s < kWindow; ++s) memory.store(dtaps[s], sums + s * channels + channel);
    memory.store(dbias, sums + kWindow * channels + channel);
  });
}

// The row of inputs at a token of a segment, which may lie before its start: in the state, or nowhere.
const float* input_row(const TokenRows& x, const TokenRows* state, int64_t past, const Segment& segment,
                       int64_t token) {
  if (token >= segment.begin) return x.at(segment.batch, token);
  if (state && segment.begin == 0) return state->at(segment.batch, past + token);
  return nullptr;
}

template <class Body>
void for_each_tile(int64_t begin, int64_t end, int64_t size, Body&& body) {
  for (int64_t token = begin; token < end; token += size) body(token, std::min(size, end - token));
}

template <int kWindow, Activation kActivation>
void forward(const Tensor& y_tensor, const Tensor& x_tensor, const Tensor& weight, const Tensor& bias,
             std::span<const Segment> segments, const TokenRows* state) {
  const TokenRows y(y_tensor);
  const TokenRows x(x_tensor);
  const int64_t length = x_tensor.size(1);
  const int64_t channels = x_tensor.size(2);
  const auto tile = [&](const Segment& segment, int64_t token, int64_t count) {
    float* to[kForwardTile];
    const float* from[kForwardTile + kWindow - 1];
    for (int64_t i = 0; i < count; ++i) to[i] = y.at(segment.batch, token + i);
    for (int64_t i = 0; i < count + kWindow - 1; ++i)
      from[i] = input_row(x, state, kWindow - 1, segment, token + i - (kWindow - 1));
    forward_tile<kWindow, kActivation>(to, from, count, weight.data<float>(), bias.data<float>(), channels);
  };
  parallel_rows(x_tensor.size(0) * length, channels, [&](int64_t first, int64_t last) {
    for_each_piece(segments, length, first, last, [&](const Segment& segment, int64_t begin, int64_t end) {
      for_each_tile(begin, end, kForwardTile, [&](int64_t token, int64_t count) { tile(segment, token, count); });
    });
  });
}

void write_parameter_gradients(const ConvGradients& out, const BlockSum& sum, int64_t window, int64_t channels) {
  const Tensor totals = Tensor::empty({window + 1, channels}, DType::f32);
  sum.write(totals);
  const float* const from = totals.data<float>();
  float* const dweight = out.weight.data<float>();
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t s = 0; s < window; ++s) dweight[c * window + s] = from[s * channels + c];
  std::copy_n(from + window * channels, channels, out.bias.data<float>());
}

template <int kWindow, Activation kActivation>
void backward(const ConvGradients& out, const Tensor& dy_tensor, const Tensor& x_tensor, const Tensor& weight,
              const Tensor& bias, std::span<const Segment> segments) {
  const TokenRows dx(out.x);
  const TokenRows dy(dy_tensor);
  const TokenRows x(x_tensor);
  const int64_t length = x_tensor.size(1);
  const int64_t channels = x_tensor.size(2);
  const auto make_tile = [&](const Segment& segment, int64_t token, int64_t count) {
    BackwardTile tile;
    tile.count = count;
    tile.known = std::min(count + kWindow - 1, segment.end - token);
    for (int64_t i = 0; i < count; ++i) tile.dx[i] = dx.at(segment.batch, token + i);
    for (int64_t i = 0; i < tile.known; ++i) tile.dy[i] = dy.at(segment.batch, token + i);
    for (int64_t i = 0; i < tile.known + kWindow - 1; ++i)
      tile.x[i] = input_row(x, nullptr, kWindow - 1, segment, token + i - (kWindow - 1));
    return tile;
  };
  const BlockSum sum(x_tensor.size(0) * length, (kWindow + 1) * channels);
  sum.run([&](int64_t first, int64_t last, float* sums) {
    for_each_piece(segments, length, first, last, [&](const Segment& segment, int64_t begin, int64_t end) {
      for_each_tile(begin, end, kBackwardTile, [&](int64_t token, int64_t count) {
        backward_tile<kWindow, kActivation>(make_tile(segment, token, count), weight.data<float>(), bias.data<float>(),
                                            channels, sums);
      });
    });
  });
  write_parameter_gradients(out, sum, kWindow, channels);
}

template <int kWindow, Activation kActivation>
void step(const Tensor& y, const Tensor& state_tensor, const Tensor& slots, const Tensor& x, const Tensor& weight,
          const Tensor& bias) {
  const TokenRows state(state_tensor);
  const int64_t channels = x.size(1);
  parallel_rows(x.size(0), channels, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int32_t slot = slots.data<int32_t>()[row];
      const float* from[kWindow];
      float* const to = y.data<float>() + row * channels;
      for (int s = 0; s + 1 < kWindow; ++s) from[s] = state.at(slot, s);
      from[kWindow - 1] = x.data<float>() + row * x.stride(0);
      forward_tile<kWindow, kActivation>(&to, from, 1, weight.data<float>(), bias.data<float>(), channels);
      for (int s = 0; s + 1 < kWindow; ++s) std::copy_n(from[s + 1], channels, state.at(slot, s));
    }
  });
}

// Calls f with window and activation as compile-time constants.
template <class F>
void with_spec(int64_t window, Activation activation, F&& f) {
  const auto with_window = [&](auto kind) {
    if (window == 2) f(std::integral_constant<int, 2>(), kind);
    if (window == 3) f(std::integral_constant<int, 3>(), kind);
    if (window == 4) f(std::integral_constant<int, 4>(), kind);
  };
  if (activation == Activation::none) with_window(std::integral_constant<Activation, Activation::none>());
  if (activation == Activation::relu) with_window(std::integral_constant<Activation, Activation::relu>());
  if (activation == Activation::silu) with_window(std::integral_constant<Activation, Activation::silu>());
}

}  // namespace

void conv_forward(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation,
                  std::span<const Segment> segments, const Tensor& state) {
  const std::optional<TokenRows> past = state ? std::optional<TokenRows>(state) : std::nullopt;
  with_spec(weight.size(1), activation, [&](auto window, auto kind) {
    forward<window, kind>(y, x, weight, bias, segments, past ? &*past : nullptr);
  });
}

void conv_step(const Tensor& y, const Tensor& state, const Tensor& slots, const Tensor& x, const Tensor& weight,
               const Tensor& bias, Activation activation) {
  with_spec(weight.size(1), activation,
            [&](auto window, auto kind) { step<window, kind>(y, state, slots, x, weight, bias); });
}

void conv_backward(const ConvGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& bias, Activation activation, std::span<const Segment> segments) {
  with_spec(weight.size(1), activation,
            [&](auto window, auto kind) { backward<window, kind>(out, dy, x, weight, bias, segments); });
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious::cpu {

HWY_EXPORT(conv_forward);
HWY_EXPORT(conv_step);
HWY_EXPORT(conv_backward);

void conv_forward(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation,
                  std::span<const Segment> segments, const Tensor& state) {
  HWY_DYNAMIC_DISPATCH(conv_forward)(y, x, weight, bias, activation, segments, state);
}

void conv_step(const Tensor& y, const Tensor& state, const Tensor& slots, const Tensor& x, const Tensor& weight,
               const Tensor& bias, Activation activation) {
  HWY_DYNAMIC_DISPATCH(conv_step)(y, state, slots, x, weight, bias, activation);
}

void conv_backward(const ConvGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& bias, Activation activation, std::span<const Segment> segments) {
  HWY_DYNAMIC_DISPATCH(conv_backward)(out, dy, x, weight, bias, activation, segments);
}

}  // namespace furious::cpu
#endif
