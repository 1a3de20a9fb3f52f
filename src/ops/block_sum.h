// Sums over many rows with the same bits for every number of threads, without atomics: the rows are cut into blocks by
// their number alone, each block is summed in order into sums of its own, and those are added up in order.
#pragma once

#include <cstdint>

#include "base/parallel.h"
#include "tensor/tensor.h"

namespace furious {

class BlockSum {
 public:
  // `columns` numbers are summed over `rows` rows.
  BlockSum(int64_t rows, int64_t columns);

  // body(begin, end, sums) adds rows [begin, end) to sums[columns], in parallel over the blocks.
  template <class Body>
  void run(Body&& body) const {
    parallel_for_if(rows_ * columns_ > 2 * kElementsPerThread, blocks_, [&](int64_t block) {
      body(block * block_rows_, std::min(rows_, (block + 1) * block_rows_), sums_.data<float>() + block * columns_);
    });
  }

  // out = the totals; `out` is contiguous with as many elements as columns.
  void write(const Tensor& out) const;

 private:
  int64_t rows_;
  int64_t columns_;
  int64_t block_rows_;
  int64_t blocks_;
  Tensor sums_;
};

}  // namespace furious
