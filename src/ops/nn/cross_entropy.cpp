#include "ops/nn/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "ops/nn/cross_entropy_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

// Rows per chunk such that all chunks are about equal.
int64_t chunk_rows(int64_t rows, int64_t row_bytes, Device device) {
  const int64_t most = std::max<int64_t>(1, most_logit_bytes(device) / row_bytes);
  const int64_t chunks = (rows + most - 1) / most;
  return (rows + chunks - 1) / chunks;
}

void check_arguments(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                     const CrossEntropyOptions& options) {
  const ArgumentCheck check("cross_entropy");
  check.rank("weight", weight, 2);
  check.contiguous("weight", weight);
  const Device device = weight.device();
  if (options.weight_gradient)
    check.dtype("weight", weight, {DType::f32});
  else
    check.dtype("weight", weight, {DType::f32, DType::bf16, DType::f16});
  require(weight.size(0) > 0, "cross_entropy: argument \"weight\" has shape {}: the vocabulary is empty",
          to_string(weight.shape()));
  if (device.is_cpu()) check.token_ids("targets", targets, kIgnoredTarget, weight.size(0));
  check.dtype("targets", targets, {DType::i32});
  check.device("targets", targets, device);
  check.contiguous("targets", targets);
  const std::vector<int64_t> rows(targets.shape().begin(), targets.shape().end());
  std::vector<int64_t> hidden_shape = rows;
  hidden_shape.push_back(weight.size(1));
  check.shape("hidden", hidden, hidden_shape);
  check.rows("hidden", hidden);
  check.device("hidden", hidden, device);
  check.contiguous("hidden", hidden);
  if (options.row_losses) check.dense("row_losses", options.row_losses, DType::f32, rows, device);
  if (options.weights) check.dense("weights", options.weights, DType::f32, rows, device);
  require(std::isfinite(options.z_loss) && options.z_loss >= 0, "cross_entropy: z_loss is {}, expected 0 or more",
          options.z_loss);
}

// Goes through the rows chunk by chunk; losses is f64 [rows], weights f32 [rows] or undefined, the gradients are there
// if they are wanted.
void run_chunks(const Tensor& hidden, const Tensor& weight, const Tensor& targets, const Tensor& weights, double z_loss,
                MatmulPrecision precision, const CrossEntropyResult& result, const Tensor& losses) {
  const Device device = hidden.device();
  const int64_t rows = hidden.size(0);
  const int64_t vocabulary = weight.size(0);
  const int64_t chunk = chunk_rows(rows, vocabulary * static_cast<int64_t>(size_of(hidden.dtype())), device);
  const bool with_gradient = result.hidden_gradient || result.weight_gradient;
  const Tensor buffer = Tensor::empty({chunk, vocabulary}, hidden.dtype(), device);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t count = std::min(chunk, rows - begin);
    const auto part = [&](const Tensor& of) { return of.slice(0, begin, count); };
    const Tensor logits = buffer.slice(0, 0, count);
    matmul(logits, part(hidden), weight, {.transpose_b = true, .precision = precision});
    FURIOUS_DISPATCH(device, cross_entropy_rows(logits, part(targets), weights ? part(weights) : weights, z_loss,
                                                result.counted, with_gradient, part(losses)));
    if (result.hidden_gradient)
      matmul(part(result.hidden_gradient.as_matrix()), logits, weight, {.precision = precision});
    if (result.weight_gradient)
      matmul(result.weight_gradient, logits, part(hidden),
             {.transpose_a = true, .accumulate = begin > 0, .precision = precision});
  }
}

// The weight in the type that the products work in, so that it is not converted chunk after chunk.
Tensor converted_once(const Tensor& weight, MatmulPrecision precision) {
  const DType wanted = precision == MatmulPrecision::bf16 ? DType::bf16 : DType::f32;
  return weight.dtype() == wanted ? weight : to_dtype(weight, wanted);
}

