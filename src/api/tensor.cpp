#include "furious/tensor.h"

#include <array>
#include <limits>

#include "api/convert.h"
#include "api/dlpack.h"
#include "base/boundary.h"
#include "base/error.h"
#include "ops/elementwise.h"
#include "tensor/check.h"
#include "tensor/stream.h"

namespace furious::ops {
namespace {

static_assert(Tensor::kMaxRank == furious::Shape::kMaxRank);

furious::Shape shape_of(std::span<const int64_t> sizes) {
  const furious::Shape shape(sizes);
  (void)shape.elements();  // an Error where they are too many
  return shape;
}

furious::DType checked(DType dtype) {
  require(dtype <= DType::f64, "tensor: dtype {}, expected a DType", static_cast<int>(dtype));
  return internal(dtype);
}

DType dtype_of(DLDataType type) {
  if (type.lanes == 1) {
    if (type.code == kDLFloat && type.bits == 32) return DType::f32;
    if (type.code == kDLFloat && type.bits == 64) return DType::f64;
    if (type.code == kDLFloat && type.bits == 16) return DType::f16;
    if (type.code == kDLBfloat && type.bits == 16) return DType::bf16;
    if (type.code == kDLInt && type.bits == 32) return DType::i32;
  }
  constexpr std::array<std::string_view, 7> kCodes{"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string_view code = type.code < kCodes.size() ? kCodes[type.code] : "unknown type of ";
  fail("tensor.from_dlpack: dtype {}{}{} is not supported; convert to f32, bf16, f16, f64 or i32", code, type.bits,
       type.lanes == 1 ? "" : fmt::format("x{}", type.lanes));
}

DLDataType dlpack_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return {kDLFloat, 32, 1};
    case DType::bf16:
      return {kDLBfloat, 16, 1};
    case DType::f16:
      return {kDLFloat, 16, 1};
    case DType::i32:
      return {kDLInt, 32, 1};
    default:
      return {kDLFloat, 64, 1};
  }
}

Device device_of(DLDevice device) {
  if (device.device_type == kDLCPU || device.device_type == kDLCUDAHost) return {};
  require(device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged,
          "tensor.from_dlpack: it is on a device of DLPack's type {}; copy it to the CPU or a CUDA device",
          device.device_type);
  return {DeviceKind::cuda, device.device_id};
}

// Strides of dimensions of size 1 carry no meaning, and frameworks put anything there; kernels check alignment on them.
std::vector<int64_t> normal_strides(const furious::Shape& shape, std::span<const int64_t> given) {
  std::vector<int64_t> strides(given.begin(), given.end());
  int64_t next = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    if (shape[i] <= 1) strides[i] = next;
    next = std::max<int64_t>(1, shape[i]) * strides[i];
  }
  return strides;
}

furious::Tensor viewed(std::string_view operation, void* data, const furious::Shape& shape, DType dtype, Device device,
                       std::span<const int64_t> strides, std::shared_ptr<const void> owner) {
  static std::byte nothing[8];  // the address of tensors without elements, which may come without one
  require_usable(operation, device);
  require(data != nullptr || shape.elements() == 0, "{}: the address is null; give that of the first element",
          operation);
  const size_t size = size_of(checked(dtype));
  require(reinterpret_cast<uintptr_t>(data) % size == 0,
          "{}: the address is not a multiple of {} bytes, the size of {}; give one that is aligned", operation, size,
          name_of(dtype));
  void* const first = data != nullptr ? data : nothing;
  if (strides.empty() && shape.rank() > 0)
    return furious::Tensor::wrap(first, shape, internal(dtype), internal(device), std::move(owner));
  require(static_cast<int>(strides.size()) == shape.rank(), "{}: {} strides for shape {}, expected {}", operation,
          strides.size(), to_string(shape), shape.rank());
  return furious::Tensor::wrap_strided(first, shape, normal_strides(shape, strides), internal(dtype), internal(device),
                                       std::move(owner));
}

int checked_dim(int dim, int rank) {
  require(dim >= -rank && dim < rank, "tensor: dimension {} is out of range for rank {}", dim, rank);
  return dim < 0 ? dim + rank : dim;
}

}  // namespace

