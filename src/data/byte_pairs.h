// Byte-pair encoding: a word becomes its characters, or its bytes, and the pair of neighbours with the lowest rank is
// merged until no pair can be.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace furious {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using IdOfText = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

// A byte as a character of a byte-level vocabulary: printable ones are themselves, the others U+0100 and on.
std::string letter_of_byte(unsigned char byte);
// The bytes of a token of such a vocabulary; nothing where another character is in it.
std::optional<std::string> bytes_of_letters(std::string_view token);

struct Merge {
  int32_t left, right, result;
};

struct BytePairOptions {
  bool byte_level = false;     // symbols are bytes, not characters
  bool byte_fallback = false;  // an unknown character becomes the tokens <0x00>… of its bytes
  bool fuse_unknown = false;   // a run of unknown characters is one token
  bool whole_words = false;    // a word that is a token stays whole, whatever the merges give
  int32_t unknown = -1;        // -1: unknown characters are left out
};

class BytePairs {
 public:
  BytePairs() = default;
  // `merges` in the order of their ranks; of equal pairs the last counts. `vocabulary`: text (bytes where byte_level)
  // to id; `byte_tokens`: the ids of <0x00>…, -1 where there is none.
  BytePairs(IdOfText vocabulary, const std::vector<Merge>& merges, const std::array<int32_t, 256>& byte_tokens,
            const BytePairOptions& options);

  // Appends the ids of a word, valid UTF-8 unless byte_level. Words repeat, so each thread caches short ones.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  struct Rule {
    uint64_t pair = kNoPair;
    int32_t rank = 0, result = 0;
  };
  struct Symbol {
    int32_t id, previous, next;
    bool merged;  // into the one to its left
  };
  struct Candidate {
    int32_t rank, position, result;
  };
  struct Workspace;
  static constexpr uint64_t kNoPair = ~uint64_t{0};

  const Rule* find(int32_t left, int32_t right) const;
  void symbols_of(std::string_view word, std::vector<Symbol>& symbols) const;
  void encode_uncached(std::string_view word, Workspace& work, std::vector<int32_t>& ids) const;
  void merge(Workspace& work) const;

  BytePairOptions options_;
  IdOfText vocabulary_;
  std::vector<Rule> rules_;          // a hash table with open addressing
  int shift_ = 63;                   // of a hash, to an index of the table
  std::vector<int32_t> characters_;  // by code point; by byte where byte_level
  std::array<int32_t, 256> byte_tokens_{};
  uint64_t number_ = 0;  // of this object, for the caches
};

}  // namespace furious
