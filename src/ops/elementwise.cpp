#include "ops/elementwise.h"

#include "base/error.h"
#include "base/parallel.h"
#include "tensor/check.h"

namespace furious {
namespace {

constexpr int64_t kGrain = 1 << 15;

// Calls f(offset_out, offset_in) for the first element of every innermost row of two tensors of one shape.
template <class F>
void for_each_row(const Tensor& out, const Tensor& in, F&& f) {
  const int outer = out.rank() - 1;
  int64_t rows = 1;
  for (int i = 0; i < outer; ++i) rows *= out.size(i);
  parallel_ranges(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(out.size(-1), 1)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      int64_t rest = row;
                      int64_t offset_out = 0;
                      int64_t offset_in = 0;
                      for (int i = outer - 1; i >= 0; --i) {
                        offset_out += rest % out.size(i) * out.stride(i);
                        offset_in += rest % out.size(i) * in.stride(i);
                        rest /= out.size(i);
                      }
                      f(offset_out, offset_in);
                    }
                  });
}

template <class To, class From>
void copy_rows(const Tensor& out, const Tensor& in) {
  const int64_t length = out.size(-1);
  const int64_t step_out = out.stride(-1);
  const int64_t step_in = in.stride(-1);
  To* const to = out.data<To>();
  const From* const from = in.data<From>();
  for_each_row(out, in, [&](int64_t offset_out, int64_t offset_in) {
    To* row_out = to + offset_out;
    const From* row_in = from + offset_in;
    for (int64_t i = 0; i < length; ++i) {
      const From value = row_in[i * step_in];
      if constexpr (std::is_same_v<To, From>)
        row_out[i * step_out] = value;
      else
        row_out[i * step_out] = static_cast<To>(static_cast<float>(value));
    }
  });
}

}  // namespace

void fill(const Tensor& out, float value) {
  const ArgumentCheck check("fill");
  check.device("out", out, {});
  check.contiguous("out", out);
  with_float_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* data = out.data<T>();
    std::fill(data, data + out.elements(), static_cast<T>(value));
  });
}

void copy(const Tensor& out, const Tensor& in) {
  const ArgumentCheck check("copy");
  check.device("out", out, {});
  check.device("in", in, {});
  check.shape("in", in, {out.shape().begin(), out.shape().end()});
  if (out.rank() == 0 || out.elements() == 0) {
    require(out.elements() == 0, "copy: tensors of rank 0 are not supported");
    return;
  }
  if (out.dtype() == DType::i32 || in.dtype() == DType::i32) {
    check.dtype("in", in, {DType::i32});
    check.dtype("out", out, {DType::i32});
    copy_rows<int32_t, int32_t>(out, in);
    return;
  }
  with_float_type(out.dtype(), [&](auto to) {
    with_float_type(in.dtype(), [&](auto from) { copy_rows<decltype(to), decltype(from)>(out, in); });
  });
}

void add_into(const Tensor& out, const Tensor& in) {
  const ArgumentCheck check("add_into");
  const std::vector<int64_t> shape(out.shape().begin(), out.shape().end());
  check.dense("out", out, DType::f32, shape);
  check.dense("in", in, DType::f32, shape);
  float* to = out.data<float>();
  const float* from = in.data<float>();
  parallel_ranges(out.elements(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] += from[i];
  });
}

Tensor to_dtype(const Tensor& in, DType dtype) {
  Tensor out = Tensor::empty(in.shape(), dtype, in.device());
  copy(out, in);
  return out;
}

Tensor add_forward(const Tensor& a, const Tensor& b) {
  Tensor out = to_dtype(a, DType::f32);
  add_into(out, b);
  return out;
}

Variable add(Tape& tape, const Variable& a, const Variable& b) {
  return tape.record(add_forward(a.value(), b.value()), {a, b}, [a, b](const Tensor& gradient) {
    // Two variables must not share one gradient tensor: each may be added to later.
    a.add_gradient(to_dtype(gradient, DType::f32));
    b.add_gradient(to_dtype(gradient, DType::f32));
  });
}

}  // namespace furious
