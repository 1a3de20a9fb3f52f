// Tokens that are found in a text before it is split into words: special tokens such as <|endoftext|>, runs of blanks.
#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_pattern.h"

namespace furious {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;                      // only where no word character is beside it
  bool left_strip = false, right_strip = false;  // includes the white space on that side
  bool normalized = false;                       // searched in the normalized text
  bool special = false;                          // decoded to nothing
};

class AddedTokens {
 public:
  AddedTokens();
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // A part of a text: from the end of the previous part, either without added tokens (id -1) or one of them.
  struct Part {
    size_t begin = 0, end = 0;
    int32_t id = -1;
  };
  // Leftmost first, of several at one place the longest. `text` is valid UTF-8.
  void split(std::string_view text, std::vector<Part>& parts) const;

 private:
  // The longest token at `at`; nullptr if there is none.
  const AddedToken* find(std::string_view text, size_t at) const;
  bool is_word_beside(std::string_view text, size_t begin, size_t end) const;

  std::vector<AddedToken> tokens_;   // sorted by content
  std::bitset<1 << 16> starts_;      // the first two bytes of each; of a token of one byte with every second
  std::optional<TextPattern> word_;  // a word character, where a token needs it
};

}  // namespace furious
