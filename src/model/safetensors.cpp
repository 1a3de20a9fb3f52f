#include "model/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "ops/elementwise.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
// What a header may make us keep, beyond its own length: no file of a model comes near.
constexpr size_t kMaxRank = 32;
constexpr size_t kMaxMetadata = 100'000;
constexpr size_t kCopyBytes = size_t{4} << 20;
static_assert(kCopyBytes % LargeHash::kBlock == 0);
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr const char* kChecksumsKey = "furious.checksums";
constexpr std::string_view kIndexEnding = ".index.json";

struct StoredType {
  std::string_view name;
  uint64_t bits;
  std::optional<DType> loads_as;
};

constexpr StoredType kStoredTypes[] = {
    {"F64", 64, DType::f64}, {"F32", 32, DType::f32}, {"BF16", 16, DType::bf16},
    {"F16", 16, DType::f16}, {"I64", 64, DType::i32}, {"I32", 32, DType::i32},
    {"U64", 64, {}},         {"U32", 32, {}},         {"I16", 16, {}},
    {"U16", 16, {}},         {"I8", 8, {}},           {"U8", 8, {}},
    {"BOOL", 8, {}},         {"C64", 64, {}},         {"F8_E4M3", 8, {}},
    {"F8_E5M2", 8, {}},      {"F8_E8M0", 8, {}},      {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},      {"F4", 4, {}},
};

const StoredType* find_type(std::string_view name) {
  const auto found = std::ranges::find(kStoredTypes, name, &StoredType::name);
  return found == std::end(kStoredTypes) ? nullptr : &*found;
}

std::string_view stored_name_of(DType dtype) {
  for (const StoredType& type : kStoredTypes)
    if (type.loads_as == dtype && type.bits == 8 * size_of(dtype)) return type.name;
  fail("safetensors: no name for dtype {}", name_of(dtype));
}

std::string shown(std::string_view name) {
  return fmt::format("\"{}\"", printable(name));
}

[[noreturn]] void damaged(const fs::path& file, std::string_view what) {
  fail("{}: {}; the file is damaged, incomplete or of another format: copy, download or save it again", file.string(),
       what);
}

// Receives a JSON text piece by piece. Nothing is kept but what a derived class keeps, so a hostile text cannot grow
// in memory. Whatever a derived class does not expect is refused.
class JsonEvents {
 public:
  using Json = nlohmann::json;

  explicit JsonEvents(const fs::path& file) : file_(file) {}
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
  const fs::path& file_;
};

struct HeaderEntry {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<uint64_t>> offsets;
};

