#include <algorithm>
#include <functional>
#include <utility>

#include "model/safetensors_format.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace safetensors;

constexpr size_t kCopyBytes = size_t{4} << 20;
static_assert(kCopyBytes % LargeHash::kBlock == 0);

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
