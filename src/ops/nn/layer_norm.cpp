#include "ops/nn/layer_norm.h"

#include <numeric>

#include "ops/elementwise.h"
#include "ops/nn/layer_norm_kernels.h"
#include "ops/nn/linear.h"
#include "ops/nn/linear_kernels.h"
#include "ops/nn/rms_norm.h"
#include "ops/rows.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {

void cpu::center_rows(const Tensor& y_tensor, const Tensor& x_tensor) {
  const Rows y(y_tensor), x(x_tensor);
  parallel_rows(x.count(), x.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* const from = x[row];
      const double sum = std::accumulate(from, from + x.size(), 0.0);
      const auto mean = static_cast<float>(sum / static_cast<double>(x.size()));
      std::transform(from, from + x.size(), y[row], [mean](float value) { return value - mean; });
    }
  });
}

Tensor center_forward(const Tensor& x) {
  ArgumentCheck("center").rows("x", x);
  Tensor y = Tensor::empty_like(x);
  FURIOUS_DISPATCH(x.device(), center_rows(y, x));
  return y;
}

namespace {

Variable centered(Tape& tape, const Variable& x) {
  return tape.record(center_forward(x.value()), {x}, [x](const Tensor& dy) { x.add_gradient(center_forward(dy)); });
}

// x + bias in every row.
Tensor with_bias(const Tensor& x, const Tensor& bias) {
  ArgumentCheck("layer_norm").dense("bias", bias, DType::f32, {x.size(-1)}, x.device());
  Tensor y = Tensor::empty_like(x);
  if (y.elements() > 0) FURIOUS_DISPATCH(x.device(), fill_rows(y.as_matrix(), bias));
  add_into(y, x);
  return y;
}

Variable biased(Tape& tape, const Variable& x, const Variable& bias) {
  return tape.record(with_bias(x.value(), bias.value()), {x, bias}, [x, bias](const Tensor& dy) {
    if (bias.needs_gradient()) linear_backward_bias(bias.gradient_target(), dy);
    x.add_gradient(dy);
  });
}

}  // namespace

Tensor layer_norm_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, float eps) {
  return with_bias(rms_norm_forward(center_forward(x), weight, eps).y, bias);
}

Variable layer_norm(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias, float eps) {
  return biased(tape, rms_norm(tape, centered(tape, x), weight, eps), bias);
}

}  // namespace furious
