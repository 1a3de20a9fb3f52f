#include <cfloat>

#include "gpu/reduce.cuh"
#include "ops/nn/cross_entropy_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kScaleThreads = 256;

// kWidth neighbours, loaded and stored at once.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

// One block per row. A first pass finds the largest logit and Σ exp(l − largest) together, rescaling the sum whenever a
// larger one comes up; a second, with a gradient wanted, replaces the logits. A NaN among them makes the sum NaN.
template <class T, int kWidth, bool kGradient>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(T* logits, int64_t vocabulary, const int32_t* targets, const float* weights, float z_loss,
                const int32_t* counted, double* losses) {
  __shared__ float largest_parts[32], sum_parts[32];
  using Packed = Pack<T, kWidth>;
  const int64_t row = blockIdx.x;
  T* const own = logits + row * vocabulary;
  Packed* const packs = reinterpret_cast<Packed*>(own);
  const int count = static_cast<int>(vocabulary / kWidth);
  const int32_t target = targets[row];
  if (target == kIgnoredTarget) {
    if (threadIdx.x == 0) losses[row] = 0;
    if constexpr (kGradient) {
      Packed zero;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) zero.values[i] = from_float<T>(0.0f);
      for (int p = threadIdx.x; p < count; p += kThreads) packs[p] = zero;
    }
    return;
  }
  const float weight = weights != nullptr ? weights[row] : 1.0f;
  const bool valid = target >= 0 && target < vocabulary;
  const float target_logit = valid ? to_float(own[target]) : __int_as_float(0x7FC00000);

  float largest = -FLT_MAX;
  float sum = 0;
  for (int p = threadIdx.x; p < count; p += kThreads) {
    const Packed pack = packs[p];
    float most = largest;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) most = fmaxf(most, to_float(pack.values[i]));
    float added = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) added += __expf(to_float(pack.values[i]) - most);
    sum = sum * __expf(largest - most) + added;
    largest = most;
  }
  // Each of the two meets at a barrier: from here on every thread has read the row.
  const float row_largest = block_max(largest, largest_parts);
  const float row_sum = block_sum(sum * __expf(largest - row_largest), sum_parts);
  const float log_sum = z_loss > 0 ? logf(row_sum) + row_largest : 0.0f;
  if (threadIdx.x == 0)
    losses[row] = static_cast<double>(weight) *
                  (log(static_cast<double>(row_sum)) + static_cast<double>(row_largest - target_logit) +
                   static_cast<double>(z_loss) * static_cast<double>(log_sum) * static_cast<double>(log_sum));
  if constexpr (kGradient) {
    const float coefficient = weight / static_cast<float>(*counted);
    const float factor = coefficient / row_sum * (1.0f + 2.0f * z_loss * log_sum);
    for (int p = threadIdx.x; p < count; p += kThreads) {
      Packed pack = packs[p];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float probability = __expf(to_float(pack.values[i]) - row_largest) * factor;
        pack.values[i] = from_float<T>(p * kWidth + i == target ? probability - coefficient : probability);
      }
      packs[p] = pack;
    }
  }
}

template <class T, int kWidth>
void launch_rows(const Tensor& logits, const Tensor& targets, const Tensor& weights, double z_loss,
                 const Tensor& counted, bool with_gradient, const Tensor& losses) {
  const auto kernel = with_gradient ? rows_kernel<T, kWidth, true> : rows_kernel<T, kWidth, false>;
  kernel<<<static_cast<unsigned>(logits.size(0)), kThreads, 0, stream(logits.device())>>>(
      static_cast<T*>(logits.raw()), logits.size(1), targets.data<int32_t>(), weights ? weights.data<float>() : nullptr,
      static_cast<float>(z_loss), counted.data<int32_t>(), losses.data<double>());
  check_launch("cross_entropy");
}

__global__ void __launch_bounds__(kThreads) count_kernel(const int32_t* targets, int64_t rows, int32_t* counted) {
  __shared__ int32_t parts[kThreads / 32];
  int32_t count = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) count += targets[row] != kIgnoredTarget;
  count = warp_sum(count);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x != 0) return;
  count = 0;
  for (const int32_t part : parts) count += part;
  *counted = count;
}

__global__ void __launch_bounds__(kThreads)
    mean_kernel(const double* losses, int64_t rows, const int32_t* counted, float* loss) {
  __shared__ double parts[kThreads];
  double sum = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) sum += losses[row];
  parts[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *loss = static_cast<float>(parts[0] / max(1, *counted));
}

template <class T>
__global__ void scale_kernel(T* values, int64_t count, const float* factor) {
  const float by = *factor;
  if (by == 1.0f) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    values[i] = from_float<T>(to_float(values[i]) * by);
}

}  // namespace

void count_targets(const Tensor& counted, const Tensor& targets) {
  count_kernel<<<1, kThreads, 0, stream(targets.device())>>>(targets.data<int32_t>(), targets.elements(),
                                                             counted.data<int32_t>());
  check_launch("cross_entropy");
}

void cross_entropy_rows(const Tensor& logits, const Tensor& targets, const Tensor& weights, double z_loss,
                        const Tensor& counted, bool with_gradient, const Tensor& losses) {
  require(logits.size(1) <= 1 << 30, "cross_entropy: a vocabulary of {} is too large for a GPU", logits.size(1));
  with_activation_type(logits.dtype(), [&](auto zero) {
    using T = typename OnDevice<decltype(zero)>::Type;
    constexpr int kWidth = 16 / sizeof(T);
    // Rows that begin at multiples of 16 bytes; the logits' memory itself does.
    if (logits.size(1) % kWidth == 0)
      launch_rows<T, kWidth>(logits, targets, weights, z_loss, counted, with_gradient, losses);
    else
      launch_rows<T, 1>(logits, targets, weights, z_loss, counted, with_gradient, losses);
  });
}

void mean_loss(const Tensor& loss, const Tensor& losses, const Tensor& counted) {
  mean_kernel<<<1, kThreads, 0, stream(loss.device())>>>(losses.data<double>(), losses.elements(),
                                                         counted.data<int32_t>(), loss.data<float>());
  check_launch("cross_entropy");
}

void scale(const Tensor& tensor, const Tensor& factor) {
  if (tensor.elements() == 0) return;
  with_activation_type(tensor.dtype(), [&](auto zero) {
    const unsigned blocks = std::min(blocks_for(tensor.elements(), 8 * kScaleThreads), 4096u);
    scale_kernel<<<blocks, kScaleThreads, 0, stream(tensor.device())>>>(pointer<decltype(zero)>(tensor),
                                                                        tensor.elements(), factor.data<float>());
  });
  check_launch("cross_entropy");
}

}  // namespace furious::cuda
