// What a sequence is to read: token ids, and the places in them at which a state is worth keeping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace furious::serve {

// The transcript is text that identifies what was read independently of how it was tokenized. It is compared, never
// shown and never read by the model: messages with marks between them that no valid UTF-8 text contains, so that a
// message cannot imitate another one.
struct Prompt {
  // After so many ids, of which the first so many bytes of the transcript are the identity.
  struct Boundary {
    size_t ids = 0;
    size_t transcript = 0;
    bool operator==(const Boundary&) const = default;
  };
  std::vector<int32_t> ids;
  std::string transcript;
  std::vector<Boundary> boundaries;  // ascending; the last one is the end of the prompt
  // The first ids were read by a state that goes by its name, in these passes (Snapshot::passes).
  size_t state_ids = 0;
  uint64_t state_passes = 0;

  // Goes on with ids that come from no text. Their transcript begins with a byte that no text has.
  void append_ids(std::span<const int32_t> more) {
    ids.insert(ids.end(), more.begin(), more.end());
    transcript += '\xFE';
    const size_t before = transcript.size();
    transcript.resize(before + more.size_bytes());
    if (!more.empty()) std::memcpy(transcript.data() + before, more.data(), more.size_bytes());
    boundaries.push_back({ids.size(), transcript.size()});
  }
  // Forgets what lies behind the last of the boundaries, of which some were removed.
  void end_at_last_boundary() {
    ids.resize(boundaries.back().ids);
    transcript.resize(boundaries.back().transcript);
  }
};

// Ids are read in passes, and where a pass ends decides about rounding. All passes over some ids are one number, a
// chain of hashes: states of the same ids with the same number are equal to the bit. It begins with a number for what
// else decides about rounding (the device, the dtype).
inline uint64_t after_pass(uint64_t passes, size_t end) {
  passes = (passes ^ end) * 0x9e3779b97f4a7c15u;
  passes ^= passes >> 31;
  return passes == 0 ? 1 : passes;  // 0: not known
}

// After so many ids, read in these passes.
struct PassEnd {
  size_t ids = 0;
  uint64_t passes = 0;
};

}  // namespace furious::serve
