// UTF-8 that may be broken: every maximal run of bytes that cannot be part of a character becomes one U+FFFD, as the
// Unicode standard recommends.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace furious {

// The bytes at the start of `text` that are complete, valid characters.
size_t valid_utf8_prefix(std::string_view text);

size_t utf8_length(std::string_view text);  // in characters, for valid text

// Of valid text that is not empty.
size_t utf8_bytes_of(char first);  // of the character that begins with this byte
uint32_t first_code_point(std::string_view text);
bool is_white_space(uint32_t code_point);  // Unicode's property White_Space

// `text` with every broken sequence replaced; adds their number to `replaced`.
std::string replace_invalid_utf8(std::string_view text, int64_t& replaced);

// Bytes that need not be UTF-8 (paths) as UTF-8 for JSON and TOML, and back. Text stays as it is; anything else, also a
// control character, becomes "percent:" and the bytes, of which those that are no printable ASCII, and "%", are %XX.
std::string utf8_of_bytes(std::string_view bytes);
std::string bytes_of_utf8(std::string_view text);

// Joins pieces of text that may end inside a character: what comes out is always whole characters.
class Utf8Streamer {
 public:
  std::string push(std::string_view bytes);  // all that is complete by now; the beginning of a character waits
  std::string flush();                       // the end of the text: what still waits is broken

 private:
  std::string waiting_;
};

}  // namespace furious
