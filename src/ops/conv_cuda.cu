#include "ops/activation.cuh"
#include "ops/conv_kernels.h"
#include "ops/rows.cuh"

namespace furious::cuda {
namespace {

// A thread walks kRun tokens of a few channels with taps and window in registers, loading kAhead tokens at a time. A
// block is 32 threads across the channels and kDown runs.
constexpr int kRun = 32;
constexpr int kAhead = 4;
constexpr int kDown = 8;
constexpr int kTaps = 4;  // a shorter window uses the last of them
constexpr int kChannels = 4;

struct Sizes {
  int64_t batch;
  int length, channels, window;
  Activation activation;

  __host__ __device__ int runs_per_row() const { return (length + kRun - 1) / kRun; }
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
    first = static_cast<int>(run % sizes.runs_per_row()) * kRun;
    active = run < sizes.runs() && channel < sizes.channels;
  }
};

template <int N>
__device__ void load_taps(float (&taps)[kTaps][N], const float* weight, int channel, int window) {
#pragma unroll
  for (int s = 0; s < kTaps; ++s)
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int tap = s - (kTaps - window);
      taps[s][i] = tap < 0 ? 0.0f : weight[static_cast<int64_t>(channel + i) * window + tap];
    }
}

template <int N>
__device__ void clear(float (&values)[kTaps][N]) {
#pragma unroll
  for (int s = 0; s < kTaps; ++s)
#pragma unroll
    for (int i = 0; i < N; ++i) values[s][i] = 0;
}

template <int N>
__device__ void push(float (&values)[kTaps][N], const float (&newest)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int s = 0; s + 1 < kTaps; ++s) values[s][i] = values[s + 1][i];
    values[kTaps - 1][i] = newest[i];
  }
}

// Taps outside of the window are left out, not multiplied by zero: what they would read may be infinite.
template <int N>
__device__ void convolve(float (&sum)[N], const float (&taps)[kTaps][N], const float (&values)[kTaps][N],
                         const float (&bias)[N], int window) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = bias[i];
#pragma unroll
  for (int s = 0; s < kTaps; ++s)
    if (s >= kTaps - window)
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = fmaf(taps[s][i], values[s][i], sum[i]);
}

// Leaves room for one push: values[1..] are the inputs before the first token of a run, as far as its document or the
// state has them.
template <int N, class T>
__device__ void load_past(float (&values)[kTaps][N], const Tokens<T>& x, const float* state, const int32_t* positions,
                          const Place<N>& place, const Sizes& sizes) {
  clear(values);
  const int position = positions ? positions[place.batch * sizes.length + place.first] : place.first;
  const int past = sizes.window - 1;
#pragma unroll
  for (int back = 1; back < kTaps; ++back) {
    if (back > past) continue;
    if (back <= position) {
      load(values[kTaps - back], x.at(place.batch, place.first - back) + place.channel);
    } else if (state && position == place.first) {
      const int64_t row = place.batch * past + past + place.first - back;
      load(values[kTaps - back], state + row * sizes.channels + place.channel);
    }
  }
}

__device__ bool starts_document(const int32_t* positions, int64_t batch, int token, int length) {
  return positions && token > 0 && positions[batch * length + token] == 0;
}

template <class T, int N>
__global__ void __launch_bounds__(32 * kDown)
    forward_kernel(Tokens<T> y, Tokens<T> x, const float* weight, const float* bias, const float* state,
                   const int32_t* positions, Sizes sizes) {
  const Place<N> place(sizes);
  if (!place.active) return;
  float taps[kTaps][N], values[kTaps][N], offset[N];
  load_taps(taps, weight, place.channel, sizes.window);
  load(offset, bias + place.channel);
  load_past(values, x, state, positions, place, sizes);
  const int end = min(place.first + kRun, sizes.length);
  for (int group = place.first; group < end; group += kAhead) {
    float next[kAhead][N];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (group + j < end) load(next[j], x.at(place.batch, group + j) + place.channel);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int token = group + j;
      if (token >= end) break;
      if (starts_document(positions, place.batch, token, sizes.length)) clear(values);
      push(values, next[j]);
      float sum[N];
      convolve(sum, taps, values, offset, sizes.window);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = activate(sum[i], sizes.activation);
      store(y.at(place.batch, token) + place.channel, sum);
    }
  }
}

