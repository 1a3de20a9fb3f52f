// Tensors of Python as tensors of the library, without copies.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "furious/tensor.h"

namespace furious_python {

namespace nb = nanobind;

// Of a DLPack capsule, an object with the buffer protocol (a NumPy array) or one with __dlpack__; None: an undefined
// tensor. The result keeps the memory alive. `argument`: its name in messages. `written`: a read-only array is refused.
furious::ops::Tensor tensor_of(nb::handle object, const char* argument, bool written = false);

// A capsule for another framework.
nb::capsule capsule_of(const furious::ops::Tensor& tensor);

// An array of NumPy that owns the values.
template <class T>
nb::ndarray<nb::numpy, T> array_of(std::vector<T> values, const std::vector<size_t>& shape) {
  auto* const kept = new std::vector<T>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape.size(), shape.data(), owner);
}

void bind_tensor(nb::module_& module);
void bind_mixer(nb::module_& module);
void bind_model(nb::module_& module);
void bind_train(nb::module_& module);

}  // namespace furious_python
