#include "ops/symmetric_square_kernels.h"

#include <algorithm>
#include <numbers>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/symmetric_square_cpu.cpp"
#include <hwy/foreach_target.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {
namespace {

constexpr float kRoot2 = std::numbers::sqrt2_v<float>;

void forward_row(float* y, const float* x, int64_t d) {
  for (int64_t i = 0; i < d; ++i) {
    const FloatVector factor = set(kRoot2 * x[i]);
    for_each_vector(
        d - i, [&](int64_t j, auto memory) HWY_ATTR { memory.store(hn::Mul(factor, memory.load(x + i + j)), y + j); });
    y[0] = x[i] * x[i];
    y += d - i;
  }
}

// Row i of the triangle adds to dx_i what its elements right of the diagonal give, and to each dx_j what x_i gives.
void backward_row(float* dx, const float* dy, const float* x, int64_t d) {
  std::fill_n(dx, d, 0.0f);
  for (int64_t i = 0; i < d; ++i) {
    const FloatVector factor = set(kRoot2 * x[i]);
    FloatVector products = hn::Zero(Floats());
    for_each_vector(d - i - 1, [&](int64_t j, auto memory) HWY_ATTR {
      const FloatVector gradient = memory.load(dy + 1 + j);
      const int64_t column = i + 1 + j;
      products = hn::MulAdd(gradient, memory.load(x + column), products);
      memory.store(hn::MulAdd(gradient, factor, memory.load(dx + column)), dx + column);
    });
    dx[i] += 2 * x[i] * dy[0] + kRoot2 * sum_of_lanes(products);
    dy += d - i;
  }
}

}  // namespace

void symmetric_square_forward(const Tensor& y_tensor, const Tensor& x_tensor) {
  const Rows y(y_tensor);
  const Rows x(x_tensor);
  parallel_rows(x.count(), y.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) forward_row(y[row], x[row], x.size());
  });
}

void symmetric_square_backward(const Tensor& dx_tensor, const Tensor& dy_tensor, const Tensor& x_tensor) {
  const Rows dx(dx_tensor);
  const Rows dy(dy_tensor);
  const Rows x(x_tensor);
  parallel_rows(x.count(), dy.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) backward_row(dx[row], dy[row], x[row], x.size());
  });
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious::cpu {

HWY_EXPORT(symmetric_square_forward);
HWY_EXPORT(symmetric_square_backward);

void symmetric_square_forward(const Tensor& y, const Tensor& x) {
  HWY_DYNAMIC_DISPATCH(symmetric_square_forward)(y, x);
}

void symmetric_square_backward(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  HWY_DYNAMIC_DISPATCH(symmetric_square_backward)(dx, dy, x);
}

}  // namespace furious::cpu
#endif
