#include "ops/nn/decay.h"

#include "ops/nn/decay_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

// The gradient of a result that is f32 whatever its input is.
void check_f32_rows(const ArgumentCheck& check, std::string_view name, const Tensor& tensor, const Tensor& input) {
  check.shape(name, tensor, {input.shape().begin(), input.shape().end()});
  check.rows(name, tensor);
  check.dtype(name, tensor, {DType::f32});
  check.device(name, tensor, input.device());
}

void check_head_function(const ArgumentCheck& check, const Tensor& x, const Tensor& bias) {
  check.rank("x", x, 3);
  check.rows("x", x);
  if (bias) check.dense("bias", bias, DType::f32, {x.size(2)}, x.device());
}

void check_original_decay(const ArgumentCheck& check, const Tensor& dt, const Tensor& a_log) {
  check.rank("dt", dt, 3);
  check.rows("dt", dt);
  check.dense("A_log", a_log, DType::f32, {dt.size(2)}, dt.device());
}

void check_discretize(const ArgumentCheck& check, const Tensor& v, const Tensor& dt) {
  check.rank("v", v, 4);
  check.rows("v", v);
  check.dense("dt", dt, DType::f32, {v.size(0), v.size(1), v.size(2)}, v.device());
}

void check_d_residual(const ArgumentCheck& check, const Tensor& v, const Tensor& d) {
  check.rank("v", v, 4);
  check.rows("v", v);
  check.dense("D", d, DType::f32, {v.size(2), v.size(3)}, v.device());
}

}  // namespace

Tensor head_function_forward(const Tensor& x, const Tensor& bias, const HeadFunction& function) {
  check_head_function(ArgumentCheck("head_function"), x, bias);
  Tensor y = Tensor::empty(x.shape(), DType::f32, x.device());
  FURIOUS_DISPATCH(x.device(), head_function_forward(y, x, bias, function));
  return y;
}

void head_function_backward(const HeadFunctionGradients& out, const Tensor& dy, const Tensor& x, const Tensor& bias,
                            const HeadFunction& function) {
  const ArgumentCheck check("head_function backward");
  check_head_function(check, x, bias);
  check_f32_rows(check, "dy", dy, x);
  check.rows("dx", out.x, x);
  if (bias) check.dense("dbias", out.bias, DType::f32, {x.size(2)}, x.device());
  FURIOUS_DISPATCH(x.device(), head_function_backward(out, dy, x, bias, function));
}

Tensor original_decay_forward(const Tensor& dt, const Tensor& a_log, float factor) {
  check_original_decay(ArgumentCheck("original_decay"), dt, a_log);
  Tensor a = Tensor::empty(dt.shape(), DType::f32, dt.device());
  FURIOUS_DISPATCH(dt.device(), original_decay_forward(a, dt, a_log, factor));
  return a;
}

void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da, const Tensor& dt, const Tensor& a_log,
                             float factor) {
  const ArgumentCheck check("original_decay backward");
  check_original_decay(check, dt, a_log);
  check_f32_rows(check, "da", da, dt);
  check.rows("ddt", out.dt, dt);
  check.dense("dA_log", out.a_log, DType::f32, {dt.size(2)}, dt.device());
  FURIOUS_DISPATCH(dt.device(), original_decay_backward(out, da, dt, a_log, factor));
}

Tensor discretize_forward(const Tensor& v, const Tensor& dt) {
  check_discretize(ArgumentCheck("discretize"), v, dt);
  Tensor y = Tensor::empty_like(v);
  FURIOUS_DISPATCH(v.device(), discretize_forward(y, v, dt));
  return y;
}

void discretize_backward(const DiscretizeGradients& out, const Tensor& dy, const Tensor& v, const Tensor& dt) {
  const ArgumentCheck check("discretize backward");
  check_discretize(check, v, dt);
  check.rows("dy", dy, v);
  check.rows("dv", out.v, v);
  check.dense("ddt", out.dt, DType::f32, {v.size(0), v.size(1), v.size(2)}, v.device());
  FURIOUS_DISPATCH(v.device(), discretize_backward(out, dy, v, dt));
}

Tensor d_residual_forward(const Tensor& o, const Tensor& v, const Tensor& d) {
  const ArgumentCheck check("d_residual");
  check_d_residual(check, v, d);
  check.rows("o", o, v);
  Tensor y = Tensor::empty_like(v);
  FURIOUS_DISPATCH(v.device(), d_residual_forward(y, o, v, d));
  return y;
}

void d_residual_backward(const DResidualGradients& out, const Tensor& dy, const Tensor& v, const Tensor& d) {
  const ArgumentCheck check("d_residual backward");
  check_d_residual(check, v, d);
  check.rows("dy", dy, v);
  check.rows("dv", out.v, v);
  check.dense("dD", out.d, DType::f32, {v.size(2), v.size(3)}, v.device());
  FURIOUS_DISPATCH(v.device(), d_residual_backward(out, dy, v, d));
}

Variable head_function(Tape& tape, const Variable& x, const Variable& bias, const HeadFunction& function) {
  return tape.record(head_function_forward(x.value(), bias.value(), function), {x, bias}, [=](const Tensor& dy) {
    const HeadFunctionGradients gradients{x.new_gradient(), bias ? bias.new_gradient() : Tensor()};
    head_function_backward(gradients, dy, x.value(), bias.value(), function);
    x.add_gradient(gradients.x);
    if (bias) bias.add_gradient(gradients.bias);
  });
}

Variable original_decay(Tape& tape, const Variable& dt, const Variable& a_log, float factor) {
  return tape.record(original_decay_forward(dt.value(), a_log.value(), factor), {dt, a_log}, [=](const Tensor& da) {
    const OriginalDecayGradients gradients{dt.new_gradient(), a_log.new_gradient()};
    original_decay_backward(gradients, da, dt.value(), a_log.value(), factor);
    dt.add_gradient(gradients.dt);
    a_log.add_gradient(gradients.a_log);
  });
}

Variable discretize(Tape& tape, const Variable& v, const Variable& dt) {
  return tape.record(discretize_forward(v.value(), dt.value()), {v, dt}, [=](const Tensor& dy) {
    const DiscretizeGradients gradients{v.new_gradient(), dt.new_gradient()};
    discretize_backward(gradients, dy, v.value(), dt.value());
    v.add_gradient(gradients.v);
    dt.add_gradient(gradients.dt);
  });
}

Variable d_residual(Tape& tape, const Variable& o, const Variable& v, const Variable& d) {
  return tape.record(d_residual_forward(o.value(), v.value(), d.value()), {o, v, d}, [=](const Tensor& dy) {
    const DResidualGradients gradients{v.new_gradient(), d.new_gradient()};
    d_residual_backward(gradients, dy, v.value(), d.value());
    v.add_gradient(gradients.v);
    d.add_gradient(gradients.d);
    o.add_gradient(dy);
  });
}

}  // namespace furious
