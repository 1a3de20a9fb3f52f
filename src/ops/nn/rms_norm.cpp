#include "ops/nn/rms_norm.h"

#include "base/error.h"
#include "ops/nn/rms_norm_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

void check_inputs(const ArgumentCheck& check, const Tensor& x, const Tensor& weight, const Tensor& z) {
  check.rows("x", x);
  check.dense("weight", weight, DType::f32, {x.size(-1)}, x.device());
  if (z) check.rows("z", z, x);
}

Shape without_last(const Shape& shape) {
  return Shape(std::span<const int64_t>(shape.begin(), shape.rank() - 1));
}

}  // namespace

RmsNormResult rms_norm_forward(const Tensor& x, const Tensor& weight, float eps, const Tensor& z) {
  const ArgumentCheck check("rms_norm");
  check_inputs(check, x, weight, z);
  require(eps >= 0, "rms_norm: eps is {}, expected 0 or more", eps);
  RmsNormResult result{Tensor::empty_like(x), Tensor::empty(without_last(x.shape()), DType::f32, x.device())};
  FURIOUS_DISPATCH(x.device(), rms_norm_forward(result, x, weight, eps, z));
  return result;
}

void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& z) {
  const ArgumentCheck check("rms_norm backward");
  check_inputs(check, x, weight, z);
  const Shape row_shape = without_last(x.shape());
  check.dense("inverse_rms", inverse_rms, DType::f32, {row_shape.begin(), row_shape.end()}, x.device());
  check.rows("dy", dy, x);
  check.rows("dx", out.x, x);
  check.dense("dweight", out.weight, DType::f32, {x.size(-1)}, x.device());
  if (z) check.rows("dz", out.z, x);
  require(!z || !out.adds_to_x, "rms_norm backward: a norm with a gate adds to no gradient");
  FURIOUS_DISPATCH(x.device(), rms_norm_backward(out, dy, x, weight, inverse_rms, z));
}

Variable rms_norm(Tape& tape, const Variable& x, const Variable& weight, float eps, const Variable& z) {
  const Tensor gate = z ? z.value() : Tensor();
  RmsNormResult result = rms_norm_forward(x.value(), weight.value(), eps, gate);
  const Tensor inverse_rms = result.inverse_rms;
  return tape.record(std::move(result.y), {x, weight, z}, [=](const Tensor& dy) {
    // A residual that goes around the norm has brought its gradient already: one pass adds to it.
    const bool adds = !z && x.needs_gradient() && x.gradient();
    const RmsNormGradients d{adds ? x.gradient() : x.new_gradient(), weight.new_gradient(),
                             z ? z.new_gradient() : Tensor(), adds};
    rms_norm_backward(d, dy, x.value(), weight.value(), inverse_rms, gate);
    if (!adds) x.add_gradient(d.x);
    weight.add_gradient(d.weight);
    if (z) z.add_gradient(d.z);
  });
}

}  // namespace furious
