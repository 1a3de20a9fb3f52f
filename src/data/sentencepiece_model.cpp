#include "data/sentencepiece_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "base/error.h"
#include "data/utf8.h"

namespace furious {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // ▁, SentencePiece's space

constexpr uint64_t kUserDefined = 4;  // a type of pieces

// How a field is stored.
enum class Wire { integer = 0, eight_bytes = 1, bytes = 2, four_bytes = 5 };

struct Field {
  uint64_t number = 0;
  Wire wire = Wire::integer;
  uint64_t value = 0;     // of an integer; the bits of a float
  std::string_view data;  // of a string or a message
};

// The fields of one protobuf message, one after the other.
class Message {
 public:
  explicit Message(std::string_view data) : rest_(data) {}

  // Nothing at the end, or where the data makes no sense.
  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    Field field;
    const uint64_t key = varint();
    if (!good_) return std::nullopt;
    field.number = key >> 3;
    field.wire = static_cast<Wire>(key & 7);
    switch (field.wire) {
      case Wire::integer:
        field.value = varint();
        break;
      case Wire::eight_bytes:
        take(8);
        break;
      case Wire::bytes:
        field.data = take(varint());
        break;
      case Wire::four_bytes: {
        const std::string_view four = take(4);
        for (size_t i = 0; i < four.size(); ++i) field.value |= uint64_t{static_cast<unsigned char>(four[i])} << 8 * i;
        break;
      }
      default:
        good_ = false;
    }
    return good_ ? std::optional(field) : std::nullopt;
  }
  bool complete() const { return good_ && rest_.empty(); }

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

bool is_user_defined(std::string_view piece_message) {  // matched before all others
  Message message(piece_message);
  while (const auto field = message.next())
    if (field->number == 3 && field->value == kUserDefined) return true;
  return false;
}

// No line break beside anything, and no space after anything but a space.
bool stays_inside_a_word(std::string_view piece_message) {
  Message message(piece_message);
  while (const auto field = message.next()) {
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
    if (field->number == 24 && field->value != 0) return false;  // spaces belong to the preceding word
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

// Far beyond any model.
constexpr size_t kMostPieces = 1 << 22;
constexpr size_t kLongestPiece = 4096;
constexpr size_t kMostMapBytes = 16 << 20;
constexpr size_t kLongestReplacement = 1024;
// The library has fixed-size arrays for these on its stack: rules of the normalizer that match at one place of a text,
// and user-defined pieces that do.
constexpr int kMostRules = 32;
constexpr size_t kMostNestedPieces = 64;

class ModelCheck {
 public:
  explicit ModelCheck(const std::string& origin) : origin_(origin) {}

  void model(std::string_view data) {
    size_t pieces = 0;
    fields(data, "model", [&](const Field& field) {
      if (field.number == 1) {
        if (++pieces > kMostPieces) refuse(fmt::format("over {} pieces", kMostPieces));
        piece(wanted(field, Wire::bytes, "piece").data);
      }
      if (field.number == 2)
        fields(wanted(field, Wire::bytes, "trainer_spec").data, "trainer_spec", [](const Field&) {});
      if (field.number == 3) normalizer(wanted(field, Wire::bytes, "normalizer_spec").data, "normalizer_spec");
      if (field.number == 5) normalizer(wanted(field, Wire::bytes, "denormalizer_spec").data, "denormalizer_spec");
    });
    if (pieces == 0) refuse("it has no pieces");
    nested_pieces();
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail("tokenizer \"{}\" is not a SentencePiece model, or a damaged one: {}; copy or download it again", origin_,
         what);
  }

  const Field& wanted(const Field& field, Wire wire, std::string_view name) const {
    if (field.wire != wire) refuse(fmt::format("its {} is stored as another type", name));
    return field;
  }

  template <class Visit>
  void fields(std::string_view data, std::string_view name, Visit&& visit) const {
    Message message(data);
    while (const auto field = message.next()) visit(*field);
    if (!message.complete()) refuse(fmt::format("its {} is not a protobuf message", name));
  }

  void piece(std::string_view data) {
    std::string_view text;
    bool user_defined = false;
    fields(data, "piece", [&](const Field& field) {
      if (field.number == 1) text = wanted(field, Wire::bytes, "piece's text").data;
      if (field.number == 3)  // the library reads 32 bits of it, and ignores unknown types
        user_defined |= static_cast<uint32_t>(wanted(field, Wire::integer, "piece's type").value) == kUserDefined;
      if (field.number == 2 &&
          !std::isfinite(std::bit_cast<float>(static_cast<uint32_t>(wanted(field, Wire::four_bytes, "score").value))))
        refuse("a piece's score is not finite");
    });
    if (text.empty()) refuse("a piece is empty");
    if (text.size() > kLongestPiece) refuse(fmt::format("a piece of {} bytes", text.size()));
    if (text.find('\0') != text.npos) refuse("a piece holds a zero byte");  // the library ends texts there
    if (user_defined) user_defined_.push_back(text);
  }

  // How many user-defined pieces begin with one another: "a", "aa", "aaa". In order, those that a piece begins with
  // stand before it.
  void nested_pieces() {
    std::ranges::sort(user_defined_);
    std::vector<std::string_view> around;
    for (const std::string_view text : user_defined_) {
      while (!around.empty() && !text.starts_with(around.back())) around.pop_back();
      around.push_back(text);
      if (around.size() > kMostNestedPieces)
        refuse(fmt::format("over {} user-defined pieces begin with one another", kMostNestedPieces));
    }
  }

  void normalizer(std::string_view data, std::string_view name) const {
    fields(data, name, [&](const Field& field) {
      if (field.number != 2) return;
      const std::string_view map = wanted(field, Wire::bytes, "precompiled_charsmap").data;
      if (!map.empty()) charsmap(map);
    });
  }

  // The size of the trie in bytes, the trie, then texts that end in a zero byte. A leaf of the trie is the place of a
  // text.
  void charsmap(std::string_view map) const {
    uint32_t bytes = 0;
    if (map.size() < sizeof(bytes) || map.size() > kMostMapBytes)
      refuse(fmt::format("a precompiled_charsmap of {} bytes", map.size()));
    std::memcpy(&bytes, map.data(), sizeof(bytes));
    map.remove_prefix(sizeof(bytes));
    if (bytes % sizeof(uint32_t) != 0 || bytes >= map.size())
      refuse(fmt::format("the trie of its precompiled_charsmap has {} bytes of {}", bytes, map.size()));
    std::vector<uint32_t> units(bytes / sizeof(uint32_t));
    if (bytes > 0) std::memcpy(units.data(), map.data(), bytes);
    const std::string_view texts = map.substr(bytes);
    if (texts.back() != '\0') refuse("the last text of its precompiled_charsmap has no end");
    check_trie(units, texts);
  }

  void check_text(std::string_view texts, uint32_t place) const {
    if (place >= texts.size()) refuse(fmt::format("a rule of its precompiled_charsmap points to byte {}", place));
    const std::string_view from = texts.substr(place, kLongestReplacement + 1);
    const std::string_view text = from.substr(0, from.find('\0'));
    if (text.size() > kLongestReplacement)
      refuse(fmt::format("a rule of its precompiled_charsmap gives over {} bytes", kLongestReplacement));
    if (valid_utf8_prefix(text) != text.size()) refuse("a rule of its precompiled_charsmap gives broken UTF-8");
  }

  // A double array (Darts): the children of the node with base b lie at b ^ byte, and say so by their label. Nodes may
  // share a base, but no base may be reached from itself: then a text could match any number of rules.
  void check_trie(const std::vector<uint32_t>& units, std::string_view texts) const {
    constexpr uint32_t kLabel = 0x800000FFu, kLeaf = 0x100u, kFar = 0x200u;
    constexpr int8_t kNotSeen = -1, kOpen = -2;
    const auto base_of = [&](size_t at) {
      const uint32_t unit = units[at];
      const size_t base = at ^ (size_t{unit >> 10} << ((unit & kFar) >> 6));
      if ((base | 0xFF) >= units.size()) refuse("the trie of its precompiled_charsmap leads outside of it");
      return base;
    };
    if (units.empty()) refuse("its precompiled_charsmap has no trie");
    struct Step {
      size_t base;
      uint32_t byte = 0;  // of the child to look at
      int rules = 0;      // the most on a path from here on, of the children before
    };
    std::vector<int8_t> rules(units.size(), kNotSeen);  // of bases that were left
    std::vector<Step> path = {{.base = base_of(0)}};
    rules[path.back().base] = kOpen;
    while (!path.empty()) {
      Step& step = path.back();
      if (step.byte == 256) {  // the step before looks at this base again, and goes on
        rules[step.base] = static_cast<int8_t>(step.rules);
        path.pop_back();
        continue;
      }
      const size_t child = step.base ^ step.byte;
      if ((units[child] & kLabel) != step.byte) {
        ++step.byte;
        continue;
      }
      const size_t base = base_of(child);
      if (rules[base] == kOpen) refuse("the trie of its precompiled_charsmap leads back to itself");
      if (rules[base] == kNotSeen) {
        rules[base] = kOpen;
        path.push_back({.base = base});
        continue;
      }
      const bool is_leaf = (units[child] & kLeaf) != 0;
      if (is_leaf) check_text(texts, units[base] & 0x7FFFFFFFu);
      step.rules = std::max(step.rules, rules[base] + (is_leaf ? 1 : 0));
      if (step.rules > kMostRules)
        refuse(fmt::format("over {} rules of its precompiled_charsmap match at one place", kMostRules));
      ++step.byte;
    }
  }

  const std::string& origin_;
  std::vector<std::string_view> user_defined_;
};

}  // namespace

bool is_plain_byte_pair_model(std::string_view model) {
  bool trained = false;
  bool normalized = false;
  Message message(model);
  while (const auto field = message.next()) {
    if (field->number == 1 && is_user_defined(field->data)) return false;
    if (field->number == 2) trained = is_byte_pair_model(field->data);
    if (field->number == 3) normalized = normalizes_nothing(field->data);
  }
  return trained && normalized;
}

std::vector<std::string> user_defined_pieces(std::string_view model) {
  std::vector<std::string> pieces;
  Message message(model);
  while (const auto field = message.next()) {
    if (field->number != 1 || !is_user_defined(field->data)) continue;
    Message piece(field->data);
    while (const auto part = piece.next())
      if (part->number == 1) pieces.emplace_back(part->data);
  }
  std::ranges::sort(pieces);
  return pieces;
}

bool encodes_word_by_word(std::string_view model) {
  Message message(model);
  while (const auto field = message.next())
    if (field->number == 1 && !stays_inside_a_word(field->data)) return false;
  return is_plain_byte_pair_model(model);
}

void check_sentencepiece_model(std::string_view model, const std::string& origin) {
  ModelCheck(origin).model(model);
}

}  // namespace furious