// The token after the state; the state moves on by it.
template <class T>
__global__ void step_kernel(T* y, float* state, const T* x, int64_t x_stride, const float* weight, const float* bias,
                            Sizes sizes) {
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int64_t batch = blockIdx.y;
  if (channel >= sizes.channels) return;
  const int past = sizes.window - 1;
  float taps[kTaps][1], values[kTaps][1], offset[1] = {bias[channel]}, newest[1], sum[1];
  load_taps(taps, weight, channel, sizes.window);
  clear(values);
  float* const rows = state + batch * past * sizes.channels + channel;
#pragma unroll
  for (int back = 1; back < kTaps; ++back)
    if (back <= past) values[kTaps - back][0] = rows[static_cast<int64_t>(past - back) * sizes.channels];
  newest[0] = to_float(x[batch * x_stride + channel]);
  push(values, newest);
  convolve(sum, taps, values, offset, sizes.window);
  y[batch * sizes.channels + channel] = from_float<T>(activate(sum[0], sizes.activation));
#pragma unroll
  for (int back = 0; back + 1 < kTaps; ++back)
    if (back < past) rows[static_cast<int64_t>(past - 1 - back) * sizes.channels] = values[kTaps - 1 - back][0];
}

// dx of a run, and the block's share of dweight and dbias in one row of partials: [channels, window], then [channels].
// pending[k] gathers dx of the token k before the current one; it is complete, and written, three tokens later.
template <class T, int N>
__global__ void __launch_bounds__(32 * kDown, 2)
    backward_kernel(Tokens<T> dx, float* partials, Tokens<T> dy, Tokens<T> x, const float* weight, const float* bias,
                    const int32_t* positions, Sizes sizes) {
  constexpr int kSums = (kTaps + 1) * N;
  __shared__ float shared[kSums][kDown][32];
  const Place<N> place(sizes);
  float dtaps[kTaps][N], dbias[N] = {};
  clear(dtaps);
  if (place.active) {
    float taps[kTaps][N], values[kTaps][N], pending[kTaps][N], offset[N];
    load_taps(taps, weight, place.channel, sizes.window);
    load(offset, bias + place.channel);
    load_past(values, x, nullptr, positions, place, sizes);
    clear(pending);
    const int end = min(place.first + kRun, sizes.length);
    for (int group = place.first; group < end + kTaps - 1; group += kAhead) {
      float next[kAhead][N], gradient[kAhead][N];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (group + j < min(end + kTaps - 1, sizes.length)) {
          load(next[j], x.at(place.batch, group + j) + place.channel);
          load(gradient[j], dy.at(place.batch, group + j) + place.channel);
        }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int token = group + j;
        if (token >= end + kTaps - 1) break;
        float dpre[N] = {};
        int position = kTaps;
        if (token < sizes.length) {
          if (positions) position = positions[place.batch * sizes.length + token];
          if (starts_document(positions, place.batch, token, sizes.length)) clear(values);
          push(values, next[j]);
          float pre[N];
          convolve(pre, taps, values, offset, sizes.window);
#pragma unroll
          for (int i = 0; i < N; ++i) dpre[i] = activation_gradient(pre[i], gradient[j][i], sizes.activation);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (token < end) {
            dbias[i] += dpre[i];
#pragma unroll
            for (int s = 0; s < kTaps; ++s) dtaps[s][i] += dpre[i] * values[s][i];
          }
#pragma unroll
          for (int back = kTaps - 1; back > 0; --back) pending[back][i] = pending[back - 1][i];
          pending[0][i] = 0;
#pragma unroll
          for (int back = 0; back < kTaps; ++back)
            if (back < sizes.window && back <= position) pending[back][i] += taps[kTaps - 1 - back][i] * dpre[i];
        }
        if (token - (kTaps - 1) >= place.first)
          store(dx.at(place.batch, token - (kTaps - 1)) + place.channel, pending[kTaps - 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int s = 0; s < kTaps; ++s) shared[s * N + i][threadIdx.y][threadIdx.x] = dtaps[s][i];
    shared[kTaps * N + i][threadIdx.y][threadIdx.x] = dbias[i];
  }
  __syncthreads();
  float* const to = partials + static_cast<int64_t>(blockIdx.x) * sizes.channels * (sizes.window + 1);
  for (int value = static_cast<int>(threadIdx.y); value < kSums; value += kDown) {
    float sum = 0;
#pragma unroll
    for (int run = 0; run < kDown; ++run) sum += shared[value][run][threadIdx.x];
    const int64_t channel = static_cast<int64_t>(blockIdx.y * 32 + threadIdx.x) * N + value % N;
    const int tap = value / N - (kTaps - sizes.window);
    if (channel >= sizes.channels || tap < 0) continue;
    const bool is_bias = tap == sizes.window;
    to[is_bias ? static_cast<int64_t>(sizes.channels) * sizes.window + channel : channel * sizes.window + tap] = sum;
  }
}

Sizes sizes_of(const Tensor& x, const Tensor& weight, Activation activation) {
  return {x.size(0), static_cast<int>(x.size(1)), static_cast<int>(weight.size(0)), static_cast<int>(weight.size(1)),
          activation};
}

template <int N>
dim3 grid_for(const Sizes& sizes) {
  return {blocks_for(sizes.runs(), kDown), blocks_for(sizes.channels, 32 * N)};
}

template <class F, class... Memory>
void with_channels(const Sizes& sizes, F&& f, const Memory&... memory) {
  if (sizes.channels % kChannels == 0)
    with_lanes<kChannels>(f, memory...);
  else
    f(std::integral_constant<int, 1>());
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
    const auto launch = [&](auto lanes) {
      forward_kernel<typename OnDevice<T>::Type, lanes>
          <<<grid_for<lanes>(sizes), dim3(32, kDown), 0, stream(x_tensor.device())>>>(
              y, x, weight.data<float>(), offset, past, position, sizes);
    };
    with_channels(sizes, launch, y, x, offset, past);
  });
  check_launch("conv");
}

