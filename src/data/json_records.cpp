#include "data/json_records.h"

#include <algorithm>

#include "base/error.h"

namespace furious {
namespace {

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

}  // namespace

void JsonRecords::broken(std::string_view reason) const {
  fail("\"{}\", record {}, line {}: broken JSON: {}", path_, record_, line_, reason);
}

void JsonRecords::feed(std::string_view bytes, std::string& out) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (!started_ && bytes.starts_with(kByteOrderMark)) bytes.remove_prefix(kByteOrderMark.size());
  for (size_t at = 0; at < bytes.size(); ++at) {
    if (!in_string_) {
      outside_string(bytes[at], out);
      if (bytes[at] == '\n') ++line_;
      continue;
    }
    if (!escaped_) {  // the characters up to one that means something
      const size_t end = std::min(bytes.find_first_of("\"\\\n", at), bytes.size());
      out.append(bytes, at, end - at);
      if ((at = end) == bytes.size()) break;
    }
    if (bytes[at] == '\n') broken("a line break inside a string");
    out += bytes[at];
    if (escaped_ || bytes[at] == '\\') {
      escaped_ = !escaped_;
    } else {
      in_string_ = false;
      if (depth_ == 0) end_record(out);
    }
  }
}

void JsonRecords::outside_string(char c, std::string& out) {
  if (in_record_ && depth_ > 0) {
    out += is_space(c) ? ' ' : c;
    if (c == '"') in_string_ = true;
    if (c == '{' || c == '[') ++depth_;
    if ((c == '}' || c == ']') && --depth_ == 0) end_record(out);
    return;
  }
  if (in_record_) {  // a number or a word
    if (!is_space(c) && c != ',' && c != ']') {
      out += c;
      return;
    }
    end_record(out);
  }
  if (is_space(c)) return;
  if (!started_) {
    started_ = true;
    array_ = c == '[';
    if (array_) return;
  }
  if (expected_ == Expected::nothing) broken("text follows the end of the array");
  if (array_ && c == ']') {
    if (expected_ == Expected::value) broken("a comma before the end of the array");
    expected_ = Expected::nothing;
  } else if (array_ && c == ',') {
    if (expected_ != Expected::separator) broken("a comma without a value before it");
    expected_ = Expected::value;
  } else {
    if (array_ && expected_ == Expected::separator) broken("no comma between two elements of the array");
    begin_record(c, out);
  }
}

void JsonRecords::begin_record(char c, std::string& out) {
  in_record_ = true;
  in_string_ = c == '"';
  depth_ = c == '{' || c == '[' ? 1 : 0;
  out += c;
}

void JsonRecords::end_record(std::string& out) {
  out += '\n';
  in_record_ = false;
  expected_ = Expected::separator;
  ++record_;
}

void JsonRecords::finish(std::string& out) {
  if (in_record_ && (in_string_ || depth_ > 0)) broken("the file ends inside a record");
  if (in_record_) end_record(out);
  if (array_ && expected_ != Expected::nothing) broken("the file ends before the array does");
}

}  // namespace furious