void give_gradient(const Variable& variable, const Tensor& gradient, const Tensor& upstream) {
  if (!gradient) return;
  FURIOUS_DISPATCH(gradient.device(), scale(gradient, upstream));
  variable.add_gradient(gradient);
}

}  // namespace

namespace cpu {

void count_targets(const Tensor& counted, const Tensor& targets) {
  const int32_t* const ids = targets.data<int32_t>();
  *counted.data<int32_t>() =
      static_cast<int32_t>(targets.elements() - std::count(ids, ids + targets.elements(), kIgnoredTarget));
}

void mean_loss(const Tensor& loss, const Tensor& losses, const Tensor& counted) {
  const double* const values = losses.data<double>();
  double sum = 0;
  for (int64_t i = 0; i < losses.elements(); ++i) sum += values[i];
  *loss.data<float>() = static_cast<float>(sum / std::max(1, *counted.data<int32_t>()));
}

void scale(const Tensor& tensor, const Tensor& factor) {
  const float by = *factor.data<float>();
  if (by == 1) return;
  float* const values = tensor.data<float>();
  parallel_ranges(tensor.elements(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] *= by;
  });
}

}  // namespace cpu

// Enough rows for efficient matrix products; a read and a write of dW per chunk must stay small beside them.
int64_t most_logit_bytes(Device device) {
  return int64_t{device.is_cpu() ? 32 : 256} << 20;
}

CrossEntropyResult cross_entropy_forward(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                         const CrossEntropyOptions& options) {
  check_arguments(hidden, weight, targets, options);
  const Device device = weight.device();
  const int64_t rows = targets.elements();
  require(rows <= std::numeric_limits<int32_t>::max(),
          "cross_entropy: {} targets are more than it can count; divide them into several calls", rows);
  const bool bf16 = options.precision == MatmulPrecision::bf16 || hidden.dtype() == DType::bf16;
  const MatmulPrecision precision = bf16 ? MatmulPrecision::bf16 : options.precision;
  const auto gradient = [&](const Tensor& of) {
    return rows > 0 ? Tensor::empty_like(of) : Tensor::zeros(of.shape(), of.dtype(), device);
  };
  CrossEntropyResult result;
  result.loss = Tensor::zeros({1}, DType::f32, device);
  result.counted = Tensor::zeros({1}, DType::i32, device);
  if (options.hidden_gradient) result.hidden_gradient = gradient(hidden);
  if (options.weight_gradient) result.weight_gradient = options.place ? options.place : gradient(weight);
  if (rows == 0) return result;
  FURIOUS_DISPATCH(device, count_targets(result.counted, targets));
  const Tensor losses = Tensor::empty({rows}, DType::f64, device);
  run_chunks(hidden.as_matrix(), converted_once(weight, precision), targets.view({rows}),
             options.weights ? options.weights.view({rows}) : Tensor(), options.z_loss, precision, result, losses);
  FURIOUS_DISPATCH(device, mean_loss(result.loss, losses, result.counted));
  if (options.row_losses) copy(options.row_losses.view({rows}), losses);
  return result;
}

Variable cross_entropy(Tape& tape, const Variable& hidden, const Variable& weight, const Tensor& targets,
                       const Tensor& row_losses, MatmulPrecision precision, const Tensor& weights, double z_loss) {
  const bool weight_gradient = tape.recording() && weight.needs_gradient();
  const CrossEntropyResult result =
      cross_entropy_forward(hidden.value(), weight.value(), targets,
                            {.hidden_gradient = tape.recording() && hidden.needs_gradient(),
                             .weight_gradient = weight_gradient,
                             .place = weight_gradient && targets.elements() > 0 ? weight.new_gradient() : Tensor(),
                             .row_losses = row_losses,
                             .weights = weights,
                             .z_loss = z_loss,
                             .precision = precision});
  return tape.record(
      result.loss, {hidden, weight},
      [hidden, weight, dhidden = result.hidden_gradient, dweight = result.weight_gradient](const Tensor& upstream) {
        give_gradient(hidden, dhidden, upstream);
        give_gradient(weight, dweight, upstream);
      });
}

}  // namespace furious
