#include "gpu/rows.cuh"
#include "ops/nn/activation.cuh"
#include "ops/nn/conv_kernels.h"

namespace furious::cuda {
namespace {

// A thread walks a run of tokens of a few channels with taps and window (W tokens) in registers, in groups of
// tokens: while it computes one, the next is on its way. A block is 32 threads across the channels and kDown runs.
constexpr int kDown = 8;
constexpr int kChannels = 4;

struct Sizes {
  int64_t batch;
  int length, channels, window;
  Activation activation;
  int run;

  __host__ __device__ int runs_per_row() const { return (length + run - 1) / run; }
  __host__ __device__ int64_t runs() const { return batch * runs_per_row(); }
};

// Where a thread works. It has nothing to do where `channel` or `run` is past the end.
template <int N>
struct Place {
  int channel, first;
  int64_t batch;
  bool active;

  __device__ explicit Place(const Sizes& sizes) {
    const int64_t run = static_cast<int64_t>(blockIdx.x) * kDown + threadIdx.y;
    channel = static_cast<int>(blockIdx.y * 32 + threadIdx.x) * N;
    batch = run / sizes.runs_per_row();
    first = static_cast<int>(run % sizes.runs_per_row()) * sizes.run;
    active = run < sizes.runs() && channel < sizes.channels;
  }
};

// Tokens of one run that follow each other: four, where registers have room for them. A window of four then moves by
// its whole length, which costs no instructions.
template <class T, int N>
struct Group {
  static constexpr int kSize = N * sizeof(T) > 8 ? 2 : 4;
  Pack<T, N> tokens[kSize];

  // Tokens from `end` on are left as they are.
  __device__ void load(const Tokens<T>& from, const Place<N>& place, int first, int end) {
    const T* at = from.at(place.batch, first) + place.channel;
#pragma unroll
    for (int j = 0; j < kSize; ++j, at += from.token_stride)
      if (first + j < end) tokens[j].fetch(at);
  }
};

template <int W, int N>
__device__ void load_taps(float (&taps)[W][N], const float* weight, int channel) {
#pragma unroll
  for (int s = 0; s < W; ++s)
#pragma unroll
    for (int i = 0; i < N; ++i) taps[s][i] = weight[static_cast<int64_t>(channel + i) * W + s];
}

template <int W, int N>
__device__ void clear(float (&values)[W][N]) {
#pragma unroll
  for (int s = 0; s < W; ++s)
#pragma unroll
    for (int i = 0; i < N; ++i) values[s][i] = 0;
}

template <int W, int N>
__device__ void push(float (&values)[W][N], const float (&newest)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int s = 0; s + 1 < W; ++s) values[s][i] = values[s + 1][i];
    values[W - 1][i] = newest[i];
  }
}

template <int W, int N>
__device__ void convolve(float (&sum)[N], const float (&taps)[W][N], const float (&values)[W][N],
                         const float (&bias)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = bias[i];
#pragma unroll
  for (int s = 0; s < W; ++s)
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = fmaf(taps[s][i], values[s][i], sum[i]);
}

// activate() and activation_gradient() for all of a thread's channels. Beside results of 16 bits, exponentials and
// reciprocals of 22 bits are exact.
template <class T, int N>
__device__ void activate_all(float (&values)[N], Activation activation) {
  const bool fast = sizeof(T) == 2 && activation == Activation::silu;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = fast ? values[i] * fast_sigmoid(values[i]) : activate(values[i], activation);
}
template <class T, int N>
__device__ void multiply_by_derivative(float (&gradient)[N], const float (&x)[N], Activation activation) {
  const bool fast = sizeof(T) == 2 && activation == Activation::silu;
#pragma unroll
  for (int i = 0; i < N; ++i)
    gradient[i] = fast ? gradient[i] * silu_derivative(x[i], fast_sigmoid(x[i]))
                       : activation_gradient(x[i], gradient[i], activation);
}

// Leaves room for one push: values[1..] are the inputs before the first token of a run, as far as its document or the
// state has them.
template <int W, int N, class T>
__device__ void load_past(float (&values)[W][N], const Tokens<T>& x, const float* state, const int32_t* positions,
                          const Place<N>& place, const Sizes& sizes) {
  clear(values);
  const int position = positions ? positions[place.batch * sizes.length + place.first] : place.first;
#pragma unroll
  for (int back = 1; back < W; ++back) {
    if (back <= position) {
      load(values[W - back], x.at(place.batch, place.first - back) + place.channel);
    } else if (state && position == place.first) {
      const int64_t row = place.batch * (W - 1) + W - 1 + place.first - back;
      load(values[W - back], state + row * sizes.channels + place.channel);
    }
  }
}

