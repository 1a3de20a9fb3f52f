#include "ops/cross_entropy.h"

#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "tensor/check.h"

namespace furious {
namespace {

// Enough rows for efficient matrix products; a read and a write of dW per chunk must stay small beside them.
constexpr int64_t kLogitBytes = int64_t{32} << 20;

// Rows per chunk such that all chunks are about equal.
int64_t chunk_rows(int64_t rows, int64_t vocabulary) {
  const int64_t most = std::max<int64_t>(1, kLogitBytes / (vocabulary * static_cast<int64_t>(sizeof(float))));
  const int64_t chunks = (rows + most - 1) / most;
  return (rows + chunks - 1) / chunks;
}

void check_arguments(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                     const CrossEntropyOptions& options) {
  const ArgumentCheck check("cross_entropy");
  check.rank("weight", weight, 2);
  check.device("weight", weight, {});
  check.contiguous("weight", weight);
  if (options.weight_gradient)
    check.dtype("weight", weight, {DType::f32});
  else
    check.dtype("weight", weight, {DType::f32, DType::bf16, DType::f16});
  require(weight.size(0) > 0, "cross_entropy: argument \"weight\" has shape {}: the vocabulary is empty",
          to_string(weight.shape()));
  check.token_ids("targets", targets, kIgnoredTarget, weight.size(0));
  const std::vector<int64_t> rows(targets.shape().begin(), targets.shape().end());
  std::vector<int64_t> hidden_shape = rows;
  hidden_shape.push_back(weight.size(1));
  check.dense("hidden", hidden, DType::f32, hidden_shape);
  if (options.row_losses) check.dense("row_losses", options.row_losses, DType::f32, rows);
}

// Goes through the rows chunk by chunk; losses is f64 [rows], the gradients are there if they are wanted.
void run_chunks(const Tensor& hidden, const Tensor& weight, const Tensor& targets, MatmulPrecision precision,
                const CrossEntropyResult& result, const Tensor& losses) {
  const int64_t rows = hidden.size(0);
  const int64_t vocabulary = weight.size(0);
  const int64_t chunk = chunk_rows(rows, vocabulary);
  const bool with_gradient = result.hidden_gradient || result.weight_gradient;
  const auto coefficient = static_cast<float>(1.0 / static_cast<double>(result.counted));
  const Tensor buffer = Tensor::empty({chunk, vocabulary}, DType::f32);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t count = std::min(chunk, rows - begin);
    const Tensor logits = buffer.slice(0, 0, count);
    const Tensor chunk_hidden = hidden.slice(0, begin, count);
    matmul(logits, chunk_hidden, weight, {.transpose_b = true, .precision = precision});
    const int32_t* chunk_targets = targets.data<int32_t>() + begin;
    double* chunk_losses = losses.data<double>() + begin;
    if (!with_gradient) {
      cpu::cross_entropy_rows(logits, chunk_targets, chunk_losses);
      continue;
    }
    cpu::cross_entropy_rows_with_gradient(logits, chunk_targets, coefficient, chunk_losses);
    if (result.hidden_gradient)
      matmul(result.hidden_gradient.as_matrix().slice(0, begin, count), logits, weight, {.precision = precision});
    if (result.weight_gradient)
      matmul(result.weight_gradient, logits, chunk_hidden,
             {.transpose_a = true, .accumulate = begin > 0, .precision = precision});
  }
}

// The weight in the type that the products work in, so that it is not converted chunk after chunk.
Tensor converted_once(const Tensor& weight, MatmulPrecision precision) {
  const DType wanted = precision == MatmulPrecision::bf16 ? DType::bf16 : DType::f32;
  return weight.dtype() == wanted ? weight : to_dtype(weight, wanted);
}

float mean_loss(const Tensor& losses, int64_t counted) {
  const double* values = losses.data<double>();
  double sum = 0;
  for (int64_t i = 0; i < losses.elements(); ++i) sum += values[i];
  return static_cast<float>(sum / static_cast<double>(counted));
}

void scale(const Tensor& tensor, float factor) {
  float* values = tensor.data<float>();
  parallel_ranges(tensor.elements(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] *= factor;
  });
}

void give_gradient(const Variable& variable, const Tensor& gradient, float upstream) {
  if (!gradient) return;
  if (upstream != 1.0f) scale(gradient, upstream);
  variable.add_gradient(gradient);
}

}  // namespace

CrossEntropyResult cross_entropy_forward(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                         const CrossEntropyOptions& options) {
  check_arguments(hidden, weight, targets, options);
  const int64_t rows = targets.elements();
  const int32_t* ids = targets.data<int32_t>();
  const int64_t counted = rows - std::count(ids, ids + rows, kIgnoredTarget);
  const auto gradient = [&](const Tensor& of) {
    return counted > 0 ? Tensor::empty(of.shape(), DType::f32) : Tensor::zeros(of.shape(), DType::f32);
  };
  CrossEntropyResult result;
  result.loss = Tensor::zeros({1}, DType::f32);
  result.counted = counted;
  if (options.hidden_gradient) result.hidden_gradient = gradient(hidden);
  if (options.weight_gradient) result.weight_gradient = gradient(weight);
  if (counted == 0) {
    if (options.row_losses) fill(options.row_losses, 0.0f);
    return result;
  }
  const Tensor losses = Tensor::empty({rows}, DType::f64);
  run_chunks(hidden.as_matrix(), converted_once(weight, options.precision), targets, options.precision, result, losses);
  *result.loss.data<float>() = mean_loss(losses, counted);
  if (options.row_losses) copy(options.row_losses.view({rows}), losses);
  return result;
}

Variable cross_entropy(Tape& tape, const Variable& hidden, const Variable& weight, const Tensor& targets,
                       const Tensor& row_losses, MatmulPrecision precision) {
  const CrossEntropyResult result =
      cross_entropy_forward(hidden.value(), weight.value(), targets,
                            {.hidden_gradient = tape.recording() && hidden.needs_gradient(),
                             .weight_gradient = tape.recording() && weight.needs_gradient(),
                             .row_losses = row_losses,
                             .precision = precision});
  return tape.record(
      result.loss, {hidden, weight},
      [hidden, weight, dhidden = result.hidden_gradient, dweight = result.weight_gradient](const Tensor& upstream) {
        give_gradient(hidden, dhidden, *upstream.data<float>());
        give_gradient(weight, dweight, *upstream.data<float>());
      });
}

}  // namespace furious
