#include "ops/nn/decay_kernels.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/nn/decay_cpu.cpp"
#include <hwy/foreach_target.h>

#include "ops/block_sum.h"
#include "ops/nn/activation-inl.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious::HWY_NAMESPACE {
namespace {

// −factor · exp(A_log) of every head.
Tensor rates(const Tensor& a_log, float factor) {
  Tensor result = Tensor::empty_like(a_log);
  const float* const from = a_log.data<float>();
  std::transform(from, from + a_log.elements(), result.data<float>(),
                 [factor](float value) { return -factor * std::exp(value); });
  return result;
}

Tensor or_zeros(const Tensor& bias, int64_t size) {
  return bias ? bias : Tensor::zeros({size}, DType::f32);
}

// Before the limits.
template <Activation kActivation>
HWY_INLINE FloatVector scaled(FloatVector x, float factor) {
  return hn::Mul(set(factor), activate<kActivation>(x));
}

// Adds this row to dbias.
template <Activation kActivation>
void head_function_backward_row(float* dx, float* dbias, const float* dy, const float* x, const float* bias,
                                const HeadFunction& function, int64_t n) {
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    const FloatVector at = hn::Add(memory.load(x + i), memory.load(bias + i));
    const FloatVector slope = activation_gradient<kActivation>(at, hn::Mul(memory.load(dy + i), set(function.factor)));
    const FloatVector y = scaled<kActivation>(at, function.factor);
    const auto cut = hn::Or(hn::Gt(y, set(function.limit)), hn::Lt(y, set(function.least)));
    const FloatVector d = hn::IfThenZeroElse(cut, slope);
    memory.store(d, dx + i);
    memory.store(hn::Add(memory.load(dbias + i), d), dbias + i);
  });
}

// Adds this row to da_log.
void original_decay_backward_row(float* ddt, float* da_log, const float* da, const float* dt, const float* rate,
                                 int64_t n) {
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    const FloatVector d = hn::Mul(memory.load(da + i), memory.load(rate + i));
    memory.store(d, ddt + i);
    memory.store(hn::MulAdd(d, memory.load(dt + i), memory.load(da_log + i)), da_log + i);
  });
}

void discretize_row(float* y, const float* v, float dt, int64_t n) {
  for_each_vector(n,
                  [&](int64_t i, auto memory) HWY_ATTR { memory.store(hn::Mul(memory.load(v + i), set(dt)), y + i); });
}

// Returns this row's ddt.
float discretize_backward_row(float* dv, const float* dy, const float* v, float dt, int64_t n) {
  FloatVector products = hn::Zero(kTag);
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    const FloatVector d = memory.load(dy + i);
    memory.store(hn::Mul(d, set(dt)), dv + i);
    products = hn::MulAdd(d, memory.load(v + i), products);
  });
  return sum_of_lanes(products);
}

// Adds this row to dd.
void d_residual_backward_row(float* dv, float* dd, const float* dy, const float* v, const float* d, int64_t n) {
  for_each_vector(n, [&](int64_t i, auto memory) HWY_ATTR {
    const FloatVector gradient = memory.load(dy + i);
    memory.store(hn::Mul(gradient, memory.load(d + i)), dv + i);
    memory.store(hn::MulAdd(gradient, memory.load(v + i), memory.load(dd + i)), dd + i);
  });
}

}  // namespace

void head_function_forward(const Tensor& y, const Tensor& x, const Tensor& bias, const HeadFunction& function) {
  const Tensor offset = or_zeros(bias, x.size(-1));
  const float factor = function.factor, limit = function.limit, least = function.least;
  with_activation(function.f, [&](auto kind) {
    map_rows(
        [=](auto memory, float* to, const float* from, const float* shift) HWY_ATTR {
          const FloatVector value = scaled<kind>(hn::Add(memory.load(from), memory.load(shift)), factor);
          const FloatVector above = hn::IfThenElse(hn::Lt(value, set(least)), set(least), value);  // NaN stays NaN
          memory.store(hn::IfThenElse(hn::Gt(above, set(limit)), set(limit), above), to);
        },
        Rows(y), Rows(x), RepeatedRows(offset));
  });
}

void head_function_backward(const HeadFunctionGradients& out, const Tensor& dy_tensor, const Tensor& x_tensor,
                            const Tensor& bias, const HeadFunction& function) {
  const Rows dx(out.x);
  const Rows dy(dy_tensor);
  const Rows x(x_tensor);
  const Tensor offset = or_zeros(bias, x.size());
  const BlockSum sum(x.count(), x.size());
  with_activation(function.f, [&](auto kind) {
    sum.run([&](int64_t begin, int64_t end, float* dbias) {
      for (int64_t row = begin; row < end; ++row)
        head_function_backward_row<kind>(dx[row], dbias, dy[row], x[row], offset.data<float>(), function, x.size());
    });
  });
  if (bias) sum.write(out.bias);
}

