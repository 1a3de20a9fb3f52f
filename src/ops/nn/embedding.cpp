#include "ops/nn/embedding.h"

#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/nn/embedding_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements per thread below which a second thread does not pay

Shape shape_of_rows(const Tensor& tokens, int64_t dim) {
  require(tokens.rank() < Shape::kMaxRank, "embedding: argument \"tokens\" has rank {}, expected less than {}",
          tokens.rank(), Shape::kMaxRank);
  std::vector<int64_t> sizes(tokens.shape().begin(), tokens.shape().end());
  sizes.push_back(dim);
  return Shape(std::span<const int64_t>(sizes));
}

template <class T>
void gather_rows(const Tensor& table, const Tensor& tokens, const Tensor& y) {
  const int64_t dim = table.size(1);
  const T* rows = table.data<T>();
  const int32_t* ids = tokens.data<int32_t>();
  float* to = y.data<float>();
  parallel_ranges(tokens.elements(), std::max<int64_t>(1, kGrain / std::max<int64_t>(dim, 1)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t)
                      std::transform(rows + ids[t] * dim, rows + (ids[t] + 1) * dim, to + t * dim,
                                     [](T value) { return static_cast<float>(value); });
                  });
}

// On a GPU the ids are taken on trust.
void check_tokens(const ArgumentCheck& check, const Tensor& tokens, const Tensor& table) {
  if (table.device().is_cpu()) return check.token_ids("tokens", tokens, 0, table.size(0));
  check.dtype("tokens", tokens, {DType::i32});
  check.device("tokens", tokens, table.device());
  check.contiguous("tokens", tokens);
}

}  // namespace

void cpu::embedding_forward(const Tensor& y, const Tensor& table, const Tensor& tokens) {
  with_float_type(table.dtype(), [&](auto zero) { gather_rows<decltype(zero)>(table, tokens, y); });
}

void cpu::embedding_backward(const GradientTarget& dtable, const Tensor& dy, const Tensor& tokens) {
  const int64_t dim = dtable.tensor.size(1);
  float* sums = dtable.tensor.data<float>();
  if (!dtable.holds_sum)
    parallel_ranges(dtable.tensor.elements(), kGrain,
                    [&](int64_t begin, int64_t end) { std::fill(sums + begin, sums + end, 0.0f); });
  const int32_t* ids = tokens.data<int32_t>();
  const float* from = dy.data<float>();
  const int64_t count = tokens.elements();
  // A thread owns columns, not tokens: every element is summed by one thread, in the order of the tokens.
  parallel_ranges(dim, std::max<int64_t>(16, kGrain / std::max<int64_t>(count, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < count; ++t) {
      float* row = sums + ids[t] * dim;
      for (int64_t i = begin; i < end; ++i) row[i] += from[t * dim + i];
    }
  });
}

Tensor embedding_forward(const Tensor& table, const Tensor& tokens, DType dtype) {
  const ArgumentCheck check("embedding");
  check.rank("table", table, 2);
  if (table.device().is_cpu())
    check.dtype("table", table, {DType::f32, DType::bf16, DType::f16});
  else
    check.dtype("table", table, {DType::f32});
  check.contiguous("table", table);
  check_tokens(check, tokens, table);
  const Tensor y = Tensor::empty(shape_of_rows(tokens, table.size(1)), dtype, table.device());
  check.rows("y", y);
  FURIOUS_DISPATCH(table.device(), embedding_forward(y, table, tokens));
  return y;
}

void embedding_backward(const GradientTarget& dtable, const Tensor& dy, const Tensor& tokens) {
  const ArgumentCheck check("embedding_backward");
  check.rank("dtable", dtable.tensor, 2);
  const Device device = dtable.tensor.device();
  check.dense("dtable", dtable.tensor, DType::f32, {ArgumentCheck::kAny, ArgumentCheck::kAny}, device);
  check_tokens(check, tokens, dtable.tensor);
  const Shape expected = shape_of_rows(tokens, dtable.tensor.size(1));
  check.rows("dy", dy);
  check.dense("dy", dy, dy.dtype(), {expected.begin(), expected.end()}, device);
  FURIOUS_DISPATCH(device, embedding_backward(dtable, dy, tokens));
}

Variable embedding(Tape& tape, const Variable& table, const Tensor& tokens, DType dtype) {
  return tape.record(embedding_forward(table.value(), tokens, dtype), {table},
                     [table, tokens](const Tensor& dy) { embedding_backward(table.gradient_target(), dy, tokens); });
}

}  // namespace furious