void conv_step(const Tensor& y, const Tensor& state, const Tensor& x, const Tensor& weight, const Tensor& bias,
               Activation activation) {
  if (x.elements() == 0) return;
  const Sizes sizes{x.size(0), 1, static_cast<int>(x.size(1)), static_cast<int>(weight.size(1)), activation};
  const dim3 grid(blocks_for(sizes.channels, 128), static_cast<unsigned>(sizes.batch));
  with_activation_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    step_kernel<<<grid, 128, 0, stream(x.device())>>>(pointer<T>(y), state.data<float>(), pointer<T>(x), x.stride(0),
                                                      weight.data<float>(), bias.data<float>(), sizes);
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
    const auto launch = [&](auto lanes) {
      backward_kernel<typename OnDevice<T>::Type, lanes>
          <<<grid_for<lanes>(sizes), dim3(32, kDown), 0, stream(device)>>>(
              dx, partials.data<float>(), dy, x, weight.data<float>(), offset, position, sizes);
    };
    with_channels(sizes, launch, dx, dy, x, offset);
  });
  check_launch("conv backward");
  sum_rows(out.weight, partials.data<float>(), blocks, width);
  sum_rows(out.bias, partials.data<float>() + weight.elements(), blocks, width);
}

}  // namespace furious::cuda
