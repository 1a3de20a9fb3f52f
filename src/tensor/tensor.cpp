#include "tensor/tensor.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "tensor/arena.h"

namespace furious {
namespace {

std::array<int64_t, Shape::kMaxRank> contiguous_strides(const Shape& shape) {
  std::array<int64_t, Shape::kMaxRank> strides{};
  int64_t stride = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

int checked_dim(int dim, int rank) {
  require(dim >= -rank && dim < rank, "tensor: dimension {} is out of range for rank {}", dim, rank);
  return dim < 0 ? dim + rank : dim;
}

}  // namespace

Shape::Shape(std::initializer_list<int64_t> sizes) : Shape(std::span<const int64_t>(sizes.begin(), sizes.size())) {}

Shape::Shape(std::span<const int64_t> sizes) {
  require(sizes.size() <= kMaxRank, "shape: rank {} exceeds {}", sizes.size(), kMaxRank);
  for (int64_t size : sizes) {
    require(size >= 0, "shape: size {} is negative", size);
    sizes_[rank_++] = size;
  }
}

int64_t Shape::elements() const {
  int64_t product = 1;
  for (int64_t size : *this)
    require(!__builtin_mul_overflow(product, size, &product), "shape: {} has more than 2^63 elements",
            to_string(*this));
  return product;
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(begin(), end(), other.begin(), other.end());
}

std::string to_string(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  Tensor tensor;
  tensor.shape_ = shape;
  tensor.strides_ = contiguous_strides(shape);
  tensor.dtype_ = dtype;
  tensor.device_ = device;
  Arena& arena = Arena::of(device);
  tensor.data_ = arena.allocate(tensor.bytes());
  tensor.owner_ = std::shared_ptr<void>(tensor.data_, [&arena](void* pointer) { arena.release(pointer); });
  return tensor;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) {
  Tensor tensor = empty(shape, dtype, device);
  memory::clear(device, tensor.data_, tensor.bytes());
  return tensor;
}

Tensor Tensor::wrap(void* data, const Shape& shape, DType dtype, Device device, std::shared_ptr<const void> owner) {
  Tensor tensor;
  tensor.owner_ = std::move(owner);
  tensor.data_ = data;
  tensor.shape_ = shape;
  tensor.strides_ = contiguous_strides(shape);
  tensor.dtype_ = dtype;
  tensor.device_ = device;
  return tensor;
}

Tensor Tensor::wrap_strided(void* data, const Shape& shape, std::span<const int64_t> strides, DType dtype,
                            Device device, std::shared_ptr<const void> owner) {
  require(static_cast<int>(strides.size()) == shape.rank(), "tensor: {} strides for shape {}, expected {}",
          strides.size(), to_string(shape), shape.rank());
  Tensor tensor = wrap(data, shape, dtype, device, std::move(owner));
  std::ranges::copy(strides, tensor.strides_.begin());
  return tensor;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != expected) return false;
    expected *= shape_[i];
  }
  return true;
}

Tensor Tensor::view(const Shape& shape) const {
  require(is_contiguous(), "tensor: view needs a contiguous tensor; shape {} is not contiguous", to_string(shape_));
  require(shape.elements() == elements(), "tensor: cannot view {} elements of shape {} as {}", elements(),
          to_string(shape_), to_string(shape));
  Tensor result = *this;
  result.shape_ = shape;
  result.strides_ = contiguous_strides(shape);
  return result;
}

Tensor Tensor::as_matrix() const {
  require(rank() >= 1, "tensor: cannot view a tensor of rank 0 as a matrix");
  int64_t rows = 1;
  for (int i = 0; i < rank() - 1; ++i) rows *= shape_[i];
  return view({rows, size(-1)});
}

Tensor Tensor::slice(int dim, int64_t start, int64_t length) const {
  dim = checked_dim(dim, rank());
  require(start >= 0 && length >= 0 && start + length <= shape_[dim],
          "tensor: slice [{}, {}) is out of range for dimension {} of shape {}", start, start + length, dim,
          to_string(shape_));
  Tensor result = *this;
  result.shape_[dim] = length;
  result.data_ = static_cast<std::byte*>(data_) + start * strides_[dim] * static_cast<int64_t>(size_of(dtype_));
  return result;
}

Tensor Tensor::select(int dim, int64_t index) const {
  dim = checked_dim(dim, rank());
  Tensor result = slice(dim, index, 1);
  std::array<int64_t, Shape::kMaxRank> sizes{};
  int kept = 0;
  for (int i = 0; i < rank(); ++i) {
    if (i == dim) continue;
    sizes[kept] = shape_[i];
    result.strides_[kept++] = strides_[i];
  }
  result.shape_ = Shape(std::span<const int64_t>(sizes.data(), kept));
  return result;
}

Tensor Tensor::split_dim(int dim, int64_t outer, int64_t inner) const {
  dim = checked_dim(dim, rank());
  require(outer * inner == shape_[dim], "tensor: cannot split dimension {} of shape {} into {} x {}", dim,
          to_string(shape_), outer, inner);
  Tensor result = *this;
  std::array<int64_t, Shape::kMaxRank> sizes{};
  int made = 0;
  require(rank() < Shape::kMaxRank, "tensor: cannot split a dimension of a tensor of the maximum rank {}",
          Shape::kMaxRank);
  for (int i = 0; i < rank(); ++i) {
    if (i == dim) {
      sizes[made] = outer;
      result.strides_[made++] = strides_[i] * inner;
    }
    sizes[made] = i == dim ? inner : shape_[i];
    result.strides_[made++] = strides_[i];
  }
  result.shape_ = Shape(std::span<const int64_t>(sizes.data(), made));
  return result;
}

void Tensor::wrong_type(DType wanted) const {
  fail("tensor: dtype is {}, accessed as {}", name_of(dtype_), name_of(wanted));
}

void copy_between(const Tensor& out, const Tensor& in) {
  require(out.shape() == in.shape() && out.dtype() == in.dtype(), "tensor: cannot copy {} {} to {} {}",
          name_of(in.dtype()), to_string(in.shape()), name_of(out.dtype()), to_string(out.shape()));
  require(out.is_contiguous() && in.is_contiguous(), "tensor: copy between devices needs contiguous tensors");
  memory::copy(out.device(), out.raw(), in.device(), in.raw(), in.bytes());
}

Tensor to_device(const Tensor& in, Device device) {
  if (!in || in.device() == device) return in;
  const Tensor out = Tensor::empty(in.shape(), in.dtype(), device);
  copy_between(out, in);
  return out;
}

}  // namespace furious
