// Line charts in a page of HTML: the values under the pointer, and switches for logarithmic axes. Without scripts the
// charts are as in a file of their own.
#pragma once

#include <string>
#include <string_view>

#include "report/chart.h"

namespace furious {

std::string to_html(const Chart& chart);

std::string_view chart_script();  // chart_page.js, embedded at build time
std::string chart_page_head();    // style of the figures: once in the head of a page
std::string chart_page_end();     // the script: once at the end of its body

}  // namespace furious
