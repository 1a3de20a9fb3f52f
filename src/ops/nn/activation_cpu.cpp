#include "ops/nn/activation_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/nn/activation_cpu.cpp"
#include <hwy/foreach_target.h>

#include "ops/nn/activation-inl.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {

namespace {

template <Activation kKind>
void forward(const Tensor& y, const Tensor& x) {
  map_rows([](auto memory, float* to, const float* from)
               HWY_ATTR { memory.store(activate<kKind>(memory.load(from)), to); },
           Rows(y), Rows(x));
}

template <Activation kKind>
void backward(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  map_rows([](auto memory, float* to, const float* gradient, const float* value)
               HWY_ATTR { memory.store(activation_gradient<kKind>(memory.load(value), memory.load(gradient)), to); },
           Rows(dx), Rows(dy), Rows(x));
}

}  // namespace

void activation_forward(const Tensor& y, const Tensor& x, Activation activation) {
  with_activation(activation, [&](auto kind) { forward<kind>(y, x); });
}

void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation) {
  with_activation(activation, [&](auto kind) { backward<kind>(dx, dy, x); });
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious::cpu {

HWY_EXPORT(activation_forward);
HWY_EXPORT(activation_backward);

void activation_forward(const Tensor& y, const Tensor& x, Activation activation) {
  HWY_DYNAMIC_DISPATCH(activation_forward)(y, x, activation);
}

void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation) {
  HWY_DYNAMIC_DISPATCH(activation_backward)(dx, dy, x, activation);
}

}  // namespace furious::cpu
#endif
