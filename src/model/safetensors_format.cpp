#include "model/safetensors_format.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <utility>

#include "base/names.h"

namespace furious::safetensors {
namespace {

namespace fs = std::filesystem;

constexpr StoredType kStoredTypes[] = {
    {"F64", 64, DType::f64}, {"F32", 32, DType::f32}, {"BF16", 16, DType::bf16},
    {"F16", 16, DType::f16}, {"I64", 64, DType::i32}, {"I32", 32, DType::i32},
    {"U64", 64, {}},         {"U32", 32, {}},         {"I16", 16, {}},
    {"U16", 16, {}},         {"I8", 8, {}},           {"U8", 8, {}},
    {"BOOL", 8, {}},         {"C64", 64, {}},         {"F8_E4M3", 8, {}},
    {"F8_E5M2", 8, {}},      {"F8_E8M0", 8, {}},      {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},      {"F4", 4, {}},
};

}  // namespace

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

void damaged(const fs::path& file, std::string_view what) {
  fail("{}: {}; the file is damaged, incomplete or of another format: copy, download or save it again", file.string(),
       what);
}

namespace {

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

}  // namespace

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

}  // namespace furious::safetensors
