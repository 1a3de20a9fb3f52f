// Public tensors (furious/tensor.h) as tensors of the engine, and back.
#pragma once

#include "furious/tensor.h"
#include "tensor/tensor.h"

namespace furious::ops {

struct Tensor::Contents {
  furious::Tensor tensor;
};

inline furious::Tensor internal(const Tensor& tensor) {
  return tensor.defined() ? tensor.contents()->tensor : furious::Tensor();
}
inline Tensor external(furious::Tensor tensor) {
  return tensor.defined() ? Tensor(std::make_shared<const Tensor::Contents>(std::move(tensor))) : Tensor();
}

inline furious::DType internal(DType dtype) {
  return static_cast<furious::DType>(dtype);
}
inline DType external(furious::DType dtype) {
  return static_cast<DType>(dtype);
}
inline furious::Device internal(Device device) {
  return {static_cast<furious::DeviceKind>(device.kind), device.index};
}
inline Device external(furious::Device device) {
  return {static_cast<DeviceKind>(device.kind), device.index};
}
static_assert(static_cast<int>(DType::f32) == static_cast<int>(furious::DType::f32) &&
              static_cast<int>(DType::bf16) == static_cast<int>(furious::DType::bf16) &&
              static_cast<int>(DType::f16) == static_cast<int>(furious::DType::f16) &&
              static_cast<int>(DType::i32) == static_cast<int>(furious::DType::i32) &&
              static_cast<int>(DType::f64) == static_cast<int>(furious::DType::f64));
static_assert(static_cast<int>(DeviceKind::cuda) == static_cast<int>(furious::DeviceKind::cuda));

// An Error unless tensors of the device can be used here.
void require_usable(std::string_view operation, Device device);

}  // namespace furious::ops
