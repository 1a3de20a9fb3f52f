// Activations as functions of vectors, for the kernels that apply one; see simd-inl.h.
#if defined(FURIOUS_OPS_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_ACTIVATION_INL_H_
#undef FURIOUS_OPS_ACTIVATION_INL_H_
#else
#define FURIOUS_OPS_ACTIVATION_INL_H_
#endif

#include "ops/nn/activation.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {

// Beyond ± this, gelu_tanh is x or 0 to the last bit, and x² may overflow.
constexpr float kGeluEnd = 10;

// The exponent of gelu_tanh.
HWY_INLINE FloatVector gelu_exponent(FloatVector x) {
  return hn::Mul(x, hn::MulAdd(hn::Mul(x, x), set(kGeluCubic), set(kGeluLinear)));
}

template <Activation kActivation>
HWY_INLINE FloatVector activate(FloatVector x) {
  if constexpr (kActivation == Activation::relu) return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(kTag)), x);
  if constexpr (kActivation == Activation::silu) return silu(x);
  if constexpr (kActivation == Activation::softplus) return softplus(x);
  if constexpr (kActivation == Activation::softplus2) return hn::Mul(x, softplus(x));
  if constexpr (kActivation == Activation::sigmoid) return hn::IfThenElse(hn::IsNaN(x), x, sigmoid(x).value);
  if constexpr (kActivation == Activation::log_sigmoid) return hn::Neg(softplus(hn::Neg(x)));
  if constexpr (kActivation == Activation::gelu_tanh) return hn::Mul(x, sigmoid(gelu_exponent(x)).value);
  return x;
}

// dx for the gradient dy of activate(x).
template <Activation kActivation>
HWY_INLINE FloatVector activation_gradient(FloatVector x, FloatVector dy) {
  if constexpr (kActivation == Activation::relu) return hn::IfThenElseZero(hn::Gt(x, hn::Zero(kTag)), dy);
  if constexpr (kActivation == Activation::silu) return hn::Mul(dy, silu_with_derivative(x).derivative);
  if constexpr (kActivation == Activation::softplus) return hn::Mul(dy, sigmoid(x).value);
  if constexpr (kActivation == Activation::softplus2) return hn::Mul(dy, hn::MulAdd(x, sigmoid(x).value, softplus(x)));
  if constexpr (kActivation == Activation::sigmoid) {
    const Sigmoid s = sigmoid(x);
    return hn::Mul(dy, hn::Mul(s.value, s.complement));
  }
  if constexpr (kActivation == Activation::log_sigmoid) return hn::Mul(dy, sigmoid(x).complement);
  if constexpr (kActivation == Activation::gelu_tanh) {
    const FloatVector below = hn::IfThenElse(hn::Gt(x, set(kGeluEnd)), set(kGeluEnd), x);  // NaN stays NaN
    const FloatVector at = hn::IfThenElse(hn::Lt(below, set(-kGeluEnd)), set(-kGeluEnd), below);
    const Sigmoid s = sigmoid(gelu_exponent(at));
    const FloatVector slope = hn::MulAdd(hn::Mul(at, at), set(3 * kGeluCubic), set(kGeluLinear));
    return hn::Mul(dy, hn::MulAdd(hn::Mul(at, slope), hn::Mul(s.value, s.complement), s.value));
  }
  return dy;
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
