#include "ops/nn/linear.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "ops/fp8.h"
#include "ops/matmul_kernels.h"
#include "ops/nn/linear_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

// [..., columns] as a matrix. Any number of columns if `columns` is ArgumentCheck::kAny.
Tensor checked_rows(const ArgumentCheck& check, std::string_view argument, const Tensor& tensor, int64_t columns,
                    Device device) {
  check.rows(argument, tensor);
  check.device(argument, tensor, device);
  check.contiguous(argument, tensor);
  require(columns == ArgumentCheck::kAny || tensor.size(-1) == columns,
          "{}: argument \"{}\" has shape {}, expected a last dimension of {}", check.operation(), argument,
          to_string(tensor.shape()), columns);
  return tensor.as_matrix();
}

MatmulPrecision precision_for(const Tensor& x, MatmulPrecision precision) {
  return x.dtype() == DType::bf16 ? MatmulPrecision::bf16 : precision;
}

// Whether a weight must be rounded before it is multiplied with x on a GPU.
bool is_rounded(const Tensor& weight, const Tensor& x, MatmulPrecision precision) {
  return !x.device().is_cpu() && weight.dtype() == DType::f32 &&
         multiplied_in(x, weight, precision_for(x, precision)) == DType::bf16;
}

bool in_fp8(const Tensor& rows, int64_t out, MatmulPrecision precision) {
  return precision == MatmulPrecision::fp8 && fp8_fits(rows.size(0), out, rows.size(1));
}

// linear() and joined_linear() in fp8, into y. x and the weights stay until the backward pass as it reads them:
// transposed.
Variable fp8_linear(Tape& tape, const Tensor& y, const Variable& x, const std::vector<Variable>& weights,
                    const Tensor& all, const Variable& bias, const Variable& residual) {
  const Fp8Matrix x8 = to_fp8(x.value().as_matrix(), Fp8Format::e4m3, tape.recording());
  const Fp8Matrix w8 = to_fp8(all, Fp8Format::e4m3, tape.recording());
  matmul_fp8(y.as_matrix(), x8.as_is, w8.as_is,
             {.accumulate = bias.value().defined(),
              .addend = residual ? residual.value().as_matrix() : Tensor(),
              .fast_sums = true});
  std::vector<Variable> inputs{x, bias, residual};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  return tape.record(y, inputs, [x, weights, bias, residual, x8 = x8.transposed, w8 = w8.transposed](const Tensor& dy) {
    const Fp8Matrix dy8 = to_fp8(dy.as_matrix(), Fp8Format::e5m2);
    if (x.needs_gradient()) {
      const GradientTarget dx = x.gradient_target();
      matmul_fp8(dx.tensor.as_matrix(), dy8.as_is, w8, {.accumulate = dx.holds_sum});
    }
    int64_t start = 0;
    for (const Variable& weight : weights) {
      const int64_t out = weight.value().size(0);
      if (weight.needs_gradient()) {
        const GradientTarget dweight = weight.gradient_target();
        if (fp8_fits(out, x8.rows(), x8.inner()))
          matmul_fp8(dweight.tensor, dy8.transposed.part(start, out), x8, {.accumulate = dweight.holds_sum});
        else
          matmul(dweight.tensor, dy.as_matrix().slice(1, start, out), x.value().as_matrix(),
                 {.transpose_a = true, .accumulate = dweight.holds_sum, .precision = MatmulPrecision::bf16});
      }
      start += out;
    }
    if (bias.needs_gradient()) linear_backward_bias(bias.gradient_target(), dy);
    if (residual) residual.add_gradient(dy);  // given away: nothing reads it after this
  });
}

// Several weights [out, in] as one.
Tensor joined_weight(const std::vector<Variable>& weights, int64_t out, DType dtype) {
  const Tensor& first = weights.front().value();
  const Tensor all = Tensor::empty({out, first.size(1)}, dtype, first.device());
  int64_t start = 0;
  for (const Variable& weight : weights) {
    copy(all.slice(0, start, weight.value().size(0)), weight.value());
    start += weight.value().size(0);
  }
  return all;
}

constexpr int64_t kColumnBlock = 64;

// The sums of up to kColumnBlock columns, in double: thousands of rows add up.
void sum_columns(const float* first, int64_t rows, int64_t row_length, int64_t columns, bool add, float* sums) {
  std::array<double, kColumnBlock> total{};
  if (add) std::copy_n(sums, columns, total.begin());
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < columns; ++i) total[i] += static_cast<double>(first[row * row_length + i]);
  for (int64_t i = 0; i < columns; ++i) sums[i] = static_cast<float>(total[i]);
}

}  // namespace

