#include "report/table.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "data/utf8.h"
#include "report/markup.h"

namespace furious {
namespace {

bool is_number(std::string cell) {
  std::erase(cell, ',');
  char* end = nullptr;
  std::strtod(cell.c_str(), &end);
  if (end == cell.c_str()) return cell.empty() || cell == "-";  // nothing was measured
  std::string_view unit = end;
  constexpr std::string_view kSpread = " ± ";
  if (unit.starts_with(kSpread)) return is_number(std::string(unit.substr(kSpread.size())));
  if (unit.starts_with(' ')) unit.remove_prefix(1);
  return unit.empty() || unit == "×" || (unit.size() == 1 && std::string_view("kMGBT%x").find(unit) != unit.npos);
}

// For each column: whether it holds numbers.
std::vector<bool> number_columns(const Table& table) {
  std::vector<bool> numbers(table.header.size(), !table.rows.empty());
  for (const auto& row : table.rows) {
    require(row.size() == numbers.size(), "table: a row has {} cells, the header {}", row.size(), numbers.size());
    for (size_t i = 0; i < row.size(); ++i) numbers[i] = numbers[i] && is_number(row[i]);
  }
  return numbers;
}

std::string markdown_cell(const std::string& cell) {
  std::string escaped;
  for (const char c : cell) {
    if (c == '|') escaped += '\\';
    escaped += c == '\n' ? ' ' : c;
  }
  return escaped;
}

std::string markdown_row(const std::vector<std::string>& row) {
  std::string line = "|";
  for (const std::string& cell : row) line += fmt::format(" {} |", markdown_cell(cell));
  return line + "\n";
}

}  // namespace

std::string to_text(const Table& table) {
  const std::vector<bool> numbers = number_columns(table);
  std::vector<size_t> widths(table.header.size());
  const auto widen = [&](const std::vector<std::string>& row) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], utf8_length(row[i]));
  };
  widen(table.header);
  for (const auto& row : table.rows) widen(row);

  std::string text;
  const auto print = [&](const std::vector<std::string>& row) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - utf8_length(row[i]), ' ');
      if (i > 0) line += "  ";
      line += numbers[i] ? space + row[i] : row[i] + space;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  print(table.header);
  for (const auto& row : table.rows) print(row);
  return text;
}

std::string to_markdown(const Table& table) {
  std::vector<std::string> rule;
  for (const bool number : number_columns(table)) rule.push_back(number ? "---:" : "---");
  std::string text = markdown_row(table.header) + markdown_row(rule);
  for (const auto& row : table.rows) text += markdown_row(row);
  return text;
}

std::string to_html(const Table& table) {
  const std::vector<bool> numbers = number_columns(table);
  const auto row_of = [&](const std::vector<std::string>& cells, std::string_view tag) {
    std::string line = "<tr>";
    for (size_t i = 0; i < cells.size(); ++i)
      line += fmt::format("<{0}{1}>{2}</{0}>", tag, numbers[i] ? " class=\"number\"" : "", escape_markup(cells[i]));
    return line + "</tr>\n";
  };
  std::string html = "<table>\n<thead>\n" + row_of(table.header, "th") + "</thead>\n<tbody>\n";
  for (const auto& row : table.rows) html += row_of(row, "td");
  return html + "</tbody>\n</table>\n";
}

}  // namespace furious
