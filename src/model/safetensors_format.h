// What reading and writing safetensors files share, inside this folder.
#pragma once

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/hash.h"
#include "model/safetensors.h"

namespace furious::safetensors {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
// What a header may make us keep, beyond its own length: no file of a model comes near.
constexpr size_t kMaxRank = 32;
constexpr size_t kMaxMetadata = 100'000;
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr const char* kChecksumsKey = "furious.checksums";

struct StoredType {
  std::string_view name;
  uint64_t bits;
  std::optional<DType> loads_as;
};
const StoredType* find_type(std::string_view name);  // nullptr when there is none
std::string_view stored_name_of(DType dtype);

std::string shown(std::string_view name);  // in quotes, printable
[[noreturn]] void damaged(const std::filesystem::path& file, std::string_view what);

// Receives a JSON text piece by piece. Nothing is kept but what a derived class keeps, so a hostile text cannot grow
// in memory. Whatever a derived class does not expect is refused.
class JsonEvents {
 public:
  using Json = nlohmann::json;

  explicit JsonEvents(const std::filesystem::path& file) : file_(file) {}
  virtual ~JsonEvents() = default;
  JsonEvents(const JsonEvents&) = delete;
  JsonEvents& operator=(const JsonEvents&) = delete;

  void parse(std::string_view text) {
    // The parser takes a zero byte for the end of the text.
    if (text.find('\0') != std::string_view::npos) refuse("a zero byte in the JSON text");
    Json::sax_parse(text.begin(), text.end(), this);
  }

  virtual bool start_object(size_t) { unexpected("an object"); }
  virtual bool end_object() { unexpected("the end of an object"); }
  virtual bool start_array(size_t) { unexpected("a list"); }
  virtual bool end_array() { unexpected("the end of a list"); }
  virtual bool key(std::string&) { unexpected("a name"); }
  virtual bool string(std::string&) { unexpected("a string"); }
  virtual bool number_unsigned(uint64_t) { unexpected("a number"); }
  virtual bool number_integer(int64_t) { unexpected("a negative number"); }
  virtual bool number_float(double, const std::string&) { unexpected("a fraction or too large a number"); }
  virtual bool boolean(bool) { unexpected("true or false"); }
  virtual bool null() { unexpected("null"); }
  bool binary(Json::binary_t&) { unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const Json::exception&) {
    refuse(fmt::format("invalid JSON or UTF-8 at byte {}", position));
  }

 protected:
  [[noreturn]] void refuse(const std::string& what) const { damaged(file_, what); }
  [[noreturn]] void unexpected(std::string_view what) const { refuse(complaint(what)); }
  virtual std::string complaint(std::string_view what) const = 0;  // what stands where, and what was expected there

 private:
  const std::filesystem::path& file_;
};

// What the checksum of a header is of; the tensors come in the order of their names. Not their places, which leave no
// choice once sizes and bytes are known.
class HeaderChecksum {
 public:
  explicit HeaderChecksum(const std::map<std::string, std::string>& metadata) {
    for (const auto& [key, value] : metadata) text_ += fmt::format("{}\n{}\n", key, value);
  }
  void add(std::string_view name, std::string_view dtype, std::span<const int64_t> shape, uint64_t checksum) {
    text_ += fmt::format("{}\n{} {} {:x}\n", name, dtype, fmt::join(shape, ","), checksum);
  }
  uint64_t finish() const { return hash_of_large(std::as_bytes(std::span(text_))); }

 private:
  std::string text_;
};

struct OpenedFile {
  std::vector<StoredTensor> tensors;  // sorted by name
  std::map<std::string, std::string> metadata;
  std::optional<uint64_t> checksum;
};

// Reads and checks the whole header.
OpenedFile open_file(const std::shared_ptr<const MappedFile>& file);
const StoredTensor* find_by_name(const std::vector<StoredTensor>& sorted, std::string_view name);

constexpr std::string_view kIndexEnding = ".index.json";
// The tensors of the files that an index names, which lie beside it.
std::vector<StoredTensor> open_index(const std::filesystem::path& path);

}  // namespace furious::safetensors
