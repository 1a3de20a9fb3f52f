#include "data/utf8.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>

namespace furious {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Sequence {
  size_t bytes = 0;      // that belong together
  bool valid = false;    // a whole character
  bool cut_off = false;  // the text ends inside a character
};

bool in_range(unsigned char byte, unsigned char low, unsigned char high) {
  return byte >= low && byte <= high;
}

// The character at the start of `text`, which is not empty.
Sequence sequence_at(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {1, true, false};
  if (!in_range(first, 0xC2, 0xF4)) return {1, false, false};
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The second byte also excludes overlong forms, surrogates and what lies beyond U+10FFFF.
  const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {i, false, true};
    if (!(i == 1 ? in_range(byte(i), low, high) : in_range(byte(i), 0x80, 0xBF))) return {i, false, false};
  }
  return {length, true, false};
}

}  // namespace

size_t utf8_length(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

size_t utf8_bytes_of(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

uint32_t first_code_point(std::string_view text) {
  const size_t bytes = utf8_bytes_of(text[0]);
  uint32_t code = static_cast<unsigned char>(text[0]) & (bytes == 1 ? 0x7F : 0x7F >> bytes);
  for (size_t i = 1; i < bytes; ++i) code = code << 6 | (static_cast<unsigned char>(text[i]) & 0x3F);
  return code;
}

bool is_white_space(uint32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

size_t valid_utf8_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t word = 0;
    while (at + sizeof(word) <= text.size()) {  // eight plain ASCII bytes at once
      std::memcpy(&word, text.data() + at, sizeof(word));
      if (word & 0x8080808080808080u) break;
      at += sizeof(word);
    }
    if (at == text.size()) break;
    const Sequence sequence = sequence_at(text.substr(at));
    if (!sequence.valid) break;
    at += sequence.bytes;
  }
  return at;
}

std::string replace_invalid_utf8(std::string_view text, int64_t& replaced) {
  std::string result;
  while (true) {
    const size_t valid = valid_utf8_prefix(text);
    result.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) return result;
    result.append(kReplacement);
    text.remove_prefix(sequence_at(text).bytes);
    ++replaced;
  }
}

namespace {
constexpr std::string_view kPercent = "percent:";
}

std::string utf8_of_bytes(std::string_view bytes) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; };
  if (valid_utf8_prefix(bytes) == bytes.size() && std::ranges::none_of(bytes, is_control) &&
      !bytes.starts_with(kPercent))
    return std::string(bytes);
  std::string text(kPercent);
  for (const char c : bytes)
    text += is_control(c) || c == '%' || static_cast<unsigned char>(c) >= 0x80
                ? fmt::format("%{:02X}", static_cast<unsigned char>(c))
                : std::string(1, c);
  return text;
}

std::string bytes_of_utf8(std::string_view text) {
  if (!text.starts_with(kPercent)) return std::string(text);
  text.remove_prefix(kPercent.size());
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16).ptr == text.data() + i + 3) {
      bytes += static_cast<char>(value);
      i += 2;
    } else {
      bytes += text[i];
    }
  }
  return bytes;
}

std::string Utf8Streamer::push(std::string_view bytes) {
  waiting_.append(bytes);
  std::string_view rest = waiting_;
  std::string complete;
  while (true) {
    const size_t valid = valid_utf8_prefix(rest);
    complete.append(rest.substr(0, valid));
    rest.remove_prefix(valid);
    if (rest.empty()) break;
    const Sequence sequence = sequence_at(rest);
    if (sequence.cut_off) break;
    complete.append(kReplacement);
    rest.remove_prefix(sequence.bytes);
  }
  waiting_ = std::string(rest);
  return complete;
}

std::string Utf8Streamer::flush() {
  const bool broken = !waiting_.empty();
  waiting_.clear();
  return broken ? std::string(kReplacement) : std::string();
}

}  // namespace furious
