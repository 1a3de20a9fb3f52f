#include "ops/slots.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "tensor/dispatch.h"

namespace furious {

void check_slots(const ArgumentCheck& check, const SlotRows& rows, int64_t count, int64_t slots, Device device) {
  require(count == ArgumentCheck::kAny || rows.size() == count, "{}: {} slots for {} rows; name one slot for each row",
          check.operation(), rows.size(), count);
  std::vector<bool> named(static_cast<size_t>(slots));
  for (int32_t slot : rows.slots) {
    require(slot >= 0 && slot < slots, "{}: slot {}, expected 0 to {}", check.operation(), slot, slots - 1);
    require(!named[static_cast<size_t>(slot)], "{}: slot {} comes twice; a slot has one row", check.operation(), slot);
    named[static_cast<size_t>(slot)] = true;
  }
  check.dense("rows", rows.table, DType::i32, {rows.size()}, device);
}

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
