// Reads event files of TensorBoard for tests, independently of src/train/event_file.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace furious::testing {

struct ReadEvent {
  double time = 0;
  int64_t step = 0;
  std::string version;
  bool starts_session = false;
  std::map<std::string, float> numbers;
  std::map<std::string, std::string> texts;
};

// CRC-32C bit by bit: polynomial 0x1EDC6F41, reflected.
inline uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82F63B78u : crc >> 1;
  }
  return crc ^ 0xFFFFFFFFu;
}

template <class Number>
Number number_at(std::string_view bytes, size_t at) {
  require(at + sizeof(Number) <= bytes.size(), "the event file ends inside a number");
  Number number;
  std::memcpy(&number, bytes.data() + at, sizeof(number));
  return number;
}

// The fields of a protobuf message: numbers as they are, texts and messages as bytes.
struct ProtoField {
  uint64_t field = 0, number = 0;
  std::string_view bytes;
};

inline std::vector<ProtoField> proto_fields(std::string_view message) {
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      require(at < message.size() && shift < 64, "a varint has no end");
      const auto byte = static_cast<unsigned char>(message[at++]);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
  };
  std::vector<ProtoField> fields;
  while (at < message.size()) {
    const uint64_t key = varint();
    ProtoField one{key >> 3, 0, {}};
    switch (key & 7) {
      case 0:
        one.number = varint();
        break;
      case 1:
        one.number = number_at<uint64_t>(message, at);
        at += 8;
        break;
      case 2: {
        const uint64_t size = varint();
        require(size <= message.size() - at, "a field is longer than its message");
        one.bytes = message.substr(at, size);
        at += size;
        break;
      }
      case 5:
        one.number = number_at<uint32_t>(message, at);
        at += 4;
        break;
      default:
        fail("wire type {}", key & 7);
    }
    fields.push_back(one);
  }
  return fields;
}

template <class Number>
Number bits_as(uint64_t bits) {
  Number number;
  std::memcpy(&number, &bits, sizeof(number));  // little-endian
  return number;
}

inline ReadEvent event_of(std::string_view message) {
  ReadEvent event;
  for (const ProtoField& field : proto_fields(message)) {
    if (field.field == 1) event.time = bits_as<double>(field.number);
    if (field.field == 2) event.step = static_cast<int64_t>(field.number);
    if (field.field == 3) event.version = field.bytes;
    if (field.field == 7)
      for (const ProtoField& one : proto_fields(field.bytes)) event.starts_session |= one.field == 1 && one.number == 1;
    if (field.field != 5) continue;
    for (const ProtoField& value : proto_fields(field.bytes)) {
      require(value.field == 1, "field {} in a summary", value.field);
      std::string tag, text, plugin;
      for (const ProtoField& part : proto_fields(value.bytes)) {
        if (part.field == 1) tag = part.bytes;
        if (part.field == 2) event.numbers[tag] = bits_as<float>(part.number);
        if (part.field == 8)
          for (const ProtoField& tensor : proto_fields(part.bytes))
            if (tensor.field == 8) text = tensor.bytes;
        if (part.field == 9)
          for (const ProtoField& metadata : proto_fields(part.bytes))
            if (metadata.field == 1) plugin = proto_fields(metadata.bytes).at(0).bytes;
      }
      if (plugin == "text") event.texts[tag] = text;
    }
  }
  return event;
}

// Throws where the file is damaged or ends inside a record.
inline std::vector<ReadEvent> read_events(std::string_view file) {
  const auto check = [](std::string_view bytes, uint32_t stored) {
    const uint32_t crc = slow_crc32c(bytes);
    require(((crc >> 15) | (crc << 17)) + 0xA282EAD8u == stored, "a checksum is wrong");
  };
  std::vector<ReadEvent> events;
  while (!file.empty()) {
    const auto length = number_at<uint64_t>(file, 0);
    check(file.substr(0, 8), number_at<uint32_t>(file, 8));
    require(length <= file.size() - 12, "a record has no end");
    const std::string_view message = file.substr(12, length);
    check(message, number_at<uint32_t>(file, 12 + length));
    events.push_back(event_of(message));
    file.remove_prefix(16 + length);
  }
  return events;
}

}  // namespace furious::testing