int cuda_devices() {
  static const auto count = static_cast<int>(furious::describe_cuda_devices().size());
  return count;
}

void require_usable(std::string_view operation, Device device) {
  require(device.kind <= DeviceKind::cuda, "{}: device kind {}, expected a DeviceKind", operation,
          static_cast<int>(device.kind));
  if (device.is_cpu()) {
    require(device.index == 0, "{}: device index {} of the CPU, expected 0", operation, device.index);
    return;
  }
  require(
      device.index >= 0 &&
              device.index<cuda_devices(), "{}: {} cannot be used: {}", operation, name_of(device), cuda_devices()> 0
          ? fmt::format("{} found, counted from cuda:0", cuda_devices())
          : furious::cuda_problem() + "; use tensors on the CPU");
}

std::string name_of(DType dtype) {
  return std::string(furious::name_of(checked(dtype)));
}

std::string name_of(Device device) {
  return furious::name_of(internal(device));
}

DType dtype_from_name(std::string_view name) try { return external(furious::dtype_from_name(name)); } catch (...) {
  rethrow_as_error();
}

Device device_from_name(std::string_view name) try { return external(furious::usable_device(name)); } catch (...) {
  rethrow_as_error();
}

void synchronize(Device device) try {
  require_usable("synchronize", device);
  const KeepCurrentDevice keep(internal(device));
  furious::synchronize(internal(device));
} catch (...) {
  rethrow_as_error();
}

Tensor::Tensor(std::shared_ptr<const Contents> contents) : contents_(std::move(contents)) {}

const Tensor::Contents& Tensor::own() const {
  require(contents_ != nullptr, "tensor: it is undefined or was moved from; use a defined one");
  return *contents_;
}

Tensor Tensor::empty(const std::vector<int64_t>& shape, DType dtype, Device device) try {
  require_usable("tensor.empty", device);
  const KeepCurrentDevice keep(internal(device));
  return external(furious::Tensor::empty(shape_of(shape), checked(dtype), internal(device)));
} catch (...) {
  rethrow_as_error();
}

Tensor Tensor::zeros(const std::vector<int64_t>& shape, DType dtype, Device device) try {
  require_usable("tensor.zeros", device);
  const KeepCurrentDevice keep(internal(device));
  return external(furious::Tensor::zeros(shape_of(shape), checked(dtype), internal(device)));
} catch (...) {
  rethrow_as_error();
}

Tensor Tensor::view(void* data, const std::vector<int64_t>& shape, DType dtype, Device device,
                    const std::vector<int64_t>& strides, std::shared_ptr<void> owner) try {
  return external(viewed("tensor.view", data, shape_of(shape), dtype, device, strides, std::move(owner)));
} catch (...) {
  rethrow_as_error();
}

Tensor Tensor::from_dlpack(DLManagedTensor* managed) try {
  constexpr std::string_view kOperation = "tensor.from_dlpack";
  require(managed != nullptr, "{}: the address of the DLManagedTensor is null; give a tensor", kOperation);
  // Takes the managed tensor over when nothing can fail any more.
  struct Owner {
    DLManagedTensor* managed = nullptr;
    Owner() = default;
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    ~Owner() {
      if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
    }
  };
  const auto owner = std::make_shared<Owner>();
  const DLTensor& given = managed->dl_tensor;
  require(given.ndim >= 0 && given.ndim <= kMaxRank, "{}: rank {} is not supported, expected 0 to {}", kOperation,
          given.ndim, kMaxRank);
  const auto rank = static_cast<size_t>(given.ndim);
  require(rank == 0 || given.shape != nullptr, "{}: it has no shape; give one size for each dimension", kOperation);
  const furious::Shape shape = shape_of({given.shape, rank});
  const std::span<const int64_t> strides(given.strides, given.strides != nullptr ? rank : 0);
  void* const data = given.data == nullptr ? nullptr : static_cast<std::byte*>(given.data) + given.byte_offset;
  Tensor tensor =
      external(viewed(kOperation, data, shape, dtype_of(given.dtype), device_of(given.device), strides, owner));
  owner->managed = managed;
  return tensor;
} catch (...) {
  rethrow_as_error();
}

