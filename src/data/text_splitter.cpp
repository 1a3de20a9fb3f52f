#include "data/text_splitter.h"

#include <algorithm>

#include "data/utf8.h"

namespace furious {

size_t TextSplitter::after(std::string_view text, size_t at) {
  return at < text.size() ? at + utf8_bytes_of(text[at]) : at + 1;
}

std::vector<std::string_view> TextSplitter::merged(std::string_view text) const {
  struct Part {
    std::string_view text;
    bool matches;
  };
  std::vector<Part> parts;
  scan(text, [&](std::string_view part, bool matches) { parts.push_back({part, matches}); });
  const bool backwards = behavior_ == SplitBehavior::merged_with_next;
  if (backwards) std::ranges::reverse(parts);
  std::vector<std::string_view> pieces;
  bool previous = false;
  for (const Part& part : parts) {
    const bool joins = !pieces.empty() &&
                       (behavior_ == SplitBehavior::contiguous ? part.matches == previous : part.matches && !previous);
    if (joins) {
      const std::string_view last = pieces.back();
      const char* const begin = backwards ? part.text.data() : last.data();
      pieces.back() = {begin, last.size() + part.text.size()};  // they are neighbours
    } else {
      pieces.push_back(part.text);
    }
    previous = part.matches;
  }
  std::erase_if(pieces, [](std::string_view piece) { return piece.empty(); });
  if (backwards) std::ranges::reverse(pieces);
  return pieces;
}

}  // namespace furious
