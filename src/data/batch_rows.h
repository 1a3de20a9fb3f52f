// Builds a Batch row by row.
#pragma once

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "data/batches.h"

namespace furious {

// Rows start as padding without targets.
class BatchRows {
 public:
  BatchRows(int64_t batch, int64_t length, RowRange range, int32_t padding)
      : first_(range.first), count_(range.count < 0 ? batch - range.first : range.count), length_(length) {
    require(first_ >= 0 && count_ >= 0 && first_ + count_ <= batch, "batches: rows {}..{} of a batch of {}", first_,
            first_ + count_ - 1, batch);
    batch_.inputs = Tensor::empty({count_, length}, DType::i32);
    batch_.targets = Tensor::empty({count_, length}, DType::i32);
    std::fill_n(inputs(0), count_ * length, padding);
    std::fill_n(targets(0), count_ * length, -1);
  }

  int64_t first() const { return first_; }
  int64_t count() const { return count_; }
  int32_t* inputs(int64_t i) const { return batch_.inputs.data<int32_t>() + i * length_; }
  int32_t* targets(int64_t i) const { return batch_.targets.data<int32_t>() + i * length_; }

  Batch finish(const std::vector<int32_t>& boundaries = {}) {
    if (!boundaries.empty()) {
      batch_.boundaries = Tensor::empty({static_cast<int64_t>(boundaries.size())}, DType::i32);
      std::copy(boundaries.begin(), boundaries.end(), batch_.boundaries.data<int32_t>());
    }
    return std::move(batch_);
  }

 private:
  int64_t first_;
  int64_t count_;
  int64_t length_;
  Batch batch_;
};

}  // namespace furious
