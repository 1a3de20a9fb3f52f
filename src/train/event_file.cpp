#include "train/event_file.h"

#include <array>
#include <bit>
#include <cstring>

namespace furious {
namespace {

template <class Number>
std::string fixed(Number number) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof(number), '\0');
  std::memcpy(bytes.data(), &number, sizeof(number));
  return bytes;
}

std::string varint(uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(0x80 | (number & 0x7F));
  return bytes + static_cast<char>(number);
}

// Fields of a message, by how their value is encoded.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string key(uint32_t field, Wire wire) {
  return varint(field << 3 | wire);
}

std::string number_field(uint32_t field, uint64_t value) {
  return key(field, kVarint) + varint(value);
}

std::string bytes_field(uint32_t field, std::string_view bytes) {  // a text or a message
  return key(field, kBytes) + varint(bytes.size()) + std::string(bytes);
}

constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? 0x82F63B78u : 0);
    table[byte] = rest;
  }
  return table;
}();

// The checksum of data that may itself contain checksums.
uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u;
}

std::string record(std::string_view message) {
  const std::string length = fixed(static_cast<uint64_t>(message.size()));
  return length + fixed(masked_crc(length)) + std::string(message) + fixed(masked_crc(message));
}

std::string event(double time, int64_t step) {
  return key(1, kFixed64) + fixed(time) + number_field(2, static_cast<uint64_t>(step));
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) crc = kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

void EventValues::add_number(std::string_view tag, double value) {
  bytes_ += bytes_field(1, bytes_field(1, tag) + key(2, kFixed32) + fixed(static_cast<float>(value)));
}

// A tensor of one string, with the name of the plugin that shows it.
void EventValues::add_text(std::string_view tag, std::string_view text) {
  constexpr uint64_t kString = 7, kTensorData = 2;
  const std::string shape = bytes_field(2, number_field(1, 1));
  const std::string tensor = number_field(1, kString) + bytes_field(2, shape) + bytes_field(8, text);
  const std::string metadata = bytes_field(1, bytes_field(1, "text")) + number_field(4, kTensorData);
  bytes_ += bytes_field(1, bytes_field(1, tag) + bytes_field(8, tensor) + bytes_field(9, metadata));
}

std::string event_file_start(double time) {
  constexpr uint64_t kStart = 1;
  return record(event(time, 0) + bytes_field(3, "brain.Event:2")) +
         record(event(time, 0) + bytes_field(7, number_field(1, kStart)));
}

std::string event_record(double time, int64_t step, const EventValues& values) {
  return record(event(time, step) + bytes_field(5, values.bytes()));
}

}  // namespace furious