__device__ bool starts_document(const int32_t* positions, int64_t batch, int token, int length) {
  return positions && token > 0 && positions[batch * length + token] == 0;
}

template <class T, int N, int W, bool kPacked>
__global__ void __launch_bounds__(32 * kDown)
    forward_kernel(Tokens<T> y, Tokens<T> x, const float* weight, const float* bias, const float* state,
                   const int32_t* positions, Sizes sizes) {
  const Place<N> place(sizes);
  if (!place.active) return;
  float taps[W][N], values[W][N], offset[N];
  const int end = min(place.first + sizes.run, sizes.length);
  Group<T, N> now, next;
  now.load(x, place, place.first, end);
  load_taps(taps, weight, place.channel);
  load(offset, bias + place.channel);
  load_past(values, x, state, positions, place, sizes);
  T* to = y.at(place.batch, place.first) + place.channel;
  for (int group = place.first; group < end; group += now.kSize) {
    next.load(x, place, group + now.kSize, end);
#pragma unroll
    for (int j = 0; j < now.kSize; ++j, to += y.token_stride) {
      const int token = group + j;
      if (token >= end) break;
      if (kPacked && starts_document(positions, place.batch, token, sizes.length)) clear(values);
      float newest[N], sum[N];
      now.tokens[j].unpack(newest);
      push(values, newest);
      convolve(sum, taps, values, offset);
      activate_all<T>(sum, sizes.activation);
      store(to, sum);
    }
    now = next;
  }
}

// The token after the state of its slot; the state moves on by it.
template <class T, int W>
__global__ void step_kernel(T* y, float* state, const int32_t* slots, const T* x, int64_t x_stride, const float* weight,
                            const float* bias, Sizes sizes) {
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int64_t batch = blockIdx.y;
  if (channel >= sizes.channels) return;
  float taps[W][1], values[W][1], offset[1] = {bias[channel]}, newest[1], sum[1];
  load_taps(taps, weight, channel);
  float* const rows = state + static_cast<int64_t>(slots[batch]) * (W - 1) * sizes.channels + channel;
  values[0][0] = 0;
#pragma unroll
  for (int s = 1; s < W; ++s) values[s][0] = rows[static_cast<int64_t>(s - 1) * sizes.channels];
  newest[0] = to_float(x[batch * x_stride + channel]);
  push(values, newest);
  convolve(sum, taps, values, offset);
  y[batch * sizes.channels + channel] = from_float<T>(activate(sum[0], sizes.activation));
#pragma unroll
  for (int s = 1; s < W; ++s) rows[static_cast<int64_t>(s - 1) * sizes.channels] = values[s][0];
}

// dx of a run, and the run's share of dweight and dbias. pending[k] gathers dx of the token k before the current one;
// it is complete, and written, W − 1 tokens later.
template <class T, int N, int W, bool kPacked>
struct BackwardRun {
  static constexpr int kSize = Group<T, N>::kSize;
  float taps[W][N], offset[N], values[W][N], pending[W][N], dtaps[W][N], dbias[N];

  // The tokens of a group. kInside: all of them are of the run, and the token W − 1 before each too; else those behind
  // the run add to pending alone, and behind the last token of a row is nothing.
  template <bool kInside>
  __device__ void add(const Group<T, N>& tokens, const Group<T, N>& gradients, int first, T*& to, int64_t to_stride,
                      const Place<N>& place, const int32_t* positions, const Sizes& sizes) {
    const int end = min(place.first + sizes.run, sizes.length);
#pragma unroll
    for (int j = 0; j < kSize; ++j, to += to_stride) {
      const int token = first + j;
      float newest[N] = {}, dpre[N] = {};
      int position = W;
      if (kInside || token < sizes.length) {
        if constexpr (kPacked) position = positions[place.batch * sizes.length + token];
        tokens.tokens[j].unpack(newest);
        gradients.tokens[j].unpack(dpre);
      }
      if (kPacked && position == 0) clear(values);
      push(values, newest);
      if (sizes.activation != Activation::none) {
        float pre[N];
        convolve(pre, taps, values, offset);
        multiply_by_derivative<T>(dpre, pre, sizes.activation);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (kInside || token < end) {
          dbias[i] += dpre[i];
#pragma unroll
          for (int s = 0; s < W; ++s) dtaps[s][i] += dpre[i] * values[s][i];
        }
#pragma unroll
        for (int back = W - 1; back > 0; --back) pending[back][i] = pending[back - 1][i];
        pending[0][i] = 0;
#pragma unroll
        for (int back = 0; back < W; ++back)
          if (!kPacked || back <= position) pending[back][i] += taps[W - 1 - back][i] * dpre[i];
      }
      const int complete = token - (W - 1);
      if (kInside || (complete >= place.first && complete < end)) store(to, pending[W - 1]);
    }
  }

