// Records of comma-separated values (RFC 4180), also with other separators. A field in double quotes may hold
// separators, line breaks, and quotes written twice; a quote elsewhere than at the start of a field is a character.
// A record ends in LF or CRLF.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace furious {

// The index after the record that begins at `begin`, with its line break; npos if the text ends before it does.
size_t csv_record_end(std::string_view text, size_t begin, char separator);

// The fields of one record, with or without its line break. Text after a closing quote, and a quote that does not
// close, are errors, which begin with `place`.
std::vector<std::string> csv_fields(std::string_view record, char separator, const std::string& place);

// One field of a record, and how many it has.
struct CsvField {
  std::string text;
  size_t fields = 0;
};
CsvField csv_field(std::string_view record, char separator, size_t column, const std::string& place);

}  // namespace furious
