#include "emulator/fat_binary.h"

#include <fmt/format.h>
#include <zstd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace furious::emulator {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1;
struct Wrapper {
  uint32_t magic, version;
  const std::byte* container;
  const void* others;  // of relocatable device code
};

constexpr uint32_t kContainerMagic = 0xba55ed50;
struct Container {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // of the entries
};

constexpr uint16_t kPtx = 1;
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;
constexpr uint64_t kExactArchitecture = 0x100000;  // as in sm_90a: for that one alone
constexpr uint64_t kFamily = 0x200000;             // as in sm_120f: for those of the same major version
struct Entry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t padded_bytes;
  uint32_t compressed_bytes, options;
  uint16_t ptx_minor, ptx_major;
  uint32_t architecture, name_offset, name_bytes;
  uint64_t flags, unused, bytes;
};
static_assert(sizeof(Entry) == 64);

template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

void require(bool condition, std::string_view what) {
  if (!condition) throw std::runtime_error(fmt::format("fat binary: {}", what));
}

// A block of LZ4: sequences of a token, literals, and a copy of what was written `distance` bytes ago.
std::string decompress_lz4(std::string_view in, size_t bytes) {
  std::string out;
  out.reserve(bytes);
  size_t at = 0;
  const auto next = [&] {
    require(at < in.size(), "the LZ4 data ends too early");
    return static_cast<size_t>(static_cast<uint8_t>(in[at++]));
  };
  const auto length = [&](size_t nibble) {
    size_t sum = nibble;
    for (size_t more = nibble == 15 ? 255 : 0; more == 255; sum += more) more = next();
    return sum;
  };
  while (at < in.size()) {
    const size_t token = next();
    const size_t literals = length(token >> 4);
    require(literals <= in.size() - at, "the LZ4 data ends too early");
    out.append(in.substr(at, literals));
    at += literals;
    if (at == in.size()) break;  // the last sequence has no copy
    const size_t low = next();
    const size_t distance = low | next() << 8;
    const size_t copied = length(token & 15) + 4;
    require(distance > 0 && distance <= out.size() && copied <= bytes - std::min(bytes, out.size()),
            "the LZ4 data is damaged");
    for (size_t i = 0; i < copied; ++i) out.push_back(out[out.size() - distance]);  // may overlap what it writes
  }
  require(out.size() == bytes, "the LZ4 data has another size");
  return out;
}

std::string decompress_zstd(std::string_view in, size_t bytes) {
  std::string out(bytes, '\0');
  require(ZSTD_decompress(out.data(), out.size(), in.data(), in.size()) == bytes, "the zstd data is damaged");
  return out;
}

std::string text_of(const Entry& entry, const std::byte* payload) {
  const auto* const data = reinterpret_cast<const char*>(payload);
  std::string text;
  if ((entry.flags & kZstd) != 0)
    text = decompress_zstd({data, entry.compressed_bytes}, entry.bytes);
  else if ((entry.flags & kLz4) != 0)
    text = decompress_lz4({data, entry.compressed_bytes}, entry.bytes);
  else
    text.assign(data, entry.padded_bytes);
  text.resize(std::min(text.size(), text.find('\0')));  // the padding
  return text;
}

bool runs_on(const Entry& entry, uint32_t device) {
  if ((entry.flags & kExactArchitecture) != 0) return entry.architecture == device;
  if ((entry.flags & kFamily) != 0 && entry.architecture / 10 != device / 10) return false;
  return entry.architecture <= device;
}

// Of code for the same architecture, that which may use more of it.
uint32_t rank_of(const Entry& entry) {
  return 2 * entry.architecture + ((entry.flags & (kExactArchitecture | kFamily)) != 0 ? 1 : 0);
}

}  // namespace

std::optional<DeviceCode> device_code(const void* wrapper, int major, int minor) {
  const auto outer = read<Wrapper>(static_cast<const std::byte*>(wrapper));
  require(outer.magic == kWrapperMagic, "unknown wrapper");
  const auto container = read<Container>(outer.container);
  require(container.magic == kContainerMagic, "unknown container");
  const auto device = static_cast<uint32_t>(10 * major + minor);
  Entry best{};
  const std::byte* payload = nullptr;
  const std::byte* at = outer.container + container.header_bytes;
  const std::byte* const end = at + container.bytes;
  while (at < end) {
    const auto entry = read<Entry>(at);
    require(entry.header_bytes >= sizeof(Entry), "unknown entry");
    if (entry.kind == kPtx && runs_on(entry, device) && rank_of(entry) > rank_of(best)) {
      best = entry;
      payload = at + entry.header_bytes;
    }
    at += entry.header_bytes + entry.padded_bytes;
  }
  if (payload == nullptr) return std::nullopt;
  return DeviceCode{static_cast<int>(best.architecture), text_of(best, payload)};
}

}  // namespace furious::emulator
