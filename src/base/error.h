// Throwing an Error with a formatted message.
#pragma once

#include <fmt/format.h>

#include <string>

#include "furious/error.h"

namespace furious {

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]]
    fail(format, std::forward<Args>(args)...);
}

}  // namespace furious