  __device__ void operator()(const Tokens<T>& dx, const Tokens<T>& dy, const Tokens<T>& x, const Place<N>& place,
                             const int32_t* positions, const Sizes& sizes) {
    const int end = min(place.first + sizes.run, sizes.length), behind = min(end + W - 1, sizes.length);
    Group<T, N> now, next, now_gradient, next_gradient;
    now.load(x, place, place.first, behind);
    now_gradient.load(dy, place, place.first, behind);
    load_past(values, x, nullptr, positions, place, sizes);
    clear(pending);
    T* to = dx.at(place.batch, place.first - (W - 1)) + place.channel;
    for (int group = place.first; group < end + W - 1; group += kSize) {
      next.load(x, place, group + kSize, behind);
      next_gradient.load(dy, place, group + kSize, behind);
      if (group - (W - 1) >= place.first && group + kSize <= end)
        add<true>(now, now_gradient, group, to, dx.token_stride, place, positions, sizes);
      else
        add<false>(now, now_gradient, group, to, dx.token_stride, place, positions, sizes);
      now = next;
      now_gradient = next_gradient;
    }
  }
};

// The block's share of dweight and dbias is one row of partials: [channels, window], then [channels].
template <class T, int N, int W, bool kPacked>
__global__ void __launch_bounds__(32 * kDown, 2)
    backward_kernel(Tokens<T> dx, float* partials, Tokens<T> dy, Tokens<T> x, const float* weight, const float* bias,
                    const int32_t* positions, Sizes sizes) {
  constexpr int kSums = (W + 1) * N;
  __shared__ float shared[kSums][kDown][32];
  const Place<N> place(sizes);
  BackwardRun<T, N, W, kPacked> run;
  clear(run.dtaps);
#pragma unroll
  for (int i = 0; i < N; ++i) run.dbias[i] = 0;
  if (place.active) {
    load_taps(run.taps, weight, place.channel);
    load(run.offset, bias + place.channel);
    run(dx, dy, x, place, positions, sizes);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int s = 0; s < W; ++s) shared[s * N + i][threadIdx.y][threadIdx.x] = run.dtaps[s][i];
    shared[W * N + i][threadIdx.y][threadIdx.x] = run.dbias[i];
  }
  __syncthreads();
  float* const to = partials + static_cast<int64_t>(blockIdx.x) * sizes.channels * (W + 1);
  for (int value = static_cast<int>(threadIdx.y); value < kSums; value += kDown) {
    float sum = 0;
#pragma unroll
    for (int y = 0; y < kDown; ++y) sum += shared[value][y][threadIdx.x];
    const int64_t channel = static_cast<int64_t>(blockIdx.y * 32 + threadIdx.x) * N + value % N;
    const int tap = value / N;
    if (channel >= sizes.channels) continue;
    to[tap == W ? static_cast<int64_t>(sizes.channels) * W + channel : channel * W + tap] = sum;
  }
}

// Runs that are a multiple of a group with the W − 1 tokens behind them that the backward pass reads; long ones where
// there are enough to fill a GPU.
Sizes sizes_of(const Tensor& x, const Tensor& weight, Activation activation) {
  constexpr int64_t kMost = INT32_MAX - 128;  // with the tokens behind the last run
  require(x.size(1) <= kMost, "conv: a sequence of {} tokens is more than the CUDA kernel can count; use a shorter one",
          x.size(1));
  const int channels = static_cast<int>(weight.size(0)), window = static_cast<int>(weight.size(1));
  const bool many = x.size(0) * x.size(1) * channels >= int64_t{1} << 25;
  return {x.size(0), static_cast<int>(x.size(1)), channels, window, activation, (many ? 65 : 33) - window};
}

template <int N>
dim3 grid_for(const Sizes& sizes) {
  return {blocks_for(sizes.runs(), kDown), blocks_for(sizes.channels, 32 * N)};
}

template <class F>
void with_window(const Sizes& sizes, F&& f) {
  if (sizes.window == 2)
    f(std::integral_constant<int, 2>());
  else if (sizes.window == 3)
    f(std::integral_constant<int, 3>());
  else
    f(std::integral_constant<int, 4>());
}

