#include "ops/block_sum.h"

#include <algorithm>

namespace furious {
namespace {

constexpr int64_t kSmallestBlock = 32;
constexpr int64_t kMostBlocks = 64;  // bounds the memory of the sums; more threads than this gain nothing

}  // namespace

BlockSum::BlockSum(int64_t rows, int64_t columns)
    : rows_(rows),
      columns_(columns),
      block_rows_(std::max(kSmallestBlock, (rows + kMostBlocks - 1) / kMostBlocks)),
      blocks_((rows + block_rows_ - 1) / block_rows_),
      sums_(Tensor::zeros({blocks_, columns}, DType::f32)) {}

void BlockSum::write(const Tensor& out) const {
  float* const total = out.data<float>();
  const float* const sums = sums_.data<float>();
  std::fill_n(total, columns_, 0.0f);
  for (int64_t block = 0; block < blocks_; ++block)
    for (int64_t i = 0; i < columns_; ++i) total[i] += sums[block * columns_ + i];
}

}  // namespace furious
