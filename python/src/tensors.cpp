#include "tensors.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string_view>
#include <vector>

namespace furious_python {
namespace {

namespace ops = furious::ops;

constexpr const char* kFresh = "dltensor";
constexpr const char* kUsed = "used_dltensor";

ops::Tensor from_capsule(const nb::object& capsule, const char* argument) {
  void* const managed = PyCapsule_GetPointer(capsule.ptr(), kFresh);
  if (managed == nullptr) {
    PyErr_Clear();
    throw furious::Error(std::string("argument \"") + argument +
                         "\" is a capsule that is no DLPack tensor, or was used already; give a new one");
  }
  ops::Tensor tensor = ops::Tensor::from_dlpack(static_cast<DLManagedTensor*>(managed));
  PyCapsule_SetName(capsule.ptr(), kUsed);
  return tensor;
}

ops::DType dtype_of(nb::handle object, const Py_buffer& buffer, const char* argument) {
  std::string_view format = buffer.format != nullptr ? buffer.format : "B";
  const bool other_order = format.starts_with('>') || format.starts_with('!');
  if (format.starts_with('<') || format.starts_with('=') || format.starts_with('@')) format.remove_prefix(1);
  if (!other_order && format.size() == 1) {
    switch (format.front()) {
      case 'f':
        return ops::DType::f32;
      case 'd':
        return ops::DType::f64;
      case 'e':
        return ops::DType::f16;
      case 'i':
      case 'l':
        if (buffer.itemsize == 4) return ops::DType::i32;
        break;
      default:
        break;
    }
  }
  const nb::object dtype = nb::hasattr(object, "dtype") ? nb::object(object.attr("dtype")) : nb::str(buffer.format);
  throw furious::Error(std::string("argument \"") + argument + "\" has dtype " + nb::cast<std::string>(nb::str(dtype)) +
                       "; convert to float32, float16 or float64");
}

ops::Tensor from_buffer(nb::handle object, const char* argument, bool written) {
  struct Owner {
    Py_buffer buffer{};
    bool filled = false;
    Owner() = default;
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    ~Owner() {
      if (!filled) return;
      const nb::gil_scoped_acquire gil;
      PyBuffer_Release(&buffer);
    }
  };
  const auto owner = std::make_shared<Owner>();
  if (PyObject_GetBuffer(object.ptr(), &owner->buffer, PyBUF_FORMAT | PyBUF_STRIDES | (written ? PyBUF_WRITABLE : 0))) {
    PyErr_Clear();
    // Arrays of jax have buffers of some dtypes and devices only.
    if (!written && nb::hasattr(object, "__dlpack__")) return from_capsule(object.attr("__dlpack__")(), argument);
    throw furious::Error(std::string("argument \"") + argument + "\" is an array that cannot be " +
                         (written ? "written" : "read") + "; give a copy of it");
  }
  owner->filled = true;
  const Py_buffer& buffer = owner->buffer;
  const ops::DType dtype = dtype_of(object, buffer, argument);
  std::vector<int64_t> shape(buffer.shape, buffer.shape + buffer.ndim),
      strides(buffer.strides, buffer.strides + buffer.ndim);
  for (int64_t& stride : strides) {
    if (stride % buffer.itemsize != 0)
      throw furious::Error(std::string("argument \"") + argument +
                           "\" has a stride that is not a multiple of its elements; give a copy of it");
    stride /= buffer.itemsize;
  }
  return ops::Tensor::view(buffer.buf, shape, dtype, {}, strides, owner);
}

// A tensor of it, which is dropped at once, calls its deleter.
void release(void* managed) noexcept {
  ops::Tensor::from_dlpack(static_cast<DLManagedTensor*>(managed));
}

void delete_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kFresh)) release(PyCapsule_GetPointer(capsule, kFresh));
}

}  // namespace

ops::Tensor tensor_of(nb::handle object, const char* argument, bool written) {
  if (object.is_none()) return {};
  if (PyCapsule_CheckExact(object.ptr())) return from_capsule(nb::borrow(object), argument);
  if (nb::isinstance<ops::Tensor>(object)) return nb::cast<ops::Tensor>(object);
  if (PyObject_CheckBuffer(object.ptr())) return from_buffer(object, argument, written);
  if (nb::hasattr(object, "__dlpack__")) return from_capsule(object.attr("__dlpack__")(), argument);
  throw nb::type_error((std::string("argument \"") + argument + "\" is a " +
                        nb::cast<std::string>(nb::str(object.type().attr("__name__"))) +
                        ", expected a tensor of torch, an array of numpy, or an object with __dlpack__")
                           .c_str());
}

nb::capsule capsule_of(const ops::Tensor& tensor) {
  DLManagedTensor* const managed = tensor.to_dlpack();
  PyObject* const capsule = PyCapsule_New(managed, kFresh, delete_capsule);
  if (capsule == nullptr) {
    release(managed);
    throw nb::python_error();
  }
  return nb::steal<nb::capsule>(capsule);
}

void bind_tensor(nb::module_& module) {
  nb::class_<ops::Tensor>(module, "Tensor", "Memory of the library that other frameworks read through DLPack.")
      .def("__dlpack__",
           [](const ops::Tensor& tensor, const nb::kwargs&) {
             // The consumer's stream is of no interest: all work is done.
             ops::synchronize(tensor.device());
             return capsule_of(tensor);
           })
      .def("__dlpack_device__",
           [](const ops::Tensor& tensor) {
             return nb::make_tuple(tensor.device().is_cpu() ? 1 : 2, tensor.device().index);
           })
      .def_prop_ro("shape", &ops::Tensor::shape)
      .def_prop_ro("dtype", [](const ops::Tensor& tensor) { return ops::name_of(tensor.dtype()); })
      .def_prop_ro("device", [](const ops::Tensor& tensor) { return ops::name_of(tensor.device()); });
  module.def("cuda_devices", &ops::cuda_devices, "GPUs that can be used; 0 in a build without CUDA.");
  module.def(
      "synchronize", [](const std::string& device) { ops::synchronize(ops::device_from_name(device)); },
      nb::arg("device"), nb::call_guard<nb::gil_scoped_release>(), "Waits for the library's work on a device.");
}

}  // namespace furious_python
