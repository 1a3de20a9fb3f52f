// JSON from files: parsed within limits, with errors that name the file and the position of the value.
//
// All JSON files are read through here, except two kinds that are parsed as a stream without building a document: the
// header and index of safetensors (model/safetensors.cpp), and lines of a corpus of which one field is used
// (data/reader.cpp).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "furious/error.h"

namespace furious {

struct JsonLimits {
  uint64_t bytes = uint64_t{256} << 20;
  int depth = 64;             // limited since nlohmann::json compares and dumps values recursively
  bool python_words = false;  // read bare Infinity, -Infinity and NaN, as Python writes them, as null
};

// Messages begin with `origin`.
nlohmann::json parse_json(std::string_view text, const std::string& origin, const JsonLimits& limits = {});
nlohmann::json read_json(const std::filesystem::path& path, const JsonLimits& limits = {});

// The reason in a message of nlohmann::json, without its error number, position and copy of the text.
std::string json_reason(const std::string& message);

// What a JsonValue throws: `place` is the position of the value, as its message names it; empty: the whole document.
struct JsonError : Error {
  JsonError(const std::string& message, std::string its_place) : Error(message), place(std::move(its_place)) {}
  std::string place;
};

// A value with its position in the document. A value of the wrong type or range is an Error such as
//   out/progress.json: "position.file" is -1, expected an integer from 0 to 3
// Refers to the parsed document, which must outlive it.
class JsonValue {
 public:
  JsonValue(const nlohmann::json& value, std::string origin);

  const nlohmann::json& json() const { return *value_; }
  bool has(const char* key) const;  // false also for null
  JsonValue at(const char* key) const;
  std::vector<JsonValue> items() const;  // of an array

  int64_t integer(int64_t low, int64_t high) const;
  uint64_t whole() const;  // a non-negative integer
  double number() const;
  double number_or_nan() const;  // null is NaN, which JSON cannot represent
  bool flag() const;
  std::string text() const;
  std::vector<double> numbers() const;               // of an array; null is NaN
  std::map<std::string, std::string> texts() const;  // of an object

  // Throws such a JsonError, for conditions that only the caller can check.
  [[noreturn]] void unexpected(std::string_view expected) const;

 private:
  JsonValue(const nlohmann::json& value, const std::string& origin, std::string place);

  const nlohmann::json* value_;
  std::string origin_;
  std::string place_;  // "train.shards[2].tokens"; empty: the whole document
};

}  // namespace furious
