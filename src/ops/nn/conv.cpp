#include "ops/nn/conv.h"

#include "base/error.h"
#include "ops/boundaries.h"
#include "ops/elementwise.h"
#include "ops/nn/conv_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

void check_window(const ArgumentCheck& check, int64_t window) {
  require(window >= 2 && window <= 4, "{}: a window of {} tokens, expected 2, 3 or 4", check.operation(), window);
}

void check_parameters(const ArgumentCheck& check, const Tensor& x, const Tensor& weight, const Tensor& bias,
                      Activation activation) {
  require(activation <= Activation::silu, "{}: an activation that it does not know, expected none, relu or silu",
          check.operation());
  check.dense("weight", weight, DType::f32, {x.size(-1), ArgumentCheck::kAny}, x.device());
  if (bias) check.dense("bias", bias, DType::f32, {x.size(-1)}, x.device());
  check_window(check, weight.size(1));
}

void check_input(const ArgumentCheck& check, const Tensor& x) {
  check.rank("x", x, 3);
  check.rows("x", x);
}

void check_state(const ArgumentCheck& check, const Tensor& state, int64_t window, const Tensor& x) {
  check.dense("state", state, DType::f32, {x.size(0), window - 1, x.size(-1)}, x.device());
}

Tensor or_zeros(const Tensor& bias, const Tensor& weight) {
  return bias ? bias : Tensor::zeros({weight.size(0)}, DType::f32, weight.device());
}

}  // namespace

Tensor conv_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation,
                    const Tensor& boundaries, const Tensor& state) {
  const ArgumentCheck check("conv");
  check_input(check, x);
  check_parameters(check, x, weight, bias, activation);
  if (state) check_state(check, state, weight.size(1), x);
  const std::vector<Segment> segments = segments_of("conv", boundaries, x.size(0), x.size(1));
  Tensor y = Tensor::empty_like(x);
  FURIOUS_DISPATCH(x.device(), conv_forward(y, x, weight, or_zeros(bias, weight), activation, segments, state));
  return y;
}

Tensor conv_state(const Tensor& x, int64_t window, const Tensor& boundaries, const Tensor& state) {
  const ArgumentCheck check("conv_state");
  check_input(check, x);
  check_window(check, window);
  const int64_t past = window - 1;
  if (state) check_state(check, state, window, x);
  Tensor result = Tensor::zeros({x.size(0), past, x.size(2)}, DType::f32, x.device());
  // Of some rows, whose last document starts at `begin`.
  const auto carry = [&](const Tensor& to, const Tensor& from, const Tensor& before, int64_t begin) {
    const int64_t kept = std::min(past, x.size(1) - begin);
    copy(to.slice(-2, past - kept, kept), from.slice(-2, x.size(1) - kept, kept));
    if (before && begin == 0) copy(to.slice(-2, 0, past - kept), before.slice(-2, kept, past - kept));
  };
  const std::vector<Segment> segments = segments_of("conv_state", boundaries, x.size(0), x.size(1));
  if (static_cast<int64_t>(segments.size()) <= x.size(0)) {
    carry(result, x, state, 0);
    return result;
  }
  for (const Segment& segment : segments)
    if (segment.end == x.size(1))
      carry(result.select(0, segment.batch), x.select(0, segment.batch),
            state ? state.select(0, segment.batch) : Tensor(), segment.begin);
  return result;
}

Tensor conv_step(const Tensor& state, const SlotRows& rows, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 Activation activation) {
  const ArgumentCheck check("conv_step");
  check.rank("x", x, 2);
  check.rows("x", x);
  check_parameters(check, x, weight, bias, activation);
  check.dense("state", state, DType::f32, {ArgumentCheck::kAny, weight.size(1) - 1, x.size(1)}, x.device());
  check_slots(check, rows, x.size(0), state.size(0), x.device());
  Tensor y = Tensor::empty_like(x);
  FURIOUS_DISPATCH(x.device(), conv_step(y, state, rows.table, x, weight, or_zeros(bias, weight), activation));
  return y;
}

void conv_backward(const ConvGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& bias, Activation activation, const Tensor& boundaries) {
  const ArgumentCheck check("conv backward");
  check_input(check, x);
  check_parameters(check, x, weight, bias, activation);
  check.rows("dy", dy, x);
  check.rows("dx", out.x, x);
  check.dense("dweight", out.weight, DType::f32, {weight.size(0), weight.size(1)}, x.device());
  if (bias) check.dense("dbias", out.bias, DType::f32, {bias.size(0)}, x.device());
  const std::vector<Segment> segments = segments_of("conv backward", boundaries, x.size(0), x.size(1));
  ConvGradients all = out;
  if (!bias) all.bias = Tensor::empty({weight.size(0)}, DType::f32, x.device());
  FURIOUS_DISPATCH(x.device(), conv_backward(all, dy, x, weight, or_zeros(bias, weight), activation, segments));
}

Variable conv(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias, Activation activation,
              const Tensor& boundaries) {
  Tensor y = conv_forward(x.value(), weight.value(), bias.value(), activation, boundaries);
  return tape.record(std::move(y), {x, weight, bias}, [=](const Tensor& dy) {
    const ConvGradients d{x.new_gradient(), weight.new_gradient(), bias ? bias.new_gradient() : Tensor()};
    conv_backward(d, dy, x.value(), weight.value(), bias.value(), activation, boundaries);
    x.add_gradient(d.x);
    weight.add_gradient(d.weight);
    if (bias) bias.add_gradient(d.bias);
  });
}

}  // namespace furious
