#include "ops/slots.h"

#include <algorithm>
#include <numeric>

namespace furious {

SlotRows slot_rows(std::vector<int32_t> slots, Device device) {
  const Tensor here = Tensor::empty({static_cast<int64_t>(slots.size())}, DType::i32);
  std::ranges::copy(slots, here.data<int32_t>());
  return {std::move(slots), to_device(here, device)};
}

SlotRows all_slots(int64_t count, Device device) {
  std::vector<int32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  return slot_rows(std::move(slots), device);
}

}  // namespace furious