namespace cpu {

void fill_rows(const Tensor& matrix, const Tensor& row) {
  const float* from = row.data<float>();
  float* to = matrix.data<float>();
  const int64_t columns = matrix.size(1);
  for (int64_t i = 0; i < matrix.size(0); ++i) std::copy_n(from, columns, to + i * columns);
}

void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy) {
  const int64_t columns = dy.size(1);
  const float* first = dy.data<float>();
  float* sums = dbias.tensor.data<float>();
  parallel_for_if(dy.elements() > 2 * kElementsPerThread, (columns + kColumnBlock - 1) / kColumnBlock,
                  [&](int64_t block) {
                    const int64_t begin = block * kColumnBlock;
                    sum_columns(first + begin, dy.size(0), columns, std::min(kColumnBlock, columns - begin),
                                dbias.holds_sum, sums + begin);
                  });
}

}  // namespace cpu

Tensor linear_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, MatmulPrecision precision,
                      const Tensor& residual) {
  const ArgumentCheck check("linear");
  check.rank("weight", weight, 2);
  check.contiguous("weight", weight);
  check.dtype("weight", weight, {DType::f32, DType::bf16, DType::f16});
  const Device device = weight.device();
  const Tensor rows = checked_rows(check, "x", x, weight.size(1), device);
  if (bias) check.dense("bias", bias, DType::f32, {weight.size(0)}, device);
  Shape shape = x.shape();
  shape[x.rank() - 1] = weight.size(0);
  const Tensor y = Tensor::empty(shape, x.dtype(), device);
  const Tensor y_rows = y.as_matrix();
  Tensor addend;
  if (residual) {
    require(!bias, "linear: a bias and a residual were given, expected one of them");
    check.rows("residual", residual, y);
    addend = checked_rows(check, "residual", residual, weight.size(0), device);
  }
  if (bias && y.elements() > 0) FURIOUS_DISPATCH(device, fill_rows(y_rows, bias));
  matmul(
      y_rows, rows, weight,
      {.transpose_b = true, .accumulate = bias.defined(), .precision = precision_for(x, precision), .addend = addend});
  return y;
}

void linear_backward_input(const GradientTarget& dx, const Tensor& dy, const Tensor& weight,
                           MatmulPrecision precision) {
  const ArgumentCheck check("linear_backward_input");
  check.rank("weight", weight, 2);
  const Tensor to = checked_rows(check, "dx", dx.tensor, weight.size(1), weight.device());
  const Tensor from = checked_rows(check, "dy", dy, weight.size(0), weight.device());
  check.shape("dy as a matrix", from, {to.size(0), weight.size(0)});
  check.dtype("dy", dy, {dx.tensor.dtype()});
  matmul(to, from, weight, {.accumulate = dx.holds_sum, .precision = precision_for(dy, precision)});
}

void linear_backward_weight(const GradientTarget& dweight, const Tensor& dy, const Tensor& x,
                            MatmulPrecision precision) {
  const ArgumentCheck check("linear_backward_weight");
  check.present("dweight", dweight.tensor);
  const Device device = dweight.tensor.device();
  const Tensor rows = checked_rows(check, "x", x, ArgumentCheck::kAny, device);
  const Tensor from = checked_rows(check, "dy", dy, ArgumentCheck::kAny, device);
  check.shape("dy as a matrix", from, {rows.size(0), ArgumentCheck::kAny});
  check.dtype("dy", dy, {x.dtype()});
  check.dense("dweight", dweight.tensor, DType::f32, {from.size(1), rows.size(1)}, device);
  matmul(dweight.tensor, from, rows,
         {.transpose_a = true, .accumulate = dweight.holds_sum, .precision = precision_for(dy, precision)});
}

void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy) {
  const ArgumentCheck check("linear_backward_bias");
  check.present("dbias", dbias.tensor);
  const Device device = dbias.tensor.device();
  const Tensor from = checked_rows(check, "dy", dy, ArgumentCheck::kAny, device);
  check.dense("dbias", dbias.tensor, DType::f32, {from.size(1)}, device);
  FURIOUS_DISPATCH(device, linear_backward_bias(dbias, from));
}