DLManagedTensor* Tensor::to_dlpack() const try {
  struct Exported {
    DLManagedTensor managed{};
    Tensor tensor;
    std::vector<int64_t> shape, strides;
  };
  auto exported = std::make_unique<Exported>();
  exported->tensor = *this;
  exported->shape = shape();
  exported->strides = strides();
  DLTensor& out = exported->managed.dl_tensor;
  out.data = elements() > 0 ? raw() : nullptr;
  out.device = device().is_cpu() ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, device().index};
  out.ndim = rank();
  out.dtype = dlpack_of(dtype());
  out.shape = exported->shape.data();
  out.strides = exported->strides.data();
  out.byte_offset = 0;
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Exported*>(self->manager_ctx); };
  return &exported.release()->managed;
} catch (...) {
  rethrow_as_error();
}

int Tensor::rank() const {
  return own().tensor.rank();
}
int64_t Tensor::size(int dim) const {
  const furious::Tensor& tensor = own().tensor;
  return tensor.size(checked_dim(dim, tensor.rank()));
}
int64_t Tensor::stride(int dim) const {
  const furious::Tensor& tensor = own().tensor;
  return tensor.stride(checked_dim(dim, tensor.rank()));
}
std::vector<int64_t> Tensor::shape() const {
  const furious::Shape& shape = own().tensor.shape();
  return {shape.begin(), shape.end()};
}
std::vector<int64_t> Tensor::strides() const {
  std::vector<int64_t> strides;
  for (int i = 0; i < rank(); ++i) strides.push_back(stride(i));
  return strides;
}
int64_t Tensor::elements() const {
  return own().tensor.elements();
}
int64_t Tensor::bytes() const {
  return static_cast<int64_t>(own().tensor.bytes());
}
DType Tensor::dtype() const {
  return external(own().tensor.dtype());
}
Device Tensor::device() const {
  return external(own().tensor.device());
}
bool Tensor::is_contiguous() const {
  return own().tensor.is_contiguous();
}
void* Tensor::raw() const {
  return own().tensor.raw();
}

void* Tensor::data_of(DType wanted) const {
  require(dtype() == wanted, "tensor: dtype is {}, accessed as {}; use the type of its elements", name_of(dtype()),
          name_of(wanted));
  return raw();
}

void* Tensor::data_of_bits() const {
  require(dtype() == DType::bf16 || dtype() == DType::f16,
          "tensor: dtype is {}, accessed as 16 bits; use the type of its elements", name_of(dtype()));
  return raw();
}

void Tensor::copy_from(const Tensor& other) const try {
  const furious::Tensor& to = own().tensor;
  const furious::Tensor& from = other.own().tensor;
  require(to.shape() == from.shape(), "tensor.copy_from: shape {} into {}; give a tensor of the same shape",
          to_string(from.shape()), to_string(to.shape()));
  if (to.elements() == 0) return;
  const KeepCurrentDevice keep(to.device().is_cpu() ? from.device() : to.device());
  if (to.device() != from.device()) return copy_between(to, from);
  require((to.dtype() == furious::DType::i32) == (from.dtype() == furious::DType::i32),
          "tensor.copy_from: {} into {}; i32 is copied to i32 only", furious::name_of(from.dtype()),
          furious::name_of(to.dtype()));
  copy(to, from);
} catch (...) {
  rethrow_as_error();
}

Tensor Tensor::to(Device device) const try {
  const furious::Tensor& from = own().tensor;
  require_usable("tensor.to", device);
  if (external(from.device()) == device) return *this;
  const KeepCurrentDevice keep(device.is_cpu() ? from.device() : internal(device));
  furious::Tensor dense = from;
  if (!from.is_contiguous()) {
    dense = furious::Tensor::empty_like(from);
    copy(dense, from);
  }
  return external(to_device(dense, internal(device)));
} catch (...) {
  rethrow_as_error();
}

struct StreamScope::Contents {
  furious::StreamScope scope;
  Contents(furious::Device device, void* stream) : scope(device, stream) {}
};

StreamScope::StreamScope(Device device, void* stream) try {
  require_usable("stream", device);
  contents_ = std::make_unique<Contents>(internal(device), stream);
} catch (...) {
  rethrow_as_error();
}

StreamScope::~StreamScope() = default;

}  // namespace furious::ops
