#include "report/markup.h"

#include "data/utf8.h"

namespace furious {

std::string escape_markup(std::string_view text) {
  int64_t replaced = 0;
  std::string escaped;
  for (const char c : replace_invalid_utf8(text, replaced)) {
    if (c == '&')
      escaped += "&amp;";
    else if (c == '<')
      escaped += "&lt;";
    else if (c == '>')
      escaped += "&gt;";
    else if (c == '"')
      escaped += "&quot;";
    else
      escaped += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;  // XML has no place for control characters
  }
  return escaped;
}

}  // namespace furious
