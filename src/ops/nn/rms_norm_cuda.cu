#include "gpu/reduce.cuh"
#include "gpu/rows.cuh"
#include "ops/nn/activation.cuh"
#include "ops/nn/rms_norm_kernels.h"

namespace furious::cuda {
namespace {

// A row belongs to threadIdx.x of one threadIdx.y; each thread keeps kHeld of its numbers, so a row is read once.
constexpr int kHeld = 16;
constexpr int kMostWarps = 16;
constexpr int64_t kWidest = kMostWarps * 32 * kHeld;
constexpr int64_t kBlocks = 264;  // of the backward pass: as many as an H200 holds at once

// The sum over the threads of a row, which wait for each other alone. `shared` may be used again after the next sum.
__device__ float row_sum(float x, float* shared) {
  x = warp_sum(x);
  const unsigned warps = blockDim.x / 32;
  if (warps == 1) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.y * warps + threadIdx.x / 32] = x;
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
  float sum = 0;
  for (unsigned i = 0; i < warps; ++i) sum += shared[threadIdx.y * warps + i];
  return sum;
}

// Element at which this thread's pack p starts.
template <int N>
__device__ int place_of(int p) {
  return static_cast<int>(p * blockDim.x + threadIdx.x) * N;
}

// Beside results of 16 bits, an exponential and a reciprocal of 22 bits are exact.
template <class T>
__device__ float gate_sigmoid(float z) {
  if constexpr (sizeof(T) == 2)
    return fast_sigmoid(z);
  else
    return sigmoid(z);
}

template <class T, int N, bool kGated>
__global__ void __launch_bounds__(32 * kMostWarps) forward_kernel(DeviceRows<T> y, DeviceRows<T> x, DeviceRows<T> z,
                                                                  const float* weight, float* inverse_rms, float eps) {
  constexpr int kPacks = kHeld / N;
  __shared__ float shared[kMostWarps];
  const int n = static_cast<int>(x.size);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = row < x.count;
  float u[kPacks][N];
  float squares = 0;
  if (active) {
    const T* const from = x[row];
    const T* const gate = kGated ? z[row] : nullptr;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = place_of<N>(p);
      if (at >= n) break;
      load(u[p], from + at);
      if constexpr (kGated) {
        float g[N];
        load(g, gate + at);
#pragma unroll
        for (int i = 0; i < N; ++i) u[p][i] *= g[i] * gate_sigmoid<T>(g[i]);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) squares += u[p][i] * u[p][i];
    }
  }
  const float r = 1.0f / sqrtf(row_sum(squares, shared) / static_cast<float>(n) + eps);
  if (!active) return;
  if (threadIdx.x == 0) inverse_rms[row] = r;
  T* const to = y[row];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = place_of<N>(p);
    if (at >= n) break;
    float w[N];
    load(w, weight + at);
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] *= u[p][i] * r;
    store(to + at, w);
  }
}

// What a thread holds of a row: x, dy, and z with a gate or, where dx is added to what is there, that.
template <class T, int N>
struct Held {
  static constexpr int kPacks = kHeld / N;
  Pack<T, N> x[kPacks], dy[kPacks], third[kPacks];
  float r;

  __device__ void fetch(int64_t row, const DeviceRows<T>& x_rows, const DeviceRows<T>& dy_rows,
                        const DeviceRows<T>* third_rows, const float* inverse_rms) {
    if (row >= x_rows.count) return;
    r = inverse_rms[row];
    const T *const from = x_rows[row], *const gradient = dy_rows[row];
    const T* const other = third_rows ? (*third_rows)[row] : nullptr;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = place_of<N>(p);
      if (at >= static_cast<int>(x_rows.size)) continue;
      x[p].fetch(from + at);
      dy[p].fetch(gradient + at);
      if (other) third[p].fetch(other + at);
    }
  }
};

