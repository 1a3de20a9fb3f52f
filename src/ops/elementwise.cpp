#include "ops/elementwise.h"

#include <vector>

#include "base/parallel.h"
#include "ops/elementwise_kernels.h"
#include "ops/rows.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  return {tensor.shape().begin(), tensor.shape().end()};
}

int64_t inner_step(const Tensor& tensor) {
  return tensor.is_contiguous() ? 1 : tensor.stride(-1);
}

// Calls f(to, from, count) for runs of elements that are evenly spaced in both of two tensors of one shape: rows, or
// any stretch where both are contiguous.
template <class To, class From, class F>
void for_each_run(const Tensor& out, const Tensor& in, F&& f) {
  if (out.elements() == 0) return;
  if (out.is_contiguous() && in.is_contiguous()) {
    To* const to = out.data<To>();
    const From* const from = in.data<From>();
    parallel_rows(out.elements(), 1, [&](int64_t begin, int64_t end) { f(to + begin, from + begin, end - begin); });
    return;
  }
  const Rows<To> to(out);
  const Rows<From> from(in);
  parallel_rows(to.count(), to.size(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(to[row], from[row], to.size());
  });
}

template <class To, class From>
To converted(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else
    return static_cast<To>(static_cast<float>(value));
}

template <class To, class From>
void copy_runs(const Tensor& out, const Tensor& in) {
  const int64_t step_out = inner_step(out);
  const int64_t step_in = inner_step(in);
  for_each_run<To, From>(out, in, [&](To* __restrict to, const From* __restrict from, int64_t count) {
    if (step_out == 1 && step_in == 1)
      for (int64_t i = 0; i < count; ++i) to[i] = converted<To>(from[i]);
    else
      for (int64_t i = 0; i < count; ++i) to[i * step_out] = converted<To>(from[i * step_in]);
  });
}

}  // namespace

namespace cpu {

void fill(const Tensor& out, float value) {
  with_float_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for_each_run<T, T>(out, out,
                       [&](T* to, const T*, int64_t count) { std::fill_n(to, count, static_cast<T>(value)); });
  });
}

void copy(const Tensor& out, const Tensor& in) {
  if (out.dtype() == DType::i32) return copy_runs<int32_t, int32_t>(out, in);
  with_float_type(out.dtype(), [&](auto to) {
    with_float_type(in.dtype(), [&](auto from) { copy_runs<decltype(to), decltype(from)>(out, in); });
  });
}

void add_into(const Tensor& out, const Tensor& in) {
  for_each_run<float, float>(out, in, [](float* __restrict to, const float* __restrict from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  });
}

}  // namespace cpu

void fill(const Tensor& out, float value) {
  const ArgumentCheck check("fill");
  check.present("out", out);
  if (!out.is_contiguous()) check.unit_inner_stride("out", out);
  FURIOUS_DISPATCH(out.device(), fill(out, value));
}

void copy(const Tensor& out, const Tensor& in) {
  const ArgumentCheck check("copy");
  check.present("out", out);
  check.shape("in", in, sizes_of(out));
  check.device("in", in, out.device());
  if (out.dtype() == DType::i32 || in.dtype() == DType::i32) {
    check.dtype("in", in, {DType::i32});
    check.dtype("out", out, {DType::i32});
  }
  FURIOUS_DISPATCH(out.device(), copy(out, in));
}

void add_into(const Tensor& out, const Tensor& in) {
  const ArgumentCheck check("add_into");
  check.rows("out", out);
  check.rows("in", in, out);
  FURIOUS_DISPATCH(out.device(), add_into(out, in));
}

Tensor to_dtype(const Tensor& in, DType dtype) {
  Tensor out = Tensor::empty(in.shape(), dtype, in.device());
  copy(out, in);
  return out;
}

Tensor add_forward(const Tensor& a, const Tensor& b) {
  Tensor out = to_dtype(a, a.dtype());
  add_into(out, b);
  return out;
}

Tensor concat_forward(const Tensor& a, const Tensor& b) {
  const ArgumentCheck check("concat");
  check.present("a", a);
  check.present("b", b);
  check.dtype("b", b, {a.dtype()});
  Shape shape = a.shape();
  shape[a.rank() - 1] = a.size(-1) + b.size(-1);
  Tensor out = Tensor::empty(shape, a.dtype(), a.device());
  copy(out.slice(-1, 0, a.size(-1)), a);
  copy(out.slice(-1, a.size(-1), b.size(-1)), b);
  return out;
}

Variable concat(Tape& tape, const Variable& a, const Variable& b) {
  return tape.record(concat_forward(a.value(), b.value()), {a, b}, [a, b](const Tensor& gradient) {
    int64_t start = 0;
    for (const Variable& x : {a, b}) {
      const Tensor dx = x.new_gradient();
      copy(dx, gradient.slice(-1, start, x.value().size(-1)));
      x.add_gradient(dx);
      start += x.value().size(-1);
    }
  });
}

Variable add(Tape& tape, const Variable& a, const Variable& b) {
  return tape.record(add_forward(a.value(), b.value()), {a, b}, [a, b](const Tensor& gradient) {
    // One takes the gradient over, the other a copy: each may be added to later.
    const bool both = a.needs_gradient() && b.needs_gradient();
    if (both) b.add_gradient(to_dtype(gradient, gradient.dtype()));
    (a.needs_gradient() ? a : b).add_gradient(gradient);
  });
}

}  // namespace furious
