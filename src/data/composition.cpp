#include "data/composition.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "base/error.h"
#include "data/utf8.h"

namespace furious {
namespace {

void append_composed(std::string_view text, std::string& out) {
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t bytes =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &result, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  require(bytes >= 0, "tokenizer: normalization failed: {}", utf8proc_errmsg(bytes));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  out.append(reinterpret_cast<const char*>(result), static_cast<size_t>(bytes));
}

// The library composes U+11A7 with a syllable of Hangul before it and loses it; it composes with nothing, so parts end
// there.
void append_parts(std::string_view text, std::string& out) {
  constexpr std::string_view kBeforeFinals = "\u11A7";
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(kBeforeFinals, begin + 1), text.size());
    append_composed(text.substr(begin, end - begin), out);
    begin = end;
  }
}

bool is_ascii(char c) {
  return static_cast<unsigned char>(c) < 0x80;
}

}  // namespace

bool is_always_composed(unsigned c) {
  return (c >= 0x4E00 && c <= 0x9FFC) || (c >= 0x2010 && c <= 0x2027) || (c >= 0x2030 && c <= 0x205E) ||
         (c >= 0x400 && c <= 0x482) || (c >= 0x2190 && c <= 0x21FF) || (c >= 0x2500 && c <= 0x27E5) ||
         (c >= 0x3001 && c <= 0x3029) || (c >= 0x3041 && c <= 0x3096) || (c >= 0x30A0 && c <= 0x30FF) ||
         (c >= 0xAC00 && c <= 0xD7A3) || (c >= 0xFF01 && c <= 0xFFEE) || c == 0xFFFD || (c >= 0x1F300 && c <= 0x1FAF6);
}

// No character below U+0300 composes with one before it, so ASCII characters begin and end the parts that change.
std::string canonical_composition(std::string text) {
  std::string out;
  size_t done = 0;  // what precedes it is in `out`
  for (size_t at = 0; at < text.size();) {
    const bool below_300 = static_cast<unsigned char>(text[at]) < 0xCC;
    if (below_300 || is_always_composed(first_code_point(std::string_view(text).substr(at)))) {
      at += below_300 ? 1 : utf8_bytes_of(text[at]);
      continue;
    }
    size_t begin = at;
    while (begin > done && !is_ascii(text[begin])) --begin;
    while (at < text.size() && !is_ascii(text[at])) ++at;
    out.append(text, done, begin - done);
    append_parts(std::string_view(text).substr(begin, at - begin), out);
    done = at;
  }
  if (done == 0) return text;
  return out.append(text, done);
}

}  // namespace furious
