#include "ops/slots.h"

#include <algorithm>
#include <numeric>

#include "tensor/dispatch.h"

namespace furious {

SlotRows slot_rows(std::vector<int32_t> slots, Device device) {
  const auto count = static_cast<int64_t>(slots.size());
  SlotRows rows{std::move(slots), Tensor::empty({count}, DType::i32, device)};
  write_table(rows);
  return rows;
}

SlotRows all_slots(int64_t count, Device device) {
  std::vector<int32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  return slot_rows(std::move(slots), device);
}

void cpu::write_table(const SlotRows& rows) {
  std::ranges::copy(rows.slots, rows.table.data<int32_t>());
}

void write_table(const SlotRows& rows) {
  FURIOUS_DISPATCH(rows.table.device(), write_table(rows));
}

}  // namespace furious
