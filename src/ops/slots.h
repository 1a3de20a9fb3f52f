// Which sequences a batch consists of. A cache holds many sequences, each in a slot; a step or a prefill works on some
// of them, in any order: row i of the batch belongs to slot slots[i].
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/check.h"
#include "tensor/tensor.h"

namespace furious {

struct SlotRows {
  std::vector<int32_t> slots;  // all different
  Tensor table;                // the same numbers, i32 [rows], on the device of the cache

  int64_t size() const { return static_cast<int64_t>(slots.size()); }
};

// Throws an Error unless there are `count` rows (any number where that is ArgumentCheck::kAny) that name different ones
// of `slots`, and their table is on the device.
void check_slots(const ArgumentCheck& check, const SlotRows& rows, int64_t count, int64_t slots, Device device);

SlotRows slot_rows(std::vector<int32_t> slots, Device device = {});
SlotRows all_slots(int64_t count, Device device = {});

// table = slots, in the order of the device's work, without waiting for it.
void write_table(const SlotRows& rows);

namespace cpu {
void write_table(const SlotRows& rows);
}  // namespace cpu
namespace cuda {
void write_table(const SlotRows& rows);
}  // namespace cuda

}  // namespace furious
