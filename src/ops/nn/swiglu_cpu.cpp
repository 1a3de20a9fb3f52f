#include "ops/nn/swiglu_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/nn/swiglu_cpu.cpp"
#include <hwy/foreach_target.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {

void swiglu_forward(const Tensor& y, const Tensor& gate, const Tensor& up) {
  map_rows([](auto memory, float* to, const float* g, const float* u)
               HWY_ATTR { memory.store(hn::Mul(silu(memory.load(g)), memory.load(u)), to); },
           Rows(y), Rows(gate), Rows(up));
}

void swiglu_backward(const SwigluGradients& out, const Tensor& dy, const Tensor& gate, const Tensor& up) {
  map_rows(
      [](auto memory, float* dgate, float* dup, const float* gradient, const float* g, const float* u) HWY_ATTR {
        const SiluWithDerivative s = silu_with_derivative(memory.load(g));
        const FloatVector d = memory.load(gradient);
        memory.store(hn::Mul(hn::Mul(d, memory.load(u)), s.derivative), dgate);
        memory.store(hn::Mul(d, s.value), dup);
      },
      Rows(out.gate), Rows(out.up), Rows(dy), Rows(gate), Rows(up));
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious::cpu {

HWY_EXPORT(swiglu_forward);
HWY_EXPORT(swiglu_backward);

void swiglu_forward(const Tensor& y, const Tensor& gate, const Tensor& up) {
  HWY_DYNAMIC_DISPATCH(swiglu_forward)(y, gate, up);
}

void swiglu_backward(const SwigluGradients& out, const Tensor& dy, const Tensor& gate, const Tensor& up) {
  HWY_DYNAMIC_DISPATCH(swiglu_backward)(out, dy, gate, up);
}

}  // namespace furious::cpu
#endif
