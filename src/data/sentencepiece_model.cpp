#include "data/sentencepiece_model.h"

#include <cstdint>
#include <optional>

namespace furious {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // ▁, SentencePiece's space

struct Field {
  uint64_t number = 0;
  uint64_t value = 0;     // of an integer
  std::string_view data;  // of a string or a message
};

// The fields of one protobuf message, one after the other.
class Message {
 public:
  explicit Message(std::string_view data) : rest_(data) {}

  // Nothing at the end, or where the data makes no sense.
  std::optional<Field> next() {
    Field field;
    const uint64_t key = varint();
    if (!good_) return std::nullopt;
    field.number = key >> 3;
    switch (key & 7) {
      case 0:
        field.value = varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        field.data = take(varint());
        break;
      case 5:
        take(4);
        break;
      default:
        good_ = false;
    }
    return good_ ? std::optional(field) : std::nullopt;
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    good_ = false;
    return 0;
  }
  std::string_view take(uint64_t bytes) {
    if (bytes > rest_.size()) good_ = false;
    const std::string_view data = rest_.substr(0, bytes);
    rest_.remove_prefix(data.size());
    return data;
  }

  std::string_view rest_;
  bool good_ = true;
};

// No line break beside anything, no space after anything but a space, and no piece that is matched before all others.
bool stays_inside_a_word(std::string_view piece_message) {
  constexpr uint64_t kUserDefined = 4;
  Message message(piece_message);
  while (const auto field = message.next()) {
    if (field->number == 3 && field->value == kUserDefined) return false;
    if (field->number != 1) continue;
    const std::string_view piece = field->data;
    if (piece.size() > 1 && piece.find('\n') != std::string_view::npos) return false;
    size_t spaces = 0;
    while (piece.substr(spaces).starts_with(kSpaceMark)) spaces += kSpaceMark.size();
    if (piece.find(kSpaceMark, spaces) != std::string_view::npos) return false;
  }
  return true;
}

bool is_byte_pair_model(std::string_view trainer_message) {
  constexpr uint64_t kBytePair = 2;
  bool byte_pair = false;
  bool byte_fallback = false;
  Message message(trainer_message);
  while (const auto field = message.next()) {
    if (field->number == 3) byte_pair = field->value == kBytePair;
    if (field->number == 35) byte_fallback = field->value != 0;
    if (field->number == 24 && field->value != 0) return false;  // spaces belong to the word before them
  }
  return byte_pair && byte_fallback;
}

bool normalizes_nothing(std::string_view normalizer_message) {
  bool adds_space = true;  // the defaults of the format
  bool removes_spaces = true;
  bool marks_spaces = true;
  Message message(normalizer_message);
  while (const auto field = message.next()) {
    if (field->number == 2 && !field->data.empty()) return false;
    if (field->number == 3) adds_space = field->value != 0;
    if (field->number == 4) removes_spaces = field->value != 0;
    if (field->number == 5) marks_spaces = field->value != 0;
  }
  return adds_space && !removes_spaces && marks_spaces;
}

}  // namespace

bool encodes_word_by_word(std::string_view model) {
  bool trained = false;
  bool normalized = false;
  Message message(model);
  while (const auto field = message.next()) {
    if (field->number == 1 && !stays_inside_a_word(field->data)) return false;
    if (field->number == 2) trained = is_byte_pair_model(field->data);
    if (field->number == 3) normalized = normalizes_nothing(field->data);
  }
  return trained && normalized;
}

}  // namespace furious
