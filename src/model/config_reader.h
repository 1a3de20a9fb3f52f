// The keys of a config.json, read with errors that name the file and the key.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/names.h"
#include "ops/mixer/mixer.h"

namespace furious {

// Far beyond any model, and whatever is computed from them still fits 64 bits.
inline constexpr int64_t kMostWidth = 1 << 22;
inline constexpr int64_t kMostHeads = 1 << 14;
inline constexpr int64_t kMostLayers = 1 << 14;

template <class Number>
struct Range {
  Number low, high;
};

inline constexpr Range<int64_t> kWidth{1, kMostWidth}, kHeads{1, kMostHeads}, kLayers{1, kMostLayers};
inline constexpr Range<int64_t> kHeadDim{kSmallestDim, kLargestDim};
inline constexpr Range<float> kEps{1e-20f, 1};
inline constexpr Range<double> kRopeBase{1, 1e15};

class ConfigReader {
 public:
  using Json = nlohmann::json;  // finds a key fast, however many there are

  ConfigReader(Json json, std::string origin) : origin_(std::move(origin)), json_(std::move(json)) {
    require(json_.is_object(), "{}: not a JSON object; expected the configuration of a model", origin_);
  }

  void operator()(const char* key, int64_t& value, Range<int64_t> range) const {
    const Json& found = at(key);
    const bool fits = found.is_number_integer() && found >= range.low && found <= range.high;
    if (!fits) unexpected(key, fmt::format("an integer from {} to {}", range.low, range.high));
    value = found.get<int64_t>();
  }
  template <class Real>
  void operator()(const char* key, Real& value, Range<Real> range) const {
    const Json& found = at(key);
    const double number = found.is_number() ? found.get<double>() : std::nan("");
    // Negated, so that NaN is refused.
    if (!(number >= static_cast<double>(range.low) && number <= static_cast<double>(range.high)))
      unexpected(key, fmt::format("a number from {} to {}", range.low, range.high));
    value = static_cast<Real>(number);
  }
  void operator()(const char* key, bool& value) const {
    if (!at(key).is_boolean()) unexpected(key, "true or false");
    value = at(key).get<bool>();
  }
  void operator()(const char* key, std::string& value) const {
    if (!at(key).is_string()) unexpected(key, "a string");
    value = at(key).get<std::string>();
  }

  const std::string& origin() const { return origin_; }
  bool contains(const char* key) const { return json_.contains(key); }
  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  const Json& value(const char* key) const { return at(key); }

  // For a key that may be left out, or null.
  template <class Value, class... More>
  void optional(const char* key, Value& value, More... range) const {
    read_.insert(key);
    if (has(key)) (*this)(key, value, range...);
  }

  // For a key that may be left out, or null, and can have no other value.
  void only(const char* key, const Json& expected, std::string_view why) const {
    read_.insert(key);
    if (has(key) && at(key) != expected) unexpected(key, fmt::format("{}: {}", expected.dump(), why));
  }

  ConfigReader inside(const char* key) const { return {at(key), fmt::format("{}: \"{}\"", origin_, key)}; }

  [[noreturn]] void unexpected(const char* key, std::string_view expected) const {
    fail("{}: \"{}\" is {}, expected {}", origin_, key, printable(at(key).dump()), expected);
  }

  // Keys that change no result.
  void ignore(std::initializer_list<const char*> keys) const { read_.insert(keys.begin(), keys.end()); }
  // Refuses every key that was neither read nor ignored, unless it says nothing: it might change the result.
  void finish(std::string_view model) const {
    for (const auto& [key, value] : json_.items())
      require(read_.contains(key) || value.is_null(),
              "{}: \"{}\" is {}, which is not known of a model {} and may change what it computes; remove the key if "
              "it does not",
              origin_, printable(key), printable(value.dump()), model);
  }

 private:
  const Json& at(const char* key) const {
    read_.insert(key);
    const auto found = json_.find(key);
    require(found != json_.end(), "{}: \"{}\" is missing", origin_, key);
    return *found;
  }

  std::string origin_;
  Json json_;
  mutable std::set<std::string, std::less<>> read_;
};

}  // namespace furious
