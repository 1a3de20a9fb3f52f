#include "serve/warm_slots.h"

#include <algorithm>

namespace furious::serve {

int32_t WarmSlots::start() {
  make_room();
  return decoder_.start();
}

int32_t WarmSlots::fork(int32_t slot) {
  make_room();
  return decoder_.fork(slot);
}

std::optional<WarmSlots::Forked> WarmSlots::fork_longest(std::span<const int32_t> ids,
                                                         std::span<const PassEnd> passes) {
  auto best = slots_.end();
  for (auto warm = slots_.begin(); warm != slots_.end(); ++warm) {
    if (best != slots_.end() && warm->ids.size() <= best->ids.size()) continue;
    const auto pass = std::ranges::lower_bound(passes, warm->ids.size(), {}, &PassEnd::ids);
    if (pass == passes.end() || pass->ids != warm->ids.size() || pass->passes != warm->passes) continue;
    if (std::equal(warm->ids.begin(), warm->ids.end(), ids.begin())) best = warm;
  }
  if (best == slots_.end()) return std::nullopt;
  slots_.splice(slots_.begin(), slots_, best);
  Forked forked{best->slot, {best->ids.size(), best->passes}};
  if (decoder_.free_slots() == 0 && slots_.size() == 1) {  // no place for a copy: the job goes on with the slot itself
    bytes_ -= best->bytes;
    slots_.pop_back();
  } else {
    forked.slot = fork(best->slot);
  }
  return forked;
}

void WarmSlots::keep(int32_t slot, std::span<const int32_t> ids, uint64_t passes, int64_t spare) {
  const auto known = std::ranges::find_if(
      slots_, [&](const Warm& warm) { return warm.passes == passes && std::ranges::equal(warm.ids, ids); });
  if (known != slots_.end()) return slots_.splice(slots_.begin(), slots_, known);
  const auto bytes = static_cast<uint64_t>(decoder_.bytes(slot));
  if (spare <= 0 || bytes > most_bytes_) return;
  while (!slots_.empty() && (size() >= spare || bytes_ + bytes > most_bytes_)) give_up_oldest();
  slots_.push_front({fork(slot), {ids.begin(), ids.end()}, passes, bytes});
  bytes_ += bytes;
}

void WarmSlots::make_room() {
  if (decoder_.free_slots() == 0 && !slots_.empty()) give_up_oldest();
}

void WarmSlots::give_up_oldest() {
  decoder_.stop(slots_.back().slot);
  bytes_ -= slots_.back().bytes;
  slots_.pop_back();
}

}  // namespace furious::serve
