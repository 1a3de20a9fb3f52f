// A small table for terminals, for Markdown and for HTML. Columns of numbers (also with one of the units k M G B T % x
// ×, or as 3.21 ± 0.04) are aligned to the right.
#pragma once

#include <string>
#include <vector>

namespace furious {

struct Table {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;  // each as long as the header
};

std::string to_text(const Table& table);
std::string to_markdown(const Table& table);
std::string to_html(const Table& table);

}  // namespace furious
