// The chat page: one file of HTML without outside resources (src/serve/page.html), embedded at build time.
#pragma once

#include <string_view>

namespace furious::serve {

std::string_view page_html();

}  // namespace furious::serve
