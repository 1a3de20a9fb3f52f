#include "base/json.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/names.h"

namespace furious {
namespace {

using Json = nlohmann::json;

// Calls outside(position) for every byte outside of quotes. It returns how many bytes to skip; 0 skips one.
template <class Outside>
void scan(std::string_view text, Outside&& outside) {
  bool quoted = false;
  for (size_t at = 0; at < text.size();) {
    if (quoted) {
      quoted = text[at] != '"';
      at += text[at] == '\\' ? 2 : 1;  // skip escaped characters
      continue;
    }
    quoted = text[at] == '"';
    at += std::max<size_t>(1, outside(at));
  }
}

void check_depth(std::string_view text, const std::string& origin, int most) {
  int64_t depth = 0;
  scan(text, [&](size_t at) {
    if (text[at] == '{' || text[at] == '[') ++depth;
    if (text[at] == '}' || text[at] == ']') --depth;
    require(depth <= most, "{}: nested more than {} levels deep, at byte {}; the file is damaged or the wrong one",
            origin, most, at);
    return 0;
  });
}

std::string without_python_words(std::string_view text) {
  std::string out;
  size_t copied = 0;
  scan(text, [&](size_t at) -> size_t {
    const std::string_view rest = text.substr(at);
    for (const std::string_view word : {"Infinity", "-Infinity", "NaN"}) {
      if (!rest.starts_with(word)) continue;
      out.append(text, copied, at - copied);
      out += "null";
      copied = at + word.size();
      return word.size();
    }
    return 0;
  });
  return out += text.substr(copied);
}

std::string place_of(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, byte > 0 ? byte - 1 : 0);  // the library counts from 1
  const size_t line_start = before.rfind('\n') + 1;                         // npos + 1 is 0
  return fmt::format("line {}, column {}", std::ranges::count(before, '\n') + 1, before.size() - line_start + 1);
}

std::string described(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  return printable(value.dump());
}

}  // namespace

std::string json_reason(const std::string& message) {
  const size_t bracket = message.find("] ");
  const size_t after = bracket == std::string::npos ? 0 : bracket + 2;
  const size_t colon =
      message.starts_with("[json.exception.parse_error") ? message.find(": ", after) : std::string::npos;
  const size_t begin = colon == std::string::npos ? after : colon + 2;
  return message.substr(begin, message.find("; last read", begin) - begin);
}

Json parse_json(std::string_view text, const std::string& origin, const JsonLimits& limits) {
  require(text.size() <= limits.bytes,
          "{}: {} bytes of JSON, expected at most {}; the file is damaged or the wrong one", origin, text.size(),
          limits.bytes);
  // The parser treats a zero byte as the end of the text.
  require(text.find('\0') == std::string_view::npos, "{}: not JSON: it contains a zero byte", origin);
  check_depth(text, origin, limits.depth);
  std::string replaced;
  if (limits.python_words) text = replaced = without_python_words(text);
  try {
    return Json::parse(text.begin(), text.end());
  } catch (const Json::parse_error& error) {
    fail("{}: not JSON, or damaged, at {}: {}", origin, place_of(text, error.byte), json_reason(error.what()));
  } catch (const Json::exception& error) {  // a number out of range
    fail("{}: not JSON, or damaged: {}", origin, json_reason(error.what()));
  }
}

Json read_json(const std::filesystem::path& path, const JsonLimits& limits) {
  return parse_json(read_text(path, limits.bytes), path.string(), limits);
}

JsonValue::JsonValue(const Json& value, std::string origin) : value_(&value), origin_(std::move(origin)) {}

JsonValue::JsonValue(const Json& value, const std::string& origin, std::string place)
    : value_(&value), origin_(origin), place_(std::move(place)) {}

void JsonValue::unexpected(std::string_view expected) const {
  const std::string what = place_.empty() ? "the file" : fmt::format("\"{}\"", place_);
  throw JsonError(fmt::format("{}: {} is {}, expected {}", origin_, what, described(*value_), expected), place_);
}

bool JsonValue::has(const char* key) const {
  if (!value_->is_object()) unexpected("an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonValue JsonValue::at(const char* key) const {
  if (!value_->is_object()) unexpected("an object");
  const std::string place = place_.empty() ? key : place_ + "." + key;
  const auto found = value_->find(key);
  if (found == value_->end()) throw JsonError(fmt::format("{}: \"{}\" is missing", origin_, place), place);
  return {*found, origin_, place};
}

std::vector<JsonValue> JsonValue::items() const {
  if (!value_->is_array()) unexpected("a list");
  std::vector<JsonValue> items;
  for (const Json& item : *value_) items.push_back({item, origin_, fmt::format("{}[{}]", place_, items.size())});
  return items;
}

int64_t JsonValue::integer(int64_t low, int64_t high) const {
  const bool whole = value_->is_number_integer();
  const bool fits = value_->is_number_unsigned() ? std::in_range<int64_t>(value_->get<uint64_t>()) : whole;
  const int64_t number = fits ? value_->get<int64_t>() : 0;
  if (!fits || number < low || number > high) unexpected(fmt::format("an integer from {} to {}", low, high));
  return number;
}

uint64_t JsonValue::whole() const {
  if (!value_->is_number_unsigned()) unexpected("a non-negative integer");
  return value_->get<uint64_t>();
}

double JsonValue::number_or_nan() const {
  return value_->is_null() ? std::nan("") : number();
}

double JsonValue::number() const {
  if (!value_->is_number()) unexpected("a number");
  return value_->get<double>();
}

bool JsonValue::flag() const {
  if (!value_->is_boolean()) unexpected("true or false");
  return value_->get<bool>();
}

std::string JsonValue::text() const {
  if (!value_->is_string()) unexpected("a string");
  return value_->get<std::string>();
}

std::vector<double> JsonValue::numbers() const {
  if (!value_->is_array()) unexpected("a list of numbers");
  std::vector<double> numbers;
  numbers.reserve(value_->size());
  for (const Json& item : *value_) {
    if (!item.is_number() && !item.is_null()) unexpected("a list of numbers");
    numbers.push_back(item.is_null() ? std::nan("") : item.get<double>());
  }
  return numbers;
}

std::map<std::string, std::string> JsonValue::texts() const {
  if (!value_->is_object()) unexpected("an object of strings");
  std::map<std::string, std::string> texts;
  for (const auto& [key, value] : value_->items()) {
    require(value.is_string(), "{}: \"{}.{}\" is {}, expected a string", origin_, place_, printable(key),
            described(value));
    texts[key] = value.get<std::string>();
  }
  return texts;
}

}  // namespace furious