Variable linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias, MatmulPrecision precision,
                const Variable& residual) {
  if (in_fp8(x.value().as_matrix(), weight.value().size(0), precision)) {
    const ArgumentCheck check("linear");
    Shape shape = x.value().shape();
    shape[shape.rank() - 1] = weight.value().size(0);
    checked_rows(check, "x", x.value(), ArgumentCheck::kAny, weight.value().device());
    check.shape("weight", weight.value(), {ArgumentCheck::kAny, x.value().size(-1)});
    check.contiguous("weight", weight.value());
    if (bias) check.dense("bias", bias.value(), DType::f32, {weight.value().size(0)}, x.value().device());
    if (residual) checked_rows(check, "residual", residual.value(), weight.value().size(0), x.value().device());
    const Tensor y = Tensor::empty(shape, x.value().dtype(), x.value().device());
    if (bias) FURIOUS_DISPATCH(y.device(), fill_rows(y.as_matrix(), bias.value()));
    return fp8_linear(tape, y, x, {weight}, weight.value(), bias, residual);
  }
  const Tensor w =
      is_rounded(weight.value(), x.value(), precision) ? to_dtype(weight.value(), DType::bf16) : weight.value();
  return tape.record(linear_forward(x.value(), w, bias.value(), precision, residual.value()),
                     {x, weight, bias, residual}, [x, weight, w, bias, precision, residual](const Tensor& dy) {
                       if (x.needs_gradient()) linear_backward_input(x.gradient_target(), dy, w, precision);
                       if (weight.needs_gradient())
                         linear_backward_weight(weight.gradient_target(), dy, x.value(), precision);
                       if (bias.needs_gradient()) linear_backward_bias(bias.gradient_target(), dy);
                       if (residual) residual.add_gradient(dy);  // given away: nothing reads it after this
                     });
}

Variable joined_linear(Tape& tape, const Variable& x, const std::vector<Variable>& weights, MatmulPrecision precision) {
  const ArgumentCheck check("linear");
  require(!weights.empty(), "linear: no weights were given");
  const Device device = weights.front().value().device();
  const Tensor rows = checked_rows(check, "x", x.value(), ArgumentCheck::kAny, device);
  const MatmulPrecision used = precision_for(rows, precision);
  int64_t out = 0;
  std::vector<Variable> inputs{x};
  bool rounds = true;
  for (const Variable& weight : weights) {
    check.shape("weights", weight.value(), {ArgumentCheck::kAny, rows.size(1)});
    check.contiguous("weights", weight.value());
    check.device("weights", weight.value(), device);
    out += weight.value().size(0);
    inputs.push_back(weight);
    rounds = rounds && is_rounded(weight.value(), rows, precision);
  }
  Shape shape = x.value().shape();
  shape[shape.rank() - 1] = out;
  const Tensor y = Tensor::empty(shape, x.value().dtype(), device);
  // f(columns of a matrix like y that belong to a weight, weight, whether it is the first)
  const auto for_each_weight = [weights](const Tensor& matrix, auto&& f) {
    int64_t start = 0;
    for (const Variable& weight : weights) {
      f(matrix.slice(1, start, weight.value().size(0)), weight, start == 0);
      start += weight.value().size(0);
    }
  };
  if (in_fp8(rows, out, precision))
    return fp8_linear(tape, y, x, weights, joined_weight(weights, out, DType::bf16), {}, {});
  const Tensor all = rounds ? joined_weight(weights, out, DType::bf16) : Tensor();
  if (all)
    matmul(y.as_matrix(), rows, all, {.transpose_b = true, .precision = used});
  else
    for_each_weight(y.as_matrix(), [&](const Tensor& columns, const Variable& weight, bool) {
      matmul(columns, rows, weight.value(), {.transpose_b = true, .precision = used});
    });
  return tape.record(y, inputs, [=](const Tensor& dy) {
    const Tensor from = dy.as_matrix();
    if (x.needs_gradient()) {
      const GradientTarget dx = x.gradient_target();
      const Tensor to = dx.tensor.as_matrix();
      if (all)
        matmul(to, from, all, {.accumulate = dx.holds_sum, .precision = used});
      else
        for_each_weight(from, [&](const Tensor& columns, const Variable& weight, bool first) {
          matmul(to, columns, weight.value(), {.accumulate = dx.holds_sum || !first, .precision = used});
        });
    }
    for_each_weight(from, [&](const Tensor& columns, const Variable& weight, bool) {
      if (!weight.needs_gradient()) return;
      const GradientTarget dweight = weight.gradient_target();
      matmul(dweight.tensor, columns, x.value().as_matrix(),
             {.transpose_a = true, .accumulate = dweight.holds_sum, .precision = used});
    });
  });
}

Tensor logits_forward(const Tensor& h, const Tensor& weight) {
  if (h.device().is_cpu() || weight.dtype() == DType::f32)
    return linear_forward(h.dtype() == DType::f32 && h.is_contiguous() ? h : to_dtype(h, DType::f32), weight);
  Shape shape = h.shape();
  shape[h.rank() - 1] = weight.size(0);
  const Tensor logits = Tensor::empty(shape, DType::f32, h.device());
  matmul(logits.as_matrix(), to_dtype(h, DType::bf16).as_matrix(), weight,
         {.transpose_b = true, .precision = MatmulPrecision::bf16});
  return logits;
}

}  // namespace furious
