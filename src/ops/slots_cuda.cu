#include "ops/slots.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

// Some slots as arguments of a kernel: no copy from the host that would have to be waited for.
struct SomeSlots {
  static constexpr int kMost = 256;
  int32_t slots[kMost];
};

__global__ void write_slots_kernel(int32_t* table, const __grid_constant__ SomeSlots from, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) table[i] = from.slots[i];
}

}  // namespace

void write_table(const SlotRows& rows) {
  const cudaStream_t s = stream(rows.table.device());
  for (int64_t begin = 0; begin < rows.size(); begin += SomeSlots::kMost) {
    SomeSlots some{};
    const auto count = static_cast<int>(std::min<int64_t>(SomeSlots::kMost, rows.size() - begin));
    std::copy_n(rows.slots.begin() + begin, count, some.slots);
    write_slots_kernel<<<1, SomeSlots::kMost, 0, s>>>(rows.table.data<int32_t>() + begin, some, count);
    check_launch("slots");
  }
}

}  // namespace furious::cuda
