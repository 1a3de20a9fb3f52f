// A Tensor is a view: a memory address with shape, strides (in elements), dtype and device. Copies share memory, which
// returns to its arena with the last view. A default-constructed Tensor is undefined and represents an absent optional
// argument.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "tensor/device.h"
#include "tensor/dtype.h"

namespace furious {

class Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes);
  explicit Shape(std::span<const int64_t> sizes);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return sizes_[i]; }
  int64_t& operator[](int i) { return sizes_[i]; }
  int64_t elements() const;
  bool operator==(const Shape& other) const;
  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + rank_; }

 private:
  std::array<int64_t, kMaxRank> sizes_{};
  int rank_ = 0;
};

std::string to_string(const Shape& shape);  // "[2, 16, 64]"

class Tensor {
 public:
  Tensor() = default;

  static Tensor empty(const Shape& shape, DType dtype, Device device = {});
  static Tensor zeros(const Shape& shape, DType dtype, Device device = {});
  static Tensor empty_like(const Tensor& other) { return empty(other.shape_, other.dtype_, other.device_); }
  // A view of external memory that `owner` keeps alive; without an owner, the caller does.
  static Tensor wrap(void* data, const Shape& shape, DType dtype, Device device = {},
                     std::shared_ptr<const void> owner = nullptr);
  // The same with strides in elements, one for each dimension.
  static Tensor wrap_strided(void* data, const Shape& shape, std::span<const int64_t> strides, DType dtype,
                             Device device = {}, std::shared_ptr<const void> owner = nullptr);

  bool defined() const { return data_ != nullptr; }
  explicit operator bool() const { return defined(); }

  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t size(int dim) const { return shape_[dim < 0 ? dim + rank() : dim]; }
  int64_t stride(int dim) const { return strides_[dim < 0 ? dim + rank() : dim]; }
  int64_t elements() const { return shape_.elements(); }
  size_t bytes() const { return static_cast<size_t>(elements()) * size_of(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  bool is_contiguous() const;

  // The first element. T must be the C++ type of dtype().
  template <class T>
  T* data() const {
    if (dtype_ != DTypeOf<T>::value) [[unlikely]]
      wrong_type(DTypeOf<T>::value);
    return static_cast<T*>(data_);
  }
  void* raw() const { return data_; }

  // Views; nothing is copied.
  Tensor view(const Shape& shape) const;                          // same elements, other shape; contiguous only
  Tensor as_matrix() const;                                       // [..., n] as [rows, n]; contiguous only
  Tensor slice(int dim, int64_t start, int64_t length) const;     // keeps the rank
  Tensor select(int dim, int64_t index) const;                    // drops dim
  Tensor split_dim(int dim, int64_t outer, int64_t inner) const;  // [..., outer*inner, ...] as [..., outer, inner, ...]

 private:
  [[noreturn]] void wrong_type(DType wanted) const;

  std::shared_ptr<const void> owner_;
  void* data_ = nullptr;
  Shape shape_;
  std::array<int64_t, Shape::kMaxRank> strides_{};
  DType dtype_ = DType::f32;
  Device device_;
};

// out = in across devices; contiguous, of one shape and dtype.
void copy_between(const Tensor& out, const Tensor& in);
// `in` on a device: a contiguous copy, or `in` itself if it is there already.
Tensor to_device(const Tensor& in, Device device);

}  // namespace furious
