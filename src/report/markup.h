// Text inside HTML and SVG.
#pragma once

#include <string>
#include <string_view>

namespace furious {

// Also inside attributes with double quotes.
std::string escape_markup(std::string_view text);

}  // namespace furious
