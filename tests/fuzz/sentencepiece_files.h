// Small SentencePiece model files made by hand, with unusual or invalid parts as a test needs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace furious::fuzz {

inline constexpr int kUnigram = 1, kBytePair = 2, kWord = 3, kCharacter = 4;                             // model types
inline constexpr int kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;  // of pieces

struct PieceSpec {
  std::string text;
  float score = 0;
  int type = kNormal;
};

using Rules = std::map<std::string, std::string>;  // of a normalizer: replacements

struct ModelSpec {
  int type = kUnigram;
  std::vector<PieceSpec> pieces = {};  // empty: a few that do
  Rules rules = {};
  std::string charsmap = {};  // instead of one made of the rules
  bool byte_fallback = false;
  bool denormalizer = false;  // the rules are for decoding, too
};

std::vector<PieceSpec> sample_pieces();
Rules sample_rules();
std::string sentencepiece_file(const ModelSpec& spec);

// The double array of a normalizer: every node has 256 units of its own.
struct Charsmap {
  explicit Charsmap(const Rules& rules);
  std::string bytes() const;

  std::vector<uint32_t> units;
  std::string texts;
};

inline constexpr std::string_view kSampleTexts[] = {
    "",          "a", " a  b ", "hello world\n", "\xEF\xBD\x81\xEF\xBD\x82 aaaa", "\xC3\xA9t\xC3\xA9 \xE2\x82\xAC 12",
    "\xFF\xFE z"};

}  // namespace furious::fuzz