// f(channels of a thread, window, whether there are positions)
template <class F, class... Memory>
void with_channels(const Sizes& sizes, const int32_t* positions, F&& f, const Memory&... memory) {
  const auto with_lanes_and = [&](auto window, auto packed) {
    if (sizes.channels % kChannels == 0)
      with_lanes<kChannels>([&](auto lanes) { f(lanes, window, packed); }, memory...);
    else
      f(std::integral_constant<int, 1>(), window, packed);
  };
  with_window(sizes, [&](auto window) {
    positions ? with_lanes_and(window, std::true_type()) : with_lanes_and(window, std::false_type());
  });
}

}  // namespace

void conv_forward(const Tensor& y_tensor, const Tensor& x_tensor, const Tensor& weight, const Tensor& bias,
                  Activation activation, std::span<const Segment> segments, const Tensor& state) {
  if (x_tensor.elements() == 0) return;
  const Sizes sizes = sizes_of(x_tensor, weight, activation);
  const Tensor positions = positions_on(x_tensor.device(), segments, sizes.batch, sizes.length);
  const int32_t* const position = positions ? positions.data<int32_t>() : nullptr;
  const float* const past = state ? state.data<float>() : nullptr;
  const float* const offset = bias.data<float>();
  with_activation_type(x_tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto y = tokens<T>(y_tensor), x = tokens<T>(x_tensor);
    const auto launch = [&](auto lanes, auto window, auto packed) {
      forward_kernel<typename OnDevice<T>::Type, lanes, window, packed>
          <<<grid_for<lanes>(sizes), dim3(32, kDown), 0, stream(x_tensor.device())>>>(y, x, weight.data<float>(),
                                                                                      offset, past, position, sizes);
    };
    with_channels(sizes, position, launch, y, x, offset, past);
  });
  check_launch("conv");
}

void conv_step(const Tensor& y, const Tensor& state, const Tensor& slots, const Tensor& x, const Tensor& weight,
               const Tensor& bias, Activation activation) {
  if (x.elements() == 0) return;
  const Sizes sizes{x.size(0), 1, static_cast<int>(x.size(1)), static_cast<int>(weight.size(1)), activation, 1};
  const dim3 grid(blocks_for(sizes.channels, 128), static_cast<unsigned>(sizes.batch));
  with_activation_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_window(sizes, [&](auto window) {
      step_kernel<typename OnDevice<T>::Type, window><<<grid, 128, 0, stream(x.device())>>>(
          pointer<T>(y), state.data<float>(), slots.data<int32_t>(), pointer<T>(x), x.stride(0), weight.data<float>(),
          bias.data<float>(), sizes);
    });
  });
  check_launch("conv_step");
}

void conv_backward(const ConvGradients& out, const Tensor& dy_tensor, const Tensor& x_tensor, const Tensor& weight,
                   const Tensor& bias, Activation activation, std::span<const Segment> segments) {
  if (x_tensor.elements() == 0) {
    sum_rows(out.weight, nullptr, 0, 0);
    return sum_rows(out.bias, nullptr, 0, 0);
  }
  const Device device = x_tensor.device();
  const Sizes sizes = sizes_of(x_tensor, weight, activation);
  const Tensor positions = positions_on(device, segments, sizes.batch, sizes.length);
  const int32_t* const position = positions ? positions.data<int32_t>() : nullptr;
  const float* const offset = bias.data<float>();
  const int64_t blocks = blocks_for(sizes.runs(), kDown);
  const int64_t width = weight.elements() + bias.elements();
  const Tensor partials = Tensor::empty({blocks, width}, DType::f32, device);
  with_activation_type(x_tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto dx = tokens<T>(out.x), dy = tokens<T>(dy_tensor), x = tokens<T>(x_tensor);
    const auto launch = [&](auto lanes, auto window, auto packed) {
      backward_kernel<typename OnDevice<T>::Type, lanes, window, packed>
          <<<grid_for<lanes>(sizes), dim3(32, kDown), 0, stream(device)>>>(
              dx, partials.data<float>(), dy, x, weight.data<float>(), offset, position, sizes);
    };
    with_channels(sizes, position, launch, dx, dy, x, offset);
  });
  check_launch("conv backward");
  sum_rows(out.weight, partials.data<float>(), blocks, width);
  sum_rows(out.bias, partials.data<float>() + weight.elements(), blocks, width);
}

}  // namespace furious::cuda
