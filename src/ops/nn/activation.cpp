#include "ops/nn/activation.h"

#include "ops/nn/activation_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {

Tensor activation_forward(const Tensor& x, Activation activation) {
  const ArgumentCheck check("activation");
  check.rows("x", x);
  Tensor y = Tensor::empty_like(x);
  FURIOUS_DISPATCH(x.device(), activation_forward(y, x, activation));
  return y;
}

void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation) {
  const ArgumentCheck check("activation backward");
  check.rows("x", x);
  check.rows("dx", dx, x);
  check.rows("dy", dy, x);
  FURIOUS_DISPATCH(x.device(), activation_backward(dx, dy, x, activation));
}

Variable activation(Tape& tape, const Variable& x, Activation activation) {
  if (activation == Activation::none) return x;
  return tape.record(activation_forward(x.value(), activation), {x}, [x, activation](const Tensor& dy) {
    const Tensor dx = x.new_gradient();
    activation_backward(dx, dy, x.value(), activation);
    x.add_gradient(dx);
  });
}

}  // namespace furious
