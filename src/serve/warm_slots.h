// The device tier of the states: slots that no job needs hold the states of prompts that were read, so that a prompt
// that begins like one of them starts from a copy within the device. On a GPU that saves the way over PCIe.
//
// A warm slot is a fork that is never stepped. It is given up when its slot is needed or the limit in bytes is reached,
// the least recently used one first; the state store keeps the same states in memory of the host and in files. Used by
// the scheduler's thread alone.
#pragma once

#include <list>
#include <optional>
#include <span>
#include <vector>

#include "decode/decoder.h"
#include "serve/prompt.h"

namespace furious::serve {

class WarmSlots {
 public:
  // Jobs take their slots of the decoder here: with start(), fork() and fork_longest(), each of which gives up a warm
  // slot where no other is free.
  WarmSlots(Decoder& decoder, uint64_t most_bytes) : decoder_(decoder), most_bytes_(most_bytes) {}

  int32_t start();
  int32_t fork(int32_t slot);

  struct Forked {
    int32_t slot = 0;
    PassEnd read;
  };
  // A copy of the warm slot that has read most of the ids and ends with one of the passes (ascending).
  std::optional<Forked> fork_longest(std::span<const int32_t> ids, std::span<const PassEnd> passes);

  // Keeps a copy of the slot, which has read `ids` in `passes`. One of the same ids and passes counts as used instead.
  // `spare`: slots of the decoder that no job has or will need; there are no more warm ones than these.
  void keep(int32_t slot, std::span<const int32_t> ids, uint64_t passes, int64_t spare);

  int64_t size() const { return static_cast<int64_t>(slots_.size()); }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Warm {
    int32_t slot = 0;
    std::vector<int32_t> ids;
    uint64_t passes = 0;
    uint64_t bytes = 0;
  };
  void make_room();
  void give_up_oldest();

  Decoder& decoder_;
  const uint64_t most_bytes_;
  uint64_t bytes_ = 0;     // of all
  std::list<Warm> slots_;  // the most recently used one first
};

}  // namespace furious::serve
