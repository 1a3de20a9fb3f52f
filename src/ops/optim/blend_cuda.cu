#include "ops/optim/blend_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) blend_kernel(float* out, float alpha, const float* x, float beta,
                                                         const float* y, const float* guard, int64_t count) {
  if (guard != nullptr && isnan(*guard)) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = __fadd_rn(__fmul_rn(alpha, x[i]), __fmul_rn(beta, y[i]));
}

}  // namespace

void blend(const Tensor& out, float alpha, const Tensor& x, float beta, const Tensor& y, const Tensor& guard) {
  blend_kernel<<<blocks_for(out.elements(), kThreads), kThreads, 0, stream(out.device())>>>(
      out.data<float>(), alpha, x.data<float>(), beta, y.data<float>(), guard ? guard.data<float>() : nullptr,
      out.elements());
  check_launch("blend");
}

}  // namespace furious::cuda
