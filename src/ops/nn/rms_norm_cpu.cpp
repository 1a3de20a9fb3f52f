#include "ops/nn/rms_norm_kernels.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/nn/rms_norm_cpu.cpp"
#include <hwy/foreach_target.h>

#include "ops/block_sum.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {
namespace {

template <bool kGated, class Memory>
HWY_INLINE FloatVector load_gated(Memory memory, const float* x, const float* z) {
  if constexpr (kGated) return hn::Mul(memory.load(x), silu(memory.load(z)));
  return memory.load(x);
}

template <bool kGated>
float forward_row(float* y, const float* x, const float* z, const float* weight, float eps, int64_t n) {
  FloatVector squares = hn::Zero(kTag);
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    const FloatVector u = load_gated<kGated>(memory, x + i, z + i);
    squares = hn::MulAdd(u, u, squares);
    // The gate costs an exponential: keep its result where y will be.
    if constexpr (kGated) memory.store(u, y + i);
  });
  const float r = 1.0f / std::sqrt(sum_of_lanes(squares) / static_cast<float>(n) + eps);
  const float* const u = kGated ? y : x;
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    memory.store(hn::Mul(hn::Mul(memory.load(u + i), set(r)), memory.load(weight + i)), y + i);
  });
  return r;
}

// Adds this row's share of dweight to `dweight`. With a gate, dx and dz keep silu(z) and its derivative from the first
// pass for the second, which spares an exponential; without one, dz is not used.
template <bool kGated, bool kAdds>
void backward_row(float* dx, float* dz, float* dweight, const float* dy, const float* x, const float* z,
                  const float* weight, float r, int64_t n) {
  FloatVector products = hn::Zero(kTag);
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    FloatVector normed = hn::Mul(memory.load(x + i), set(r));
    if constexpr (kGated) {
      const SiluWithDerivative gate = silu_with_derivative(memory.load(z + i));
      normed = hn::Mul(normed, gate.value);
      memory.store(gate.value, dx + i);
      memory.store(gate.derivative, dz + i);
    }
    const FloatVector d = memory.load(dy + i);
    products = hn::MulAdd(hn::Mul(d, memory.load(weight + i)), normed, products);
    memory.store(hn::MulAdd(d, normed, memory.load(dweight + i)), dweight + i);
  });
  const FloatVector mean = set(sum_of_lanes(products) / static_cast<float>(n));
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    const FloatVector value = memory.load(x + i);
    const FloatVector gate = kGated ? memory.load(dx + i) : set(1.0f);
    const FloatVector dnormed = hn::Mul(memory.load(dy + i), memory.load(weight + i));
    const FloatVector normed = hn::Mul(hn::Mul(value, set(r)), gate);
    const FloatVector du = hn::Mul(set(r), hn::NegMulAdd(normed, mean, dnormed));
    memory.store(kAdds ? hn::Add(memory.load(dx + i), du) : hn::Mul(du, gate), dx + i);
    if constexpr (kGated) memory.store(hn::Mul(hn::Mul(du, value), memory.load(dz + i)), dz + i);
  });
}

template <bool kGated>
void forward(const RmsNormResult& out, const Tensor& x_tensor, const Tensor& weight, float eps,
             const Tensor& z_tensor) {
  const Rows y(out.y);
  const Rows x(x_tensor);
  const Rows z(kGated ? z_tensor : x_tensor);
  float* const inverse_rms = out.inverse_rms.data<float>();
  parallel_rows(x.count(), x.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      inverse_rms[row] = forward_row<kGated>(y[row], x[row], z[row], weight.data<float>(), eps, x.size());
  });
}

template <bool kGated, bool kAdds = false>
void backward(const RmsNormGradients& out, const Tensor& dy_tensor, const Tensor& x_tensor, const Tensor& weight,
              const Tensor& inverse_rms, const Tensor& z_tensor) {
  const Rows dx(out.x);
  const Rows dz(kGated ? out.z : out.x);
  const Rows dy(dy_tensor);
  const Rows x(x_tensor);
  const Rows z(kGated ? z_tensor : x_tensor);
  const float* const r = inverse_rms.data<float>();
  const BlockSum sum(x.count(), x.size());
  sum.run([&](int64_t begin, int64_t end, float* dweight) {
    for (int64_t row = begin; row < end; ++row)
      backward_row<kGated, kAdds>(dx[row], dz[row], dweight, dy[row], x[row], z[row], weight.data<float>(), r[row],
                                  x.size());
  });
  sum.write(out.weight);
}

}  // namespace

void rms_norm_forward(const RmsNormResult& out, const Tensor& x, const Tensor& weight, float eps, const Tensor& z) {
  if (z)
    forward<true>(out, x, weight, eps, z);
  else
    forward<false>(out, x, weight, eps, z);
}

void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& z) {
  if (z)
    backward<true>(out, dy, x, weight, inverse_rms, z);
  else if (out.adds_to_x)
    backward<false, true>(out, dy, x, weight, inverse_rms, z);
  else
    backward<false>(out, dy, x, weight, inverse_rms, z);
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious::cpu {

HWY_EXPORT(rms_norm_forward);
HWY_EXPORT(rms_norm_backward);

void rms_norm_forward(const RmsNormResult& out, const Tensor& x, const Tensor& weight, float eps, const Tensor& z) {
  HWY_DYNAMIC_DISPATCH(rms_norm_forward)(out, x, weight, eps, z);
}

void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& z) {
  HWY_DYNAMIC_DISPATCH(rms_norm_backward)(out, dy, x, weight, inverse_rms, z);
}

}  // namespace furious::cpu
#endif