void original_decay_forward(const Tensor& a, const Tensor& dt, const Tensor& a_log, float factor) {
  const Tensor rate = rates(a_log, factor);
  map_rows([](auto memory, float* to, const float* step, const float* rate_of_head)
               HWY_ATTR { memory.store(hn::Mul(memory.load(step), memory.load(rate_of_head)), to); },
           Rows(a), Rows(dt), RepeatedRows(rate));
}

void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da_tensor, const Tensor& dt_tensor,
                             const Tensor& a_log, float factor) {
  const Rows ddt(out.dt);
  const Rows da(da_tensor);
  const Rows dt(dt_tensor);
  const Tensor rate = rates(a_log, factor);
  const BlockSum sum(dt.count(), dt.size());
  sum.run([&](int64_t begin, int64_t end, float* da_log) {
    for (int64_t row = begin; row < end; ++row)
      original_decay_backward_row(ddt[row], da_log, da[row], dt[row], rate.data<float>(), dt.size());
  });
  sum.write(out.a_log);
}

void discretize_forward(const Tensor& y_tensor, const Tensor& v_tensor, const Tensor& dt_tensor) {
  const Rows y(y_tensor);
  const Rows v(v_tensor);
  const float* const dt = dt_tensor.data<float>();
  parallel_rows(v.count(), v.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) discretize_row(y[row], v[row], dt[row], v.size());
  });
}

void discretize_backward(const DiscretizeGradients& out, const Tensor& dy_tensor, const Tensor& v_tensor,
                         const Tensor& dt_tensor) {
  const Rows dv(out.v);
  const Rows dy(dy_tensor);
  const Rows v(v_tensor);
  const float* const dt = dt_tensor.data<float>();
  float* const ddt = out.dt.data<float>();
  parallel_rows(v.count(), v.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      ddt[row] = discretize_backward_row(dv[row], dy[row], v[row], dt[row], v.size());
  });
}

void d_residual_forward(const Tensor& y, const Tensor& o, const Tensor& v, const Tensor& d) {
  map_rows([](auto memory, float* to, const float* from, const float* value, const float* factor)
               HWY_ATTR { memory.store(hn::MulAdd(memory.load(factor), memory.load(value), memory.load(from)), to); },
           Rows(y), Rows(o), Rows(v), RepeatedRows(d));
}

void d_residual_backward(const DResidualGradients& out, const Tensor& dy_tensor, const Tensor& v_tensor,
                         const Tensor& d) {
  const Rows dv(out.v);
  const Rows dy(dy_tensor);
  const Rows v(v_tensor);
  const RepeatedRows factor(d);
  const int64_t heads = d.size(0);
  const BlockSum sum(v_tensor.size(0) * v_tensor.size(1), d.elements());
  sum.run([&](int64_t begin, int64_t end, float* dd) {
    for (int64_t row = begin * heads; row < end * heads; ++row)
      d_residual_backward_row(dv[row], dd + row % heads * v.size(), dy[row], v[row], factor[row], v.size());
  });
  sum.write(out.d);
}

}  // namespace furious::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious::cpu {

HWY_EXPORT(head_function_forward);
HWY_EXPORT(head_function_backward);
HWY_EXPORT(original_decay_forward);
HWY_EXPORT(original_decay_backward);
HWY_EXPORT(discretize_forward);
HWY_EXPORT(discretize_backward);
HWY_EXPORT(d_residual_forward);
HWY_EXPORT(d_residual_backward);

void head_function_forward(const Tensor& y, const Tensor& x, const Tensor& bias, const HeadFunction& function) {
  HWY_DYNAMIC_DISPATCH(head_function_forward)(y, x, bias, function);
}

void head_function_backward(const HeadFunctionGradients& out, const Tensor& dy, const Tensor& x, const Tensor& bias,
                            const HeadFunction& function) {
  HWY_DYNAMIC_DISPATCH(head_function_backward)(out, dy, x, bias, function);
}

void original_decay_forward(const Tensor& a, const Tensor& dt, const Tensor& a_log, float factor) {
  HWY_DYNAMIC_DISPATCH(original_decay_forward)(a, dt, a_log, factor);
}

void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da, const Tensor& dt, const Tensor& a_log,
                             float factor) {
  HWY_DYNAMIC_DISPATCH(original_decay_backward)(out, da, dt, a_log, factor);
}

void discretize_forward(const Tensor& y, const Tensor& v, const Tensor& dt) {
  HWY_DYNAMIC_DISPATCH(discretize_forward)(y, v, dt);
}

void discretize_backward(const DiscretizeGradients& out, const Tensor& dy, const Tensor& v, const Tensor& dt) {
  HWY_DYNAMIC_DISPATCH(discretize_backward)(out, dy, v, dt);
}

void d_residual_forward(const Tensor& y, const Tensor& o, const Tensor& v, const Tensor& d) {
  HWY_DYNAMIC_DISPATCH(d_residual_forward)(y, o, v, d);
}

void d_residual_backward(const DResidualGradients& out, const Tensor& dy, const Tensor& v, const Tensor& d) {
  HWY_DYNAMIC_DISPATCH(d_residual_backward)(out, dy, v, d);
}

}  // namespace furious::cpu
#endif
