// JSON from files: read within limits, and taken apart with errors that name the file and the place in it.
//
// Every JSON file is read through here, but for two kinds that are passed over as a stream and never kept whole: the
// header and index of safetensors (model/safetensors.cpp), and lines of a corpus of which one field is taken
// (data/reader.cpp).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace furious {

struct JsonLimits {
  uint64_t bytes = uint64_t{256} << 20;
  int depth = 64;             // comparing and writing a value is recursive in the library
  bool python_words = false;  // bare Infinity, -Infinity and NaN, as Python writes them, are taken for null
};

// Errors begin with `origin`.
nlohmann::json parse_json(std::string_view text, const std::string& origin, const JsonLimits& limits = {});
nlohmann::json read_json(const std::filesystem::path& path, const JsonLimits& limits = {});

// What is wrong, out of the library's message: without its number, place and a copy of the text.
std::string json_reason(const std::string& message);

// A value with its place: what is not as expected is an Error such as
//   out/progress.json: "position.file" is -1, expected a whole number from 0 to 3
// Refers to the parsed text, which must outlive it.
class JsonValue {
 public:
  JsonValue(const nlohmann::json& value, std::string origin);

  const nlohmann::json& json() const { return *value_; }
  bool has(const char* key) const;  // and it is not null
  JsonValue at(const char* key) const;
  std::vector<JsonValue> items() const;  // of a list

  int64_t integer(int64_t low, int64_t high) const;
  uint64_t whole() const;  // any that is not negative
  double number() const;
  double number_or_nan() const;  // null is NaN, which JSON does not have
  bool flag() const;
  std::string text() const;
  std::vector<double> numbers() const;               // of a list; null is NaN
  std::map<std::string, std::string> texts() const;  // of an object

  // For what only the caller can see.
  [[noreturn]] void unexpected(std::string_view expected) const;

 private:
  JsonValue(const nlohmann::json& value, const std::string& origin, std::string place);

  const nlohmann::json* value_;
  std::string origin_;
  std::string place_;  // "train.shards[2].tokens"; empty: the whole
};

}  // namespace furious
