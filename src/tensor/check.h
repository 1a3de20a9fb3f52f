// Checks of an operation's tensor arguments. Every message names the operation, the argument, the actual and the
// expected property: `rms_norm: argument "weight" has shape [3], expected [64]`.
#pragma once

#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace furious {

// One operation's arguments. A size of kAny in an expected shape matches everything.
class ArgumentCheck {
 public:
  static constexpr int64_t kAny = -1;

  explicit ArgumentCheck(std::string_view operation) : operation_(operation) {}

  void present(std::string_view argument, const Tensor& tensor) const;
  void rank(std::string_view argument, const Tensor& tensor, int expected) const;
  void shape(std::string_view argument, const Tensor& tensor, std::vector<int64_t> expected) const;
  void dtype(std::string_view argument, const Tensor& tensor, std::vector<DType> expected) const;
  void device(std::string_view argument, const Tensor& tensor, Device expected) const;
  void contiguous(std::string_view argument, const Tensor& tensor) const;
  void unit_inner_stride(std::string_view argument, const Tensor& tensor) const;
  // Every element of an i32 tensor on the CPU is in [first, vocabulary); the message names the first invalid one.
  void token_ids(std::string_view argument, const Tensor& tensor, int64_t first, int64_t vocabulary) const;

  // Defined, contiguous, of this dtype and shape, on this device: the requirement for most arguments.
  void dense(std::string_view argument, const Tensor& tensor, DType expected_dtype, std::vector<int64_t> expected_shape,
             Device expected_device = {}) const;

  // Defined, f32 (on a GPU also bf16), with contiguous rows of any stride: the requirement of row-wise operations for
  // activations, which may be views. With `like`: also of the same shape, dtype and device as that one.
  void rows(std::string_view argument, const Tensor& tensor) const;
  void rows(std::string_view argument, const Tensor& tensor, const Tensor& like) const;

  std::string_view operation() const { return operation_; }

 private:
  std::string_view operation_;
};

}  // namespace furious
