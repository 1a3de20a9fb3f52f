#include "ops/optim/muon_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;

__device__ int64_t element() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads) momentum_kernel(float* update, float* momentum, const float* gradient,
                                                            const AdamWConstants* numbers, float mu, int64_t count) {
  const float scale = numbers->gradient_scale;
  const int64_t i = element();
  if (isnan(scale) || i >= count) return;
  const float g = scale * gradient[i];
  const float m = mu * momentum[i] + g;
  momentum[i] = m;
  update[i] = g + mu * m;
}

__global__ void __launch_bounds__(kThreads) normalize_kernel(float* x, const double* squares, int64_t count) {
  const auto factor = static_cast<float>(1 / (sqrt(*squares) + kMuonEpsilon));
  const int64_t i = element();
  if (i < count) x[i] *= factor;
}

__global__ void __launch_bounds__(kThreads)
    apply_kernel(float* parameter, const float* direction, const AdamWConstants* numbers, float factor, int64_t count) {
  const int64_t i = element();
  if (isnan(numbers->gradient_scale) || i >= count) return;
  parameter[i] = numbers->decay * parameter[i] - numbers->learning_rate * factor * direction[i];
}

}  // namespace

void muon_momentum(const Tensor& update, const Tensor& momentum, const Tensor& gradient, const Tensor& numbers,
                   float mu) {
  momentum_kernel<<<blocks_for(update.elements(), kThreads), kThreads, 0, stream(update.device())>>>(
      update.data<float>(), momentum.data<float>(), gradient.data<float>(),
      static_cast<const AdamWConstants*>(numbers.raw()), mu, update.elements());
  check_launch("muon");
}

void muon_normalize(const Tensor& x, const Tensor& squares) {
  normalize_kernel<<<blocks_for(x.elements(), kThreads), kThreads, 0, stream(x.device())>>>(
      x.data<float>(), squares.data<double>(), x.elements());
  check_launch("muon");
}

void muon_apply(const Tensor& parameter, const Tensor& direction, const Tensor& numbers, float factor) {
  apply_kernel<<<blocks_for(parameter.elements(), kThreads), kThreads, 0, stream(parameter.device())>>>(
      parameter.data<float>(), direction.data<float>(), static_cast<const AdamWConstants*>(numbers.raw()), factor,
      parameter.elements());
  check_launch("muon");
}

}  // namespace furious::cuda
