// What a sequence is to read: token ids, and the places in them at which a state is worth keeping.
#pragma once

#include <cstddef>
#include <cstdint>
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

  // Goes on with another prompt, which was made for the continuation of a text.
  void append(const Prompt& more) {
    for (const Boundary& boundary : more.boundaries)
      boundaries.push_back({ids.size() + boundary.ids, transcript.size() + boundary.transcript});
    ids.insert(ids.end(), more.ids.begin(), more.ids.end());
    transcript += more.transcript;
  }
};

}  // namespace furious::serve
