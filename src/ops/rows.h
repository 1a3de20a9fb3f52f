// A tensor seen as rows: the innermost dimension is a row, all before it count rows, however they are strided.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/parallel.h"
#include "tensor/tensor.h"

namespace furious {

template <class T = float>
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : data_(tensor.data<T>()), size_(tensor.size(-1)) {
    for (int i = 0; i + 1 < tensor.rank(); ++i) {
      count_ *= tensor.size(i);
      append(tensor.size(i), tensor.stride(i));
    }
  }

  int64_t count() const { return count_; }
  int64_t size() const { return size_; }

  T* operator[](int64_t row) const {
    int64_t offset = 0;
    for (int i = rank_ - 1; i > 0; --i) {
      offset += row % sizes_[i] * strides_[i];
      row /= sizes_[i];
    }
    return data_ + offset + row * strides_[0];
  }

 private:
  // Dimensions that follow each other evenly in memory become one, which in most cases leaves a single multiplication.
  void append(int64_t size, int64_t stride) {
    if (rank_ > 0 && (strides_[rank_ - 1] == size * stride || sizes_[rank_ - 1] == 1)) {
      sizes_[rank_ - 1] *= size;
    } else {
      sizes_[rank_++] = size;
    }
    strides_[rank_ - 1] = stride;
  }

  T* data_;
  int64_t size_;
  int64_t count_ = 1;
  int rank_ = 0;
  std::array<int64_t, Shape::kMaxRank> sizes_{};
  std::array<int64_t, Shape::kMaxRank> strides_{};
};

// The rows of a contiguous parameter, over and over: what tokens share.
class RepeatedRows {
 public:
  explicit RepeatedRows(const Tensor& tensor)
      : data_(tensor.data<float>()), size_(tensor.size(-1)), count_(tensor.elements() / std::max<int64_t>(size_, 1)) {}
  const float* operator[](int64_t row) const { return data_ + row % count_ * size_; }

 private:
  const float* data_;
  int64_t size_;
  int64_t count_;
};

// body(begin, end) over ranges of `count` rows of `size` elements: parallel, unless there is too little to share out.
template <class Body>
void parallel_rows(int64_t count, int64_t size, Body&& body) {
  parallel_ranges(count, kElementsPerThread / std::max<int64_t>(size, 1), body);
}

}  // namespace furious
