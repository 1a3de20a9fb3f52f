// Tensors of a caller, for furious/mixer.h: memory of the library, or a view of memory that the caller has.
//
//   std::vector<float> numbers(2 * 3);
//   const auto a = furious::ops::Tensor::view(numbers.data(), {2, 3}, furious::ops::DType::f32);
//   const auto b = furious::ops::Tensor::zeros({2, 3}, furious::ops::DType::f32);
//
// A Tensor is a handle: copies share memory, which is released with the last of them. A default-constructed or
// moved-from one is undefined and stands for an absent optional argument. Failures are a furious::Error.
//
// Threads: different threads may use different handles of one tensor; the elements are the caller's to protect.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "furious/error.h"
#include "furious/export.h"

struct DLManagedTensor;  // of DLPack's public ABI (dlpack.h)

namespace furious::ops {

enum class DType : uint8_t { f32, bf16, f16, i32, f64 };
enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // of a GPU

  bool operator==(const Device&) const = default;
  bool is_cpu() const { return kind == DeviceKind::cpu; }
};

FURIOUS_API std::string name_of(DType dtype);    // "f32"
FURIOUS_API std::string name_of(Device device);  // "cpu", "cuda:0"
FURIOUS_API DType dtype_from_name(std::string_view name);
// "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one. An Error where it cannot be used.
FURIOUS_API Device device_from_name(std::string_view name);
FURIOUS_API int cuda_devices();               // that can be used; 0 in a build without CUDA
FURIOUS_API void synchronize(Device device);  // waits for the library's work on the device

class FURIOUS_API Tensor {
 public:
  static constexpr int kMaxRank = 6;

  Tensor() = default;

  // Contiguous memory of the library, of a caching allocator.
  static Tensor empty(const std::vector<int64_t>& shape, DType dtype, Device device = {});
  static Tensor zeros(const std::vector<int64_t>& shape, DType dtype, Device device = {});
  // A view of the caller's memory, which `owner` keeps alive; without an owner, the caller does. Strides are in
  // elements; none: contiguous.
  static Tensor view(void* data, const std::vector<int64_t>& shape, DType dtype, Device device = {},
                     const std::vector<int64_t>& strides = {}, std::shared_ptr<void> owner = nullptr);

  // The tensor of another framework. From then on the result owns it: its deleter is called with the last handle. After
  // an Error it is still the caller's.
  static Tensor from_dlpack(DLManagedTensor* managed);
  // For another framework, which calls its deleter; until then the memory stays.
  DLManagedTensor* to_dlpack() const;

  bool defined() const { return contents_ != nullptr; }
  explicit operator bool() const { return defined(); }

  // Of a defined tensor; otherwise an Error.
  int rank() const;
  int64_t size(int dim) const;    // −1: the last dimension
  int64_t stride(int dim) const;  // in elements
  std::vector<int64_t> shape() const;
  std::vector<int64_t> strides() const;
  int64_t elements() const;
  int64_t bytes() const;  // of the elements
  DType dtype() const;
  Device device() const;
  bool is_contiguous() const;
  void* raw() const;  // the first element

  // The first element: float for f32, double for f64, int32_t for i32, uint16_t for the bits of bf16 and f16.
  template <class T>
  T* data() const {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, int32_t> ||
                  std::is_same_v<T, uint16_t>);
    if constexpr (std::is_same_v<T, uint16_t>)
      return static_cast<T*>(data_of_bits());
    else
      return static_cast<T*>(data_of(std::is_same_v<T, float>    ? DType::f32
                                     : std::is_same_v<T, double> ? DType::f64
                                                                 : DType::i32));
  }

  // Copies the elements of a tensor of the same shape: on one device any strides and float dtypes, between devices
  // contiguous ones of one dtype.
  void copy_from(const Tensor& other) const;
  Tensor to(Device device) const;  // itself if it is there already, or a contiguous copy

  struct Contents;  // of the library
  explicit Tensor(std::shared_ptr<const Contents> contents);
  const Contents* contents() const { return contents_.get(); }

 private:
  void* data_of(DType wanted) const;
  void* data_of_bits() const;
  const Contents& own() const;

  std::shared_ptr<const Contents> contents_;
};

// Orders the library's work on a GPU with a CUDA stream of the caller (a cudaStream_t; null: the default stream) during
// its lifetime: calls of this thread start after what the stream holds when the scope begins, and what the stream gets
// after the end of the scope starts after these calls. The host does not wait.
//
// The library's work itself runs on one stream of its own per device, so its scratch memory is safe with any number of
// callers' streams. A stream that is being captured into a CUDA graph is refused. Without a scope, calls on a GPU are
// ordered with each other only: use synchronize().
class FURIOUS_API StreamScope {
 public:
  StreamScope(Device device, void* stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  struct Contents;
  std::unique_ptr<Contents> contents_;
};

}  // namespace furious::ops