// {"__metadata__": {text: text, …}, name: {"dtype": text, "shape": [n, …], "data_offsets": [begin, end]}, …}
class HeaderEvents final : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;

  std::vector<HeaderEntry> entries;
  std::map<std::string, std::string> metadata;

  bool start_object(size_t) override {
    if (place_ == Place::start) return enter(Place::header);
    if (place_ != Place::header) unexpected("an object");
    if (name_ != kMetadataKey) {
      entries.push_back({.name = name_, .dtype = {}, .shape = {}, .offsets = {}});
      return enter(Place::tensor);
    }
    if (std::exchange(seen_metadata_, true)) refuse("\"__metadata__\" appears twice");
    return enter(Place::metadata);
  }

  bool end_object() override {
    if (place_ == Place::tensor) check_complete(entries.back());
    return enter(Place::header);
  }

  bool key(std::string& text) override {
    if (place_ == Place::header)
      name_ = text;
    else if (place_ == Place::metadata)
      add_metadata(text);
    else
      field_ = text;
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::metadata)
      *value_ = text;
    else if (place_ == Place::tensor && field_ == "dtype")
      set_once(entries.back().dtype) = text;
    else
      unexpected("a string");
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::tensor) unexpected("a list");
    if (field_ == "shape") {
      set_once(entries.back().shape);
      return enter(Place::shape);
    }
    if (field_ != "data_offsets") unexpected("a list");
    set_once(entries.back().offsets);
    return enter(Place::offsets);
  }

  bool end_array() override { return enter(Place::tensor); }

  bool number_unsigned(uint64_t number) override {
    if (place_ == Place::shape)
      add_size(*entries.back().shape, number);
    else if (place_ == Place::offsets)
      add_offset(*entries.back().offsets, number);
    else
      unexpected("a number");
    return true;
  }

 private:
  enum class Place { start, header, metadata, tensor, shape, offsets };

  bool enter(Place place) {
    place_ = place;
    return true;
  }

  std::string complaint(std::string_view what) const override {
    switch (place_) {
      case Place::start:
        return fmt::format("the header is {}, expected an object", what);
      case Place::metadata:
        return fmt::format("\"__metadata__\" holds {}, expected texts", what);
      case Place::header:
        return fmt::format("tensor {} is {}, expected an object", shown(name_), what);
      default:
        return fmt::format(
            "tensor {}: {} holds {}, expected \"dtype\" with a string, \"shape\" and \"data_offsets\" with lists of "
            "whole "
            "numbers",
            shown(name_), shown(field_), what);
    }
  }

  void check_complete(const HeaderEntry& entry) const {
    const auto need = [&](bool there, std::string_view field) {
      if (!there) refuse(fmt::format("tensor {} has no \"{}\"", shown(name_), field));
    };
    need(entry.dtype.has_value(), "dtype");
    need(entry.shape.has_value(), "shape");
    need(entry.offsets.has_value(), "data_offsets");
    if (entry.offsets->size() != 2) refuse(fmt::format("tensor {}: \"data_offsets\" has one end only", shown(name_)));
  }

  void add_metadata(const std::string& text) {
    if (metadata.size() == kMaxMetadata) refuse(fmt::format("\"__metadata__\" has over {} entries", kMaxMetadata));
    const auto [entry, is_new] = metadata.try_emplace(text);
    if (!is_new) refuse(fmt::format("\"__metadata__\" holds {} twice", shown(text)));
    value_ = &entry->second;
  }

  void add_size(std::vector<int64_t>& shape, uint64_t size) const {
    if (shape.size() == kMaxRank)
      refuse(fmt::format("tensor {}: \"shape\" has over {} dimensions", shown(name_), kMaxRank));
    if (size > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      refuse(fmt::format("tensor {}: \"shape\" holds {}, which is too large", shown(name_), size));
    shape.push_back(static_cast<int64_t>(size));
  }

  void add_offset(std::vector<uint64_t>& offsets, uint64_t offset) const {
    if (offsets.size() == 2)
      refuse(fmt::format("tensor {}: \"data_offsets\" has more than a begin and an end", shown(name_)));
    offsets.push_back(offset);
  }

  template <class T>
  T& set_once(std::optional<T>& field) const {
    if (field) refuse(fmt::format("tensor {} has \"{}\" twice", shown(name_), field_));
    return field.emplace();
  }

  Place place_ = Place::start;
  std::string name_;
  std::string field_;
  std::string* value_ = nullptr;
  bool seen_metadata_ = false;
};

