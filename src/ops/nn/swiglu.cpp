#include "ops/nn/swiglu.h"

#include "base/error.h"
#include "ops/nn/swiglu_kernels.h"
#include "ops/views.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {

Tensor swiglu_forward(const Tensor& gate, const Tensor& up) {
  const ArgumentCheck check("swiglu");
  check.rows("gate", gate);
  check.rows("up", up, gate);
  Tensor y = Tensor::empty_like(gate);
  FURIOUS_DISPATCH(gate.device(), swiglu_forward(y, gate, up));
  return y;
}

void swiglu_backward(const SwigluGradients& out, const Tensor& dy, const Tensor& gate, const Tensor& up) {
  const ArgumentCheck check("swiglu backward");
  check.rows("gate", gate);
  check.rows("up", up, gate);
  check.rows("dy", dy, gate);
  check.rows("dgate", out.gate, gate);
  check.rows("dup", out.up, gate);
  FURIOUS_DISPATCH(gate.device(), swiglu_backward(out, dy, gate, up));
}

Variable swiglu(Tape& tape, const Variable& gate, const Variable& up) {
  return tape.record(swiglu_forward(gate.value(), up.value()), {gate, up}, [gate, up](const Tensor& dy) {
    const SwigluGradients d{gate.new_gradient(), up.new_gradient()};
    swiglu_backward(d, dy, gate.value(), up.value());
    gate.add_gradient(d.gate);
    up.add_gradient(d.up);
  });
}

Variable swiglu(Tape& tape, const Variable& gate_and_up) {
  const Tensor& value = gate_and_up.value();
  ArgumentCheck("swiglu").rows("gate_and_up", value);
  require(value.size(-1) % 2 == 0, "swiglu: argument \"gate_and_up\" has shape {}, expected an even last dimension",
          to_string(value.shape()));
  const std::vector<Variable> halves = split(tape, gate_and_up, {value.size(-1) / 2, value.size(-1) / 2});
  return swiglu(tape, halves[0], halves[1]);
}

}  // namespace furious
