#include "data/csv.h"

#include <algorithm>

#include "base/error.h"

namespace furious {
namespace {

std::string_view without_line_break(std::string_view record) {
  if (record.ends_with('\n')) record.remove_suffix(1);
  if (record.ends_with('\r')) record.remove_suffix(1);
  return record;
}

// The index of the closing quote of a field whose text begins at `at`; npos: it does not close.
size_t closing_quote(std::string_view text, size_t at) {
  for (at = text.find('"', at); at != text.npos; at = text.find('"', at + 2))
    if (at + 1 >= text.size() || text[at + 1] != '"') return at;
  return text.npos;
}

// The text between quotes, with each pair of quotes as one.
std::string unquoted(std::string_view text) {
  std::string result;
  for (size_t at = 0; at < text.size(); ++at) {
    result += text[at];
    if (text[at] == '"') ++at;
  }
  return result;
}

// visit(raw, quoted) for all fields: `raw` is the text, or what is between the quotes.
template <class Visit>
void for_each_field(std::string_view record, char separator, const std::string& place, Visit&& visit) {
  record = without_line_break(record);
  for (size_t at = 0;; ++at) {
    const size_t begin = at;
    const bool quoted = at < record.size() && record[at] == '"';
    if (quoted) {
      const size_t close = closing_quote(record, at + 1);
      require(close != record.npos, "{}: a field begins with a quote that does not close", place);
      at = close + 1;
      require(at == record.size() || record[at] == separator,
              "{}: text follows the closing quote of a field; a quote inside a field is written twice", place);
      visit(record.substr(begin + 1, close - begin - 1), true);
    } else {
      at = std::min(record.find(separator, at), record.size());
      visit(record.substr(begin, at - begin), false);
    }
    if (at == record.size()) return;
  }
}

std::string text_of(std::string_view raw, bool quoted) {
  return quoted ? unquoted(raw) : std::string(raw);
}

}  // namespace

size_t csv_record_end(std::string_view text, size_t begin, char separator) {
  const char stops[] = {separator, '\n'};
  for (size_t at = begin; at < text.size();) {
    if (text[at] == '"') {
      at = closing_quote(text, at + 1);
      // A quote at the very end may be the first of two.
      if (at == text.npos || at + 1 == text.size()) return text.npos;
    }
    at = text.find_first_of({stops, 2}, at);
    if (at == text.npos) return at;
    if (text[at++] == '\n') return at;
  }
  return text.npos;
}

std::vector<std::string> csv_fields(std::string_view record, char separator, const std::string& place) {
  std::vector<std::string> fields;
  for_each_field(record, separator, place,
                 [&](std::string_view raw, bool quoted) { fields.push_back(text_of(raw, quoted)); });
  return fields;
}

CsvField csv_field(std::string_view record, char separator, size_t column, const std::string& place) {
  CsvField field;
  for_each_field(record, separator, place, [&](std::string_view raw, bool quoted) {
    if (field.fields++ == column) field.text = text_of(raw, quoted);
  });
  return field;
}

}  // namespace furious