// {"weight_map": {tensor: file, …}, …}; what else the index holds is passed over.
class IndexEvents final : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;

  std::map<std::string, std::string> files;  // by tensor
  bool seen_map = false;

  bool start_object(size_t) override {
    ++depth_;
    if (depth_ == 2 && name_ == "weight_map") {
      if (std::exchange(seen_map, true)) refuse("\"weight_map\" appears twice");
      in_map_ = true;
    } else if (depth_ > 2) {
      pass("an object");
    }
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(size_t) override {
    pass("a list");
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(std::string& text) override {
    name_ = text;
    return true;
  }
  bool string(std::string& text) override {
    if (!in_map_) return pass("a string");
    if (!files.try_emplace(name_, text).second)
      refuse(fmt::format("tensor {} appears twice in \"weight_map\"", shown(name_)));
    return true;
  }
  bool number_unsigned(uint64_t) override { return pass("a number"); }
  bool number_integer(int64_t) override { return pass("a number"); }
  bool number_float(double, const std::string&) override { return pass("a number"); }
  bool boolean(bool) override { return pass("true or false"); }
  bool null() override { return pass("null"); }

 private:
  bool pass(std::string_view what) const {
    if (in_map_ || depth_ == 0 || (depth_ == 1 && name_ == "weight_map")) unexpected(what);
    return true;
  }

  std::string complaint(std::string_view what) const override {
    if (depth_ == 0) return fmt::format("the index is {}, expected an object", what);
    if (!in_map_) return fmt::format("\"weight_map\" is {}, expected an object", what);
    return fmt::format("tensor {} in \"weight_map\" is {}, expected the name of a file", shown(name_), what);
  }

  size_t depth_ = 0;
  bool in_map_ = false;
  std::string name_;
};

// A tensor's size in bits; nothing when it is more than a file can hold. A size of 0 does not excuse the others: their
// product is computed again as strides.
std::optional<uint64_t> checked_bits(std::span<const int64_t> shape, uint64_t element_bits) {
  constexpr uint64_t kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  uint64_t bits = element_bits;
  for (const int64_t size : shape) {
    const uint64_t factor = std::max<uint64_t>(static_cast<uint64_t>(size), 1);
    if (bits > kMost / factor) return std::nullopt;
    bits *= factor;
  }
  return std::ranges::count(shape, 0) > 0 ? 0 : bits;
}

void check_size(const fs::path& file, const HeaderEntry& entry) {
  const StoredType* const type = find_type(*entry.dtype);
  const std::optional<uint64_t> bits = checked_bits(*entry.shape, type ? type->bits : 1);
  const std::string shape = fmt::format("[{}]", fmt::join(*entry.shape, ", "));
  if (!bits) damaged(file, fmt::format("tensor {}: shape {} is too large", shown(entry.name), shape));
  if (!type) return;  // of a dtype yet to be invented, whose size nobody here knows
  const uint64_t stored = (*entry.offsets)[1] - (*entry.offsets)[0];
  if (*bits % 8 != 0 || stored != *bits / 8)
    damaged(file, fmt::format("tensor {}: {} of shape {} needs {} bits, but \"data_offsets\" give it {} bytes",
                              shown(entry.name), type->name, shape, *bits, stored));
}

// Offsets in range and sizes right for each tensor; all together cover the data exactly once.
void check_layout(const fs::path& file, std::vector<HeaderEntry>& entries, uint64_t data_bytes) {
  for (const HeaderEntry& entry : entries) {
    const uint64_t begin = (*entry.offsets)[0];
    const uint64_t end = (*entry.offsets)[1];
    if (begin > end || end > data_bytes)
      damaged(file, fmt::format("tensor {}: \"data_offsets\" [{}, {}] do not lie in the file's {} bytes of data",
                                shown(entry.name), begin, end, data_bytes));
    check_size(file, entry);
  }
  std::ranges::sort(
      entries, {}, [](const HeaderEntry& entry) -> auto& { return *entry.offsets; });
  uint64_t covered = 0;
  for (const HeaderEntry& entry : entries) {
    const uint64_t begin = (*entry.offsets)[0];
    if (begin != covered)
      damaged(file, fmt::format("tensor {} begins at byte {} of the data, {} byte {} where the one before it ends",
                                shown(entry.name), begin, begin < covered ? "before" : "after", covered));
    covered = (*entry.offsets)[1];
  }
  if (covered != data_bytes)
    damaged(file, fmt::format("{} bytes of data after the last tensor belong to none", data_bytes - covered));
}

std::string_view header_of(const MappedFile& file) {
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() < kLengthBytes)
    damaged(file.path(), fmt::format("{} bytes are too few for a safetensors file", bytes.size()));
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kMaxHeaderBytes)
    damaged(file.path(), fmt::format("header length {} exceeds the format's limit of {}", length, kMaxHeaderBytes));
  if (length > bytes.size() - kLengthBytes)
    damaged(file.path(), fmt::format("header length {} exceeds the file's {} bytes", length, bytes.size()));
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  if (!header.starts_with('{')) damaged(file.path(), "the header is not a JSON object");
  return header;
}

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

