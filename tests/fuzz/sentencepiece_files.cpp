#include "fuzz/sentencepiece_files.h"

#include <bit>
#include <cstring>

#include "base/error.h"

namespace furious::fuzz {
namespace {

void add_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

void add_integer(std::string& out, int field, uint64_t value) {
  add_varint(out, static_cast<uint64_t>(field) << 3);
  add_varint(out, value);
}

void add_bytes(std::string& out, int field, std::string_view bytes) {
  add_varint(out, static_cast<uint64_t>(field) << 3 | 2);
  add_varint(out, bytes.size());
  out += bytes;
}

void add_float(std::string& out, int field, float value) {
  add_varint(out, static_cast<uint64_t>(field) << 3 | 5);
  for (uint32_t bits = std::bit_cast<uint32_t>(value), i = 0; i < 4; ++i) out += static_cast<char>(bits >> 8 * i);
}

}  // namespace

std::vector<PieceSpec> sample_pieces() {
  std::vector<PieceSpec> pieces = {{"<unk>", 0, kUnknown}, {"<s>", 0, kControl}, {"</s>", 0, kControl}};
  float score = 0;
  for (const char* text : {"\xE2\x96\x81", "a", "b", "ab", "l", "ll", "o", "he",
                           "\xE2\x96\x81"
                           "a",
                           "aa"})
    pieces.push_back({text, score -= 1, kNormal});
  pieces.push_back({"<tag>", 0, kUserDefined});
  return pieces;
}

Rules sample_rules() {
  return {{"\xEF\xBD\x81", "a"}, {"\xEF\xBD\x82", "b"}, {"\xC3\xA9", "e"}, {"\xE2\x82\xAC", "EUR"}, {"\n", " "}};
}

Charsmap::Charsmap(const Rules& rules) : units(256) {
  std::map<std::string, uint32_t> bases;  // of the node of a prefix
  const auto node = [&](const std::string& prefix, uint32_t unit) {
    const auto [found, is_new] = bases.try_emplace(prefix, static_cast<uint32_t>(units.size()));
    if (is_new) units.resize(units.size() + 256);
    const uint32_t offset = unit ^ found->second;
    require(offset < 1u << 21, "too many rules");
    units[unit] |= offset << 10;
    return found->second;
  };
  node("", 0);
  for (const auto& [key, text] : rules) {
    uint32_t unit = 0;
    for (size_t i = 0; i < key.size(); ++i) {
      const auto byte = static_cast<unsigned char>(key[i]);
      unit = bases.at(key.substr(0, i)) ^ byte;
      units[unit] |= byte;
      node(key.substr(0, i + 1), unit);
    }
    units[unit] |= 0x100u;
    units[bases.at(key)] = 0x80000000u | static_cast<uint32_t>(texts.size());
    texts += text;
    texts += '\0';
  }
  // An unused unit must not look like the child for a byte: it gets another label.
  for (uint32_t i = 0; i < units.size(); ++i)
    if (units[i] == 0) units[i] = 0x80000000u;
}

std::string Charsmap::bytes() const {
  std::string out(4 + 4 * units.size(), '\0');
  const auto size = static_cast<uint32_t>(4 * units.size());
  std::memcpy(out.data(), &size, 4);
  std::memcpy(out.data() + 4, units.data(), size);
  return out + texts;
}

std::string sentencepiece_file(const ModelSpec& spec) {
  std::string model;
  for (const PieceSpec& piece : spec.pieces.empty() ? sample_pieces() : spec.pieces) {
    std::string message;
    add_bytes(message, 1, piece.text);
    add_float(message, 2, piece.score);
    add_integer(message, 3, static_cast<uint64_t>(piece.type));
    add_bytes(model, 1, message);
  }
  std::string trainer;
  add_integer(trainer, 3, static_cast<uint64_t>(spec.type));
  add_integer(trainer, 35, spec.byte_fallback);
  add_bytes(model, 2, trainer);
  std::string normalizer;
  add_bytes(normalizer, 1, "test");
  const std::string map = !spec.charsmap.empty() ? spec.charsmap
                          : spec.rules.empty()   ? ""
                                                 : Charsmap(spec.rules).bytes();
  if (!map.empty()) add_bytes(normalizer, 2, map);
  add_bytes(model, 3, normalizer);
  if (spec.denormalizer) add_bytes(model, 5, normalizer);
  return model;
}

}  // namespace furious::fuzz
