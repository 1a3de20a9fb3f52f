#include "gpu/reduce.cuh"
#include "gpu/rows.cuh"
#include "ops/nn/layer_norm_kernels.h"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;

// A block for each row.
template <class T>
__global__ void __launch_bounds__(kThreads) center_kernel(DeviceRows<T> y, DeviceRows<T> x) {
  __shared__ float shared[32];
  const T* const from = x[blockIdx.x];
  T* const to = y[blockIdx.x];
  const int n = static_cast<int>(x.size);
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    float value[1];
    load(value, from + i);
    sum += value[0];
  }
  const float mean = block_sum(sum, shared) / static_cast<float>(n);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    float value[1];
    load(value, from + i);
    value[0] -= mean;
    store(to + i, value);
  }
}

}  // namespace

void center_rows(const Tensor& y, const Tensor& x) {
  if (x.elements() == 0) return;
  with_activation_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto to = rows<T>(y), from = rows<T>(x);
    center_kernel<<<static_cast<unsigned>(from.count), kThreads, 0, stream(x.device())>>>(to, from);
  });
  check_launch("center");
}

}  // namespace furious::cuda