// Moves the checksums from the metadata to where they belong.
void take_checksums(const fs::path& path, OpenedFile& opened) {
  const auto entry = opened.metadata.extract(kChecksumsKey);
  if (entry.empty()) return;
  const std::string& text = entry.mapped();
  constexpr size_t kDigits = 16;
  const auto number = [&](size_t index) {
    const size_t begin = index * (kDigits + 1);
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data() + begin, text.data() + begin + kDigits, value, 16);
    if (error != std::errc() || end != text.data() + begin + kDigits || (begin > 0 && text[begin - 1] != ' '))
      damaged(path, "its checksums are no numbers");
    return value;
  };
  if (text.size() != (opened.tensors.size() + 1) * (kDigits + 1) - 1)
    damaged(path, fmt::format("its checksums are not those of {} tensors", opened.tensors.size()));
  HeaderChecksum header(opened.metadata);
  for (size_t i = 0; i < opened.tensors.size(); ++i) {
    StoredTensor& tensor = opened.tensors[i];
    tensor.checksum = number(i + 1);
    header.add(tensor.name, tensor.dtype, tensor.shape, *tensor.checksum);
  }
  opened.checksum = number(0);
  if (header.finish() != *opened.checksum) damaged(path, "its header or metadata differs from its checksum");
}

OpenedFile open_file(const std::shared_ptr<const MappedFile>& file) {
  const fs::path& path = file->path();
  const std::string_view header = header_of(*file);
  const std::span<const std::byte> data = file->bytes().subspan(kLengthBytes + header.size());
  HeaderEvents events(path);
  events.parse(header);
  check_layout(path, events.entries, data.size());

  OpenedFile opened{.tensors = {}, .metadata = std::move(events.metadata), .checksum = {}};
  opened.tensors.reserve(events.entries.size());
  for (HeaderEntry& entry : events.entries) {
    const uint64_t begin = (*entry.offsets)[0];
    const uint64_t end = (*entry.offsets)[1];
    opened.tensors.push_back({std::move(entry.name), std::move(*entry.dtype), std::move(*entry.shape),
                              data.subspan(begin, end - begin), file});
  }
  std::ranges::sort(opened.tensors, {}, &StoredTensor::name);
  const auto twice = std::ranges::adjacent_find(opened.tensors, {}, &StoredTensor::name);
  if (twice != opened.tensors.end()) damaged(path, fmt::format("tensor {} appears twice", shown(twice->name)));
  take_checksums(path, opened);
  return opened;
}