// Every block walks rows of its own and leaves its share of dweight in one row of partials [blocks, n].
template <class T, int N, bool kGated, bool kAdds>
__global__ void __launch_bounds__(32 * kMostWarps)
    backward_kernel(DeviceRows<T> dx, DeviceRows<T> dz, float* partials, DeviceRows<T> dy, DeviceRows<T> x,
                    DeviceRows<T> z, const float* weight, const float* inverse_rms) {
  constexpr int kPacks = kHeld / N;
  constexpr bool kAhead = sizeof(T) == 2 && N > 1;  // registers have room for two rows
  __shared__ float shared[2][kMostWarps];
  __shared__ float sums[kWidest];
  const int n = static_cast<int>(x.size);
  float dweight[kPacks][N] = {}, w[kPacks][N];
#pragma unroll
  for (int p = 0; p < kPacks; ++p)
    if (place_of<N>(p) < n) load(w[p], weight + place_of<N>(p));
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  const DeviceRows<T>* const third = kGated ? &z : kAdds ? &dx : nullptr;
  Held<T, N> now, next;
  now.fetch(static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, x, dy, third, inverse_rms);
  int turn = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < x.count; row += step) {
    if constexpr (kAhead) next.fetch(row + step, x, dy, third, inverse_rms);
    const float r = now.r;
    float products = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (place_of<N>(p) >= n) continue;
      float value[N], d[N], other[N];
      now.x[p].unpack(value);
      now.dy[p].unpack(d);
      if constexpr (kGated) now.third[p].unpack(other);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float normed = value[i] * r * (kGated ? other[i] * gate_sigmoid<T>(other[i]) : 1.0f);
        dweight[p][i] += d[i] * normed;
        products += d[i] * w[p][i] * normed;
      }
    }
    const float mean = row_sum(products, shared[turn]) / static_cast<float>(n);
    turn = 1 - turn;
    T* const to = dx[row];
    T* const to_gate = kGated ? dz[row] : nullptr;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = place_of<N>(p);
      if (at >= n) continue;
      float value[N], d[N], other[N];
      now.x[p].unpack(value);
      now.dy[p].unpack(d);
      if constexpr (kGated || kAdds) now.third[p].unpack(other);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float s = kGated ? gate_sigmoid<T>(other[i]) : 1.0f;
        const float gate = kGated ? other[i] * s : 1.0f;
        const float du = r * (d[i] * w[p][i] - value[i] * r * gate * mean);
        d[i] = du * gate + (kAdds ? other[i] : 0.0f);
        if constexpr (kGated) other[i] = silu_derivative(other[i], s) * du * value[i];
      }
      store(to + at, d);
      if constexpr (kGated) store(to_gate + at, other);
    }
    if constexpr (kAhead)
      now = next;
    else
      now.fetch(row + step, x, dy, third, inverse_rms);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = place_of<N>(p);
    if (at >= n) break;
#pragma unroll
    for (int i = 0; i < N; ++i) sums[threadIdx.y * n + at + i] = dweight[p][i];
  }
  __syncthreads();
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  for (int i = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); i < n; i += threads) {
    float sum = 0;
    for (int slot = 0; slot < static_cast<int>(blockDim.y); ++slot) sum += sums[slot * n + i];
    partials[static_cast<int64_t>(blockIdx.x) * n + i] = sum;
  }
}

// Warps enough to hold a row, and rows enough for eight warps.
dim3 block_for(int64_t n) {
  require(n <= kWidest, "rms_norm: rows of {} numbers; the CUDA kernels take up to {}", n, kWidest);
  const unsigned warps = blocks_for(n, 32 * kHeld);
  return {32 * warps, std::max(1u, 8 / warps)};
}

}  // namespace

void rms_norm_forward(const RmsNormResult& out, const Tensor& x_tensor, const Tensor& weight, float eps,
                      const Tensor& z_tensor) {
  if (x_tensor.elements() == 0) return;
  with_activation_type(x_tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto y = rows<T>(out.y), x = rows<T>(x_tensor), z = rows<T>(z_tensor ? z_tensor : x_tensor);
    const float* const w = weight.data<float>();
    const dim3 block = block_for(x.size);
    with_lanes<kLanes<T>>(
        [&](auto lanes) {
          const auto launch = [&](auto gated) {
            forward_kernel<typename OnDevice<T>::Type, lanes, gated>
                <<<blocks_for(x.count, block.y), block, 0, stream(x_tensor.device())>>>(
                    y, x, z, w, out.inverse_rms.data<float>(), eps);
          };
          z_tensor ? launch(std::true_type()) : launch(std::false_type());
        },
        y, x, z, w);
  });
  check_launch("rms_norm");
}

void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy_tensor, const Tensor& x_tensor,
                       const Tensor& weight, const Tensor& inverse_rms, const Tensor& z_tensor) {
  if (x_tensor.elements() == 0) return sum_rows(out.weight, nullptr, 0, 0);
  const Device device = x_tensor.device();
  with_activation_type(x_tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto dx = rows<T>(out.x), dz = rows<T>(z_tensor ? out.z : out.x);
    const auto dy = rows<T>(dy_tensor), x = rows<T>(x_tensor), z = rows<T>(z_tensor ? z_tensor : x_tensor);
    const float* const w = weight.data<float>();
    const dim3 block = block_for(x.size);
    const int64_t blocks = std::min<int64_t>(kBlocks, blocks_for(x.count, block.y));
    const Tensor partials = Tensor::empty(Shape{blocks, x.size}, DType::f32, device);
    with_lanes<kLanes<T>>(
        [&](auto lanes) {
          const auto launch = [&](auto gated, auto adds) {
            backward_kernel<typename OnDevice<T>::Type, lanes, gated, adds>
                <<<static_cast<unsigned>(blocks), block, 0, stream(device)>>>(dx, dz, partials.data<float>(), dy, x, z,
                                                                              w, inverse_rms.data<float>());
          };
          if (z_tensor)
            launch(std::true_type(), std::false_type());
          else if (out.adds_to_x)
            launch(std::false_type(), std::true_type());
          else
            launch(std::false_type(), std::false_type());
        },
        dx, dz, dy, x, z, w);
    check_launch("rms_norm backward");
    sum_rows(out.weight, partials.data<float>(), blocks, x.size);
  });
}

}  // namespace furious::cuda
