// Functions that the linker puts in place of the library's (--wrap).
//
// Bounds of tensors: an Arena takes device memory in segments of megabytes, within which a kernel could run from one
// tensor into the next. Here the device has the memory of each tensor by itself, with a gap behind it and NaN in it,
// and no longer that of the segment. The memory of a graph stays whole, because its kernels use tensors that were
// released during the capture.
//
// The speed of matrix products, which trainers measure on matrices of 8192 by 8192, is a constant. One product of small
// ones allocates what the first product does.
#include <cstring>
#include <unordered_set>

#include "emulator/emulator.h"
#include "emulator/runtime.h"
#include "ops/matmul.h"
#include "tensor/arena.h"

using namespace furious::emulator;

namespace {

// Never destroyed: tensors with static lifetime are released during exit.
std::unordered_set<const void*>& tensors() {
  static auto& all = *new std::unordered_set<const void*>;
  return all;
}

}  // namespace

extern "C" {

void* __real__ZN7furious5Arena8allocateEm(furious::Arena* arena, size_t bytes);
void __real__ZN7furious5Arena7releaseEPv(furious::Arena* arena, void* pointer);

void* __wrap__ZN7furious5Arena8allocateEm(furious::Arena* arena, size_t bytes) {
  void* const pointer = __real__ZN7furious5Arena8allocateEm(arena, bytes + 1);
  const std::lock_guard lock(runtime_mutex());
  const void* const segment = device_allocation_of(pointer);
  if (segment == nullptr || is_capturing()) return pointer;
  if (!tensors().contains(segment)) remove_memory(segment);
  add_memory(pointer, bytes);
  std::memset(pointer, kUnwritten, bytes);
  tensors().insert(pointer);
  return pointer;
}

void __wrap__ZN7furious5Arena7releaseEPv(furious::Arena* arena, void* pointer) {
  {
    const std::lock_guard lock(runtime_mutex());
    if (tensors().erase(pointer) > 0) remove_memory(pointer);
  }
  __real__ZN7furious5Arena7releaseEPv(arena, pointer);
}

double __wrap__ZN7furious4cuda11matmul_rateENS_15MatmulPrecisionENS_6DeviceE(furious::MatmulPrecision,
                                                                             furious::Device device) {
  const auto matrix = [&] { return furious::Tensor::empty({16, 16}, furious::DType::f32, device); };
  furious::matmul(matrix(), matrix(), matrix());
  return 1e12;
}

}  // extern "C"