const StoredTensor* find_by_name(const std::vector<StoredTensor>& tensors, std::string_view name) {
  const auto found = std::ranges::lower_bound(tensors, name, {}, &StoredTensor::name);
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

// The index says which file holds which tensor; what the files hold beyond that is left alone. Files lie beside the
// index: a name that leads elsewhere is refused.
std::vector<StoredTensor> open_index(const fs::path& path) {
  const std::string text = read_text(path, kMaxHeaderBytes);
  IndexEvents events(path);
  events.parse(text);
  if (!events.seen_map) damaged(path, "the index has no \"weight_map\"");

  std::map<std::string, OpenedFile> opened;
  std::vector<StoredTensor> tensors;
  for (const auto& [name, file] : events.files) {
    if (file.empty() || file == "." || file == ".." || file.find_first_of(std::string_view("/\\\0", 3)) != file.npos)
      fail("{}: tensor {} is said to lie in {}; expected the name of a file in the same directory", path.string(),
           shown(name), shown(file));
    if (!opened.contains(file)) {
      const fs::path shard = path.parent_path() / file;
      std::error_code ignored;
      require(fs::exists(shard, ignored), "{}: tensor {} is said to lie in {}, which is missing; copy or download it",
              path.string(), shown(name), shown(file));
      opened.emplace(file, open_file(std::make_shared<const MappedFile>(shard)));
    }
    const StoredTensor* const found = find_by_name(opened.at(file).tensors, name);
    if (!found) damaged(path, fmt::format("tensor {} is not in {}, where the index has it", shown(name), shown(file)));
    tensors.push_back(*found);
  }
  return tensors;
}

fs::path file_to_open(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return path;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"})
    if (fs::exists(path / name, ignored)) return path / name;
  fail("{}: holds neither model.safetensors nor model.safetensors.index.json", path.string());
}

std::string label(const StoredTensor& stored) {
  return fmt::format("{}: tensor {}", stored.file->path().string(), shown(stored.name));
}

// Names the tensor if it cannot be loaded at all: another dtype than ours, too many dimensions.
DType loadable_dtype(const StoredTensor& stored) {
  const StoredType* const type = find_type(stored.dtype);
  require(type && type->loads_as, "{} has dtype {}, which cannot be loaded; convert it to F32, BF16 or F16",
          label(stored), shown(stored.dtype));
  return *type->loads_as;
}

Shape loadable_shape(const StoredTensor& stored) {
  require(stored.shape.size() <= Shape::kMaxRank, "{} has {} dimensions, more than {}", label(stored),
          stored.shape.size(), Shape::kMaxRank);
  return Shape(std::span<const int64_t>(stored.shape));
}

void check_convertible(const StoredTensor& stored, DType to) {
  const DType from = loadable_dtype(stored);
  require((from == DType::i32) == (to == DType::i32), "{} has dtype {}, which is not converted to {}", label(stored),
          stored.dtype, name_of(to));
}

bool usable_in_place(const StoredTensor& stored, DType dtype) {
  return stored.dtype == stored_name_of(dtype) &&
         reinterpret_cast<uintptr_t>(stored.bytes.data()) % size_of(dtype) == 0;
}

// The mapping itself as a tensor. Tensors know no const; whoever gets this one only reads it.
Tensor in_place(const StoredTensor& stored, DType dtype) {
  return Tensor::wrap(const_cast<std::byte*>(stored.bytes.data()), loadable_shape(stored), dtype, {}, stored.file);
}

Tensor narrowed_to_i32(const StoredTensor& stored) {
  Tensor out = Tensor::empty(loadable_shape(stored), DType::i32);
  int32_t* const to = out.data<int32_t>();
  for (int64_t i = 0; i < out.elements(); ++i) {
    int64_t value = 0;
    std::memcpy(&value, stored.bytes.data() + i * 8, 8);
    require(std::in_range<int32_t>(value), "{} holds {} at position {}, which does not fit 32 bits", label(stored),
            value, i);
    to[i] = static_cast<int32_t>(value);
  }
  return out;
}

// What is wrong with the bytes of a tensor; empty if nothing is known to be.
std::string difference(const StoredTensor& stored) {
  if (!stored.checksum || hash_of_large(stored.bytes) == *stored.checksum) return {};
  const auto begin = static_cast<size_t>(stored.bytes.data() - stored.file->bytes().data());
  return fmt::format("tensor {} (bytes {} to {}) differs from its checksum", shown(stored.name), begin,
                     begin + stored.bytes.size());
}

void check_bytes(const StoredTensor& stored) {
  if (const std::string found = difference(stored); !found.empty()) damaged(stored.file->path(), found);
}

// On the CPU in the dtype it is stored in, aligned; a copy only where the file's bytes do not serve as they are.
Tensor readable(const StoredTensor& stored) {
  const DType dtype = loadable_dtype(stored);
  check_bytes(stored);
  if (stored.dtype == "I64") return narrowed_to_i32(stored);
  if (usable_in_place(stored, dtype)) return in_place(stored, dtype);
  Tensor out = Tensor::empty(loadable_shape(stored), dtype);
  std::memcpy(out.raw(), stored.bytes.data(), stored.bytes.size());
  return out;
}

void append_text(std::string& json, std::string_view text, const fs::path& path) {
  try {
    json += nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail("{}: cannot be written: the name or metadata {} is not UTF-8", path.string(), shown(text));
  }
}

using NamedTensor = std::pair<const std::string, Tensor>;

void check_writable(const fs::path& path, const NamedTensor& entry) {
  const auto& [name, tensor] = entry;
  require(name != kMetadataKey, "{}: no tensor can have the name {}", path.string(), shown(name));
  require(tensor.defined(), "{}: tensor {} is missing", path.string(), shown(name));
  require(tensor.is_contiguous(), "{}: tensor {} is not contiguous; copy it first", path.string(), shown(name));
}

std::vector<const NamedTensor*> in_file_order(const std::map<std::string, Tensor>& tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& entry : tensors) order.push_back(&entry);
  std::ranges::stable_sort(order, std::greater{},
                           [](const NamedTensor* entry) { return size_of(entry->second.dtype()); });
  return order;
}

