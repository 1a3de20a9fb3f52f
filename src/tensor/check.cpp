#include "tensor/check.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"

namespace furious {

void ArgumentCheck::present(std::string_view argument, const Tensor& tensor) const {
  require(tensor.defined(), "{}: argument \"{}\" is missing", operation_, argument);
}

void ArgumentCheck::rank(std::string_view argument, const Tensor& tensor, int expected) const {
  present(argument, tensor);
  require(tensor.rank() == expected, "{}: argument \"{}\" has rank {} (shape {}), expected rank {}", operation_,
          argument, tensor.rank(), to_string(tensor.shape()), expected);
}

void ArgumentCheck::shape(std::string_view argument, const Tensor& tensor, std::vector<int64_t> expected) const {
  present(argument, tensor);
  bool matches = tensor.rank() == static_cast<int>(expected.size());
  for (int i = 0; matches && i < tensor.rank(); ++i) matches = expected[i] == kAny || expected[i] == tensor.size(i);
  if (matches) return;
  std::vector<std::string> wanted;
  for (int64_t size : expected) wanted.push_back(size == kAny ? "any" : std::to_string(size));
  fail("{}: argument \"{}\" has shape {}, expected [{}]", operation_, argument, to_string(tensor.shape()),
       fmt::join(wanted, ", "));
}

void ArgumentCheck::dtype(std::string_view argument, const Tensor& tensor, std::vector<DType> expected) const {
  present(argument, tensor);
  std::vector<std::string_view> wanted;
  for (DType dtype : expected) {
    if (dtype == tensor.dtype()) return;
    wanted.push_back(name_of(dtype));
  }
  fail("{}: argument \"{}\" has dtype {}, expected {}", operation_, argument, name_of(tensor.dtype()),
       fmt::join(wanted, " or "));
}

void ArgumentCheck::device(std::string_view argument, const Tensor& tensor, Device expected) const {
  present(argument, tensor);
  require(tensor.device() == expected, "{}: argument \"{}\" is on {}, expected {}", operation_, argument,
          name_of(tensor.device()), name_of(expected));
}

void ArgumentCheck::contiguous(std::string_view argument, const Tensor& tensor) const {
  present(argument, tensor);
  require(tensor.is_contiguous(), "{}: argument \"{}\" of shape {} is not contiguous", operation_, argument,
          to_string(tensor.shape()));
}

void ArgumentCheck::unit_inner_stride(std::string_view argument, const Tensor& tensor) const {
  present(argument, tensor);
  require(tensor.size(-1) <= 1 || tensor.stride(-1) == 1,
          "{}: argument \"{}\" of shape {} has stride {} in its last dimension, expected 1", operation_, argument,
          to_string(tensor.shape()), tensor.stride(-1));
}

void ArgumentCheck::token_ids(std::string_view argument, const Tensor& tensor, int64_t first,
                              int64_t vocabulary) const {
  dtype(argument, tensor, {DType::i32});
  device(argument, tensor, {});
  contiguous(argument, tensor);
  const int32_t* ids = tensor.data<int32_t>();
  const int32_t* end = ids + tensor.elements();
  const int32_t* bad = std::find_if(ids, end, [&](int32_t id) { return id < first || id >= vocabulary; });
  if (bad == end) return;
  std::vector<int64_t> position(tensor.rank());
  int64_t rest = bad - ids;
  for (int i = tensor.rank() - 1; i >= 0; --i) {
    position[i] = rest % tensor.size(i);
    rest /= tensor.size(i);
  }
  fail("{}: argument \"{}\" holds {} at position [{}], expected {} to {} (the vocabulary has {} tokens)", operation_,
       argument, *bad, fmt::join(position, ", "), first, vocabulary - 1, vocabulary);
}

void ArgumentCheck::dense(std::string_view argument, const Tensor& tensor, DType expected_dtype,
                          std::vector<int64_t> expected_shape, Device expected_device) const {
  shape(argument, tensor, std::move(expected_shape));
  dtype(argument, tensor, {expected_dtype});
  device(argument, tensor, expected_device);
  contiguous(argument, tensor);
}

void ArgumentCheck::rows(std::string_view argument, const Tensor& tensor) const {
  present(argument, tensor);
  require(tensor.rank() >= 1, "{}: argument \"{}\" has rank 0, expected rows", operation_, argument);
  if (tensor.device().is_cpu())
    dtype(argument, tensor, {DType::f32});
  else
    dtype(argument, tensor, {DType::f32, DType::bf16});
  unit_inner_stride(argument, tensor);
}

void ArgumentCheck::rows(std::string_view argument, const Tensor& tensor, const Tensor& like) const {
  shape(argument, tensor, {like.shape().begin(), like.shape().end()});
  rows(argument, tensor);
  dtype(argument, tensor, {like.dtype()});
  device(argument, tensor, like.device());
}

}  // namespace furious
