// Activations as functions of vectors, for the kernels that apply one; see simd-inl.h.
#if defined(FURIOUS_OPS_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURIOUS_OPS_ACTIVATION_INL_H_
#undef FURIOUS_OPS_ACTIVATION_INL_H_
#else
#define FURIOUS_OPS_ACTIVATION_INL_H_
#endif

#include "ops/activation.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {

template <Activation kActivation>
HWY_INLINE FloatVector activate(FloatVector x) {
  if constexpr (kActivation == Activation::relu) return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(Floats())), x);
  if constexpr (kActivation == Activation::silu) return silu(x);
  return x;
}

// dx for the gradient dy of activate(x).
template <Activation kActivation>
HWY_INLINE FloatVector activation_gradient(FloatVector x, FloatVector dy) {
  if constexpr (kActivation == Activation::relu) return hn::IfThenElseZero(hn::Gt(x, hn::Zero(Floats())), dy);
  if constexpr (kActivation == Activation::silu) return hn::Mul(dy, silu_with_derivative(x).derivative);
  return dy;
}

// Calls f with the activation as a compile-time constant.
template <class F>
void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::none:
      return f(std::integral_constant<Activation, Activation::none>());
    case Activation::relu:
      return f(std::integral_constant<Activation, Activation::relu>());
    case Activation::silu:
      return f(std::integral_constant<Activation, Activation::silu>());
  }
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