std::string header_for(const fs::path& path, const std::vector<const NamedTensor*>& order,
                       const std::map<std::string, std::string>& metadata) {
  std::string json = "{";
  const auto separate = [&] { json += json.back() == '{' ? "" : ","; };
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      separate();
      append_text(json, key, path);
      json += ':';
      append_text(json, value, path);
    }
    json += '}';
  }
  uint64_t offset = 0;
  for (const NamedTensor* entry : order) {
    const Tensor& tensor = entry->second;
    separate();
    append_text(json, entry->first, path);
    json += fmt::format(R"(:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", stored_name_of(tensor.dtype()),
                        fmt::join(tensor.shape().begin(), tensor.shape().end(), ","), offset, offset + tensor.bytes());
    offset += tensor.bytes();
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');  // the data begins aligned
  require(json.size() <= kMaxHeaderBytes && metadata.size() <= kMaxMetadata,
          "{}: cannot be written: names and metadata of {} bytes exceed the format's limits", path.string(),
          json.size());
  return json;
}

// Bytes in memory, written as an AtomicFile is.
class MemoryFile {
 public:
  explicit MemoryFile(uint64_t expected_bytes) { bytes_.reserve(expected_bytes); }
  void write(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  void overwrite(uint64_t offset, std::span<const std::byte> bytes) {
    std::ranges::copy(bytes, bytes_.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Returns the checksum of what it writes.
uint64_t write_data(auto& file, const Tensor& tensor) {
  const auto* const data = static_cast<const std::byte*>(tensor.raw());
  LargeHash hash;
  const auto write = [&](std::span<const std::byte> bytes) {
    hash.add(bytes);
    file.write(bytes);
  };
  if (tensor.device().is_cpu()) {
    write(std::span(data, tensor.bytes()));
    return hash.finish();
  }
  std::vector<std::byte> buffer(std::min(kCopyBytes, tensor.bytes()));
  for (size_t done = 0; done < tensor.bytes();) {
    const size_t count = std::min(buffer.size(), tensor.bytes() - done);
    memory::copy({}, buffer.data(), tensor.device(), data + done, count);
    write(std::span(buffer.data(), count));
    done += count;
  }
  return hash.finish();
}

std::string checksums_text(const std::map<std::string, Tensor>& tensors,
                           const std::map<std::string, std::string>& metadata,
                           const std::map<std::string, uint64_t>& checksums) {
  HeaderChecksum header(metadata);
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    const Shape& shape = tensor.shape();
    header.add(name, stored_name_of(tensor.dtype()), std::vector<int64_t>(shape.begin(), shape.end()),
               checksums.at(name));
    text += " " + hash_text(checksums.at(name));
  }
  return hash_text(header.finish()) + text;
}

// Writes into the file that `open`, called with the number of bytes, returns a pointer to.
template <class Open>
auto write_all(const fs::path& path, const std::map<std::string, Tensor>& tensors,
               const std::map<std::string, std::string>& metadata, Open&& open) {
  require(!metadata.contains(kChecksumsKey), "{}: metadata \"{}\" is written by itself", path.string(), kChecksumsKey);
  std::map<std::string, uint64_t> checksums;
  for (const NamedTensor& entry : tensors) {
    check_writable(path, entry);
    checksums[entry.first] = 0;
  }
  const std::vector<const NamedTensor*> order = in_file_order(tensors);
  const auto header = [&] {
    std::map<std::string, std::string> all = metadata;
    all[kChecksumsKey] = checksums_text(tensors, metadata, checksums);
    return header_for(path, order, all);
  };
  const std::string first = header();  // of the length that it will have; the checksums are known when all is written
  const uint64_t length = first.size();
  uint64_t bytes = kLengthBytes + length;
  for (const NamedTensor* entry : order) bytes += entry->second.bytes();

  auto file = open(bytes);
  file->write(std::as_bytes(std::span(&length, 1)));
  file->write(std::as_bytes(std::span(first)));
  for (const NamedTensor* entry : order) checksums[entry->first] = write_data(*file, entry->second);
  const std::string last = header();
  file->overwrite(kLengthBytes, std::as_bytes(std::span(last)));
  return file;
}

}  // namespace

SafetensorsReader::SafetensorsReader(const fs::path& path) : path_(file_to_open(path)) {
  if (path_.filename().string().ends_with(kIndexEnding)) {
    tensors_ = open_index(path_);
    return;
  }
  open(std::make_shared<const MappedFile>(path_));
}

SafetensorsReader::SafetensorsReader(const fs::path& name, std::span<const std::byte> bytes) : path_(name) {
  open(std::make_shared<const MappedFile>(name, bytes));
}

void SafetensorsReader::open(std::shared_ptr<const MappedFile> file) {
  OpenedFile opened = open_file(file);
  tensors_ = std::move(opened.tensors);
  metadata_ = std::move(opened.metadata);
  checksum_ = opened.checksum;
}

std::vector<std::string> SafetensorsReader::damage() const {
  std::vector<std::string> lines;
  for (const StoredTensor& tensor : tensors_)
    if (const std::string found = difference(tensor); !found.empty())
      lines.push_back(fmt::format("{}: {}", tensor.file->path().string(), found));
  return lines;
}

const StoredTensor* SafetensorsReader::find(std::string_view name) const {
  return find_by_name(tensors_, name);
}

const StoredTensor& SafetensorsReader::stored(std::string_view name) const {
  const StoredTensor* const found = find(name);
  if (found) return *found;
  std::vector<std::string> known;
  known.reserve(tensors_.size());
  for (const StoredTensor& tensor : tensors_) known.push_back(tensor.name);
  const std::string nearest = nearest_name(name, known);
  fail("{}: holds no tensor {}{}", path_.string(), shown(name),
       nearest.empty() ? "" : fmt::format("; the nearest name there is {}", shown(nearest)));
}

Tensor SafetensorsReader::load(std::string_view name) const {
  return load(name, loadable_dtype(stored(name)));
}

Tensor SafetensorsReader::load(std::string_view name, DType dtype) const {
  const StoredTensor& tensor = stored(name);
  check_convertible(tensor, dtype);
  const Tensor in = readable(tensor);
  const bool shares_the_file = in.raw() == tensor.bytes.data();
  return in.dtype() == dtype && !shares_the_file ? in : to_dtype(in, dtype);
}

void SafetensorsReader::load_into(std::string_view name, const Tensor& out) const {
  const StoredTensor& tensor = stored(name);
  check_convertible(tensor, out.dtype());
  require(loadable_shape(tensor) == out.shape(), "{} has shape {}, expected {}; the file belongs to another model",
          label(tensor), to_string(loadable_shape(tensor)), to_string(out.shape()));
  if (out.device().is_cpu())
    copy(out, readable(tensor));
  else
    copy_between(out, view(name, out.dtype()));
}

Tensor SafetensorsReader::view(std::string_view name, DType dtype) const {
  const StoredTensor& tensor = stored(name);
  if (!usable_in_place(tensor, dtype)) return load(name, dtype);
  check_bytes(tensor);
  return in_place(tensor, dtype);
}

void write_safetensors(const fs::path& path, const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  write_all(path, tensors, metadata, [&](uint64_t bytes) {
    return std::make_unique<AtomicFile>(path, bytes);
  })->commit();
}

std::vector<std::byte> safetensors_bytes(const std::map<std::string, Tensor>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  return write_all("tensors in memory", tensors, metadata,
                   [](uint64_t bytes) { return std::make_unique<MemoryFile>(bytes); })
      ->take();
}

}  // namespace furious
