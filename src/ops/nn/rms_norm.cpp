#include "ops/nn/rms_norm.h"

#include "base/error.h"
#include "ops/nn/rms_norm_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

// Whether the weight has a row for each group.
bool is_grouped(const Tensor& weight) {
  return weight.rank() == 2;
}

void check_inputs(const ArgumentCheck& check, const Tensor& x, const Tensor& weight, const Tensor& z) {
  check.rows("x", x);
  require(!is_grouped(weight) || x.rank() >= 2, "{}: x has shape {}, expected groups and numbers", check.operation(),
          to_string(x.shape()));
  if (is_grouped(weight))
    check.dense("weight", weight, DType::f32, {x.size(-2), x.size(-1)}, x.device());
  else
    check.dense("weight", weight, DType::f32, {x.size(-1)}, x.device());
  if (z) check.rows("z", z, x);
}

Shape shape_of_inverse(const Tensor& x, bool grouped) {
  std::vector<int64_t> sizes(x.shape().begin(), x.shape().end() - 1);
  if (grouped) {
    sizes.insert(sizes.begin(), sizes.back());
    sizes.pop_back();
  }
  return Shape(std::span<const int64_t>(sizes));
}

Tensor group(const Tensor& x, int64_t i) {
  return x ? x.select(x.rank() - 2, i) : Tensor();
}

}  // namespace

RmsNormResult rms_norm_forward(const Tensor& x, const Tensor& weight, float eps, const Tensor& z) {
  const ArgumentCheck check("rms_norm");
  check_inputs(check, x, weight, z);
  require(eps >= 0, "rms_norm: eps is {}, expected 0 or more", eps);
  const bool grouped = is_grouped(weight);
  RmsNormResult result{Tensor::empty_like(x), Tensor::empty(shape_of_inverse(x, grouped), DType::f32, x.device())};
  if (!grouped) {
    FURIOUS_DISPATCH(x.device(), rms_norm_forward(result, x, weight, eps, z));
    return result;
  }
  for (int64_t i = 0; i < weight.size(0); ++i) {
    const RmsNormResult part{group(result.y, i), result.inverse_rms.select(0, i)};
    FURIOUS_DISPATCH(x.device(), rms_norm_forward(part, group(x, i), weight.select(0, i), eps, group(z, i)));
  }
  return result;
}

void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& z) {
  const ArgumentCheck check("rms_norm backward");
  check_inputs(check, x, weight, z);
  const bool grouped = is_grouped(weight);
  const Shape row_shape = shape_of_inverse(x, grouped);
  check.dense("inverse_rms", inverse_rms, DType::f32, {row_shape.begin(), row_shape.end()}, x.device());
  check.rows("dy", dy, x);
  check.rows("dx", out.x, x);
  check.dense("dweight", out.weight, DType::f32, {weight.shape().begin(), weight.shape().end()}, x.device());
  if (z) check.rows("dz", out.z, x);
  require(!z || !out.adds_to_x, "rms_norm backward: a norm with a gate adds to no gradient");
  if (!grouped) {
    FURIOUS_DISPATCH(x.device(), rms_norm_backward(out, dy, x, weight, inverse_rms, z));
    return;
  }
  for (int64_t i = 0; i < weight.size(0); ++i) {
    const RmsNormGradients part{group(out.x, i), out.weight.select(0, i), group(out.z, i), out.adds_to_x};
    FURIOUS_DISPATCH(x.device(), rms_norm_backward(part, group(dy, i), group(x, i), weight.select(0, i),
                                                   inverse_rms.select(0, i), group(z, i)));
  }
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
