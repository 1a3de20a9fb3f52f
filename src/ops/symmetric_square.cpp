#include "ops/symmetric_square.h"

#include "ops/symmetric_square_kernels.h"
#include "tensor/check.h"

namespace furious {
namespace {

Shape feature_shape(const Tensor& x) {
  Shape shape = x.shape();
  shape[shape.rank() - 1] = symmetric_square_size(x.size(-1));
  return shape;
}

}  // namespace

Tensor symmetric_square_forward(const Tensor& x) {
  ArgumentCheck("symmetric_square").rows("x", x);
  Tensor y = Tensor::empty(feature_shape(x), DType::f32);
  cpu::symmetric_square_forward(y, x);
  return y;
}

void symmetric_square_backward(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  const ArgumentCheck check("symmetric_square backward");
  check.rows("x", x);
  check.rows("dx", dx, x);
  const Shape features = feature_shape(x);
  check.shape("dy", dy, {features.begin(), features.end()});
  check.rows("dy", dy);
  cpu::symmetric_square_backward(dx, dy, x);
}

Variable symmetric_square(Tape& tape, const Variable& x) {
  return tape.record(symmetric_square_forward(x.value()), {x}, [x](const Tensor& dy) {
    const Tensor dx = x.new_gradient();
    symmetric_square_backward(dx, dy, x.value());
    x.add_gradient(dx);
  });
}

}  // namespace furious
