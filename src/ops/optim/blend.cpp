#include "ops/optim/blend.h"

#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "ops/optim/blend_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {

namespace cpu {

void blend(const Tensor& out, float alpha, const Tensor& x, float beta, const Tensor& y, const Tensor& guard) {
  if (guard && std::isnan(*guard.data<float>())) return;
  float* const to = out.data<float>();
  const float* const a = x.data<float>();
  const float* const b = y.data<float>();
  parallel_ranges(out.elements(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = alpha * a[i] + beta * b[i];
  });
}

}  // namespace cpu

void blend(const Tensor& out, float alpha, const Tensor& x, float beta, const Tensor& y, const Tensor& guard) {
  const ArgumentCheck check("blend");
  check.present("out", out);
  const Device device = out.device();
  const std::vector<int64_t> shape(out.shape().begin(), out.shape().end());
  check.dense("out", out, DType::f32, shape, device);
  check.dense("x", x, DType::f32, shape, device);
  check.dense("y", y, DType::f32, shape, device);
  if (guard) check.dense("guard", guard, DType::f32, {1}, device);
  if (out.elements() == 0) return;
  FURIOUS_DISPATCH(device, blend(out, alpha, x, beta, y, guard));
}

}  // namespace furious
