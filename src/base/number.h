// Parses a number: the whole text must match; independent of the locale; no exceptions.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <type_traits>

namespace furious {

template <class Number>
std::optional<Number> parse_number(std::string_view text, int base = 10) {
  Number value{};
  std::from_chars_result result{};
  if constexpr (std::is_floating_point_v<Number>)
    result = std::from_chars(text.data(), text.data() + text.size(), value);
  else
    result = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace furious
