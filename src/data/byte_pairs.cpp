#include "data/byte_pairs.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "data/utf8.h"

namespace furious {
namespace {

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

constexpr std::array<uint32_t, 256> kLetters = [] {
  std::array<uint32_t, 256> letters{};
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    letters[byte] = printable ? byte : next++;
  }
  return letters;
}();

constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15u;

// One word with its ids: a cache line. A word replaces another one with the same place in the cache.
struct alignas(64) CachedWord {
  static constexpr size_t kMostBytes = 22, kMostIds = 10;
  int32_t ids[kMostIds];
  char text[kMostBytes];
  uint8_t bytes;  // 0: empty
  uint8_t count;
};
static_assert(sizeof(CachedWord) == 64);

struct WordCache {
  static constexpr int kBits = 16;
  uint64_t owner = 0;
  std::vector<CachedWord> words;
};

// A hash of up to 22 bytes, read as words of eight; the last two overlap.
uint64_t hash_of_word(std::string_view word) {
  const auto load = [&](size_t at) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, word.data() + at, 8);
    return bytes;
  };
  uint64_t hash = word.size() * kMultiplier;
  if (word.size() < 8) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < word.size(); ++i) bytes |= uint64_t{static_cast<unsigned char>(word[i])} << (8 * i);
    return (hash ^ bytes) * kMultiplier;
  }
  for (size_t at = 0; at + 8 < word.size(); at += 8) hash = std::rotl((hash ^ load(at)) * kMultiplier, 29);
  return (hash ^ load(word.size() - 8)) * kMultiplier;
}

}  // namespace

std::string letter_of_byte(unsigned char byte) {
  const uint32_t code = kLetters[byte];
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

std::optional<std::string> bytes_of_letters(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size(); at += utf8_bytes_of(token[at])) {
    const uint32_t code = first_code_point(token.substr(at));
    const auto letter = std::ranges::find(kLetters, code);
    if (code > 0x1FF || letter == kLetters.end()) return std::nullopt;
    bytes += static_cast<char>(letter - kLetters.begin());
  }
  return bytes;
}

struct BytePairs::Workspace {
  std::vector<Symbol> symbols;
  std::vector<Candidate> candidates;  // a heap, the lowest rank first
};

BytePairs::BytePairs(IdOfText vocabulary, const std::vector<Merge>& merges, const std::array<int32_t, 256>& byte_tokens,
                     const BytePairOptions& options)
    : options_(options), vocabulary_(std::move(vocabulary)), byte_tokens_(byte_tokens) {
  static std::atomic<uint64_t> last_number = 0;
  number_ = ++last_number;
  for (const auto& [text, id] : vocabulary_) {
    if (text.empty()) continue;
    const auto character = options_.byte_level ? static_cast<unsigned char>(text[0]) : first_code_point(text);
    if (text.size() != (options_.byte_level ? 1 : utf8_bytes_of(text[0]))) continue;
    if (character >= characters_.size()) characters_.resize(character + 1, -1);
    characters_[character] = id;
  }
  const size_t slots = std::bit_ceil(merges.size() * 2 + 2);
  shift_ = 64 - std::countr_zero(slots);
  rules_.resize(slots);
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    const uint64_t pair = pair_of(merge.left, merge.right);
    size_t at = (pair * kMultiplier) >> shift_;
    while (rules_[at].pair != kNoPair && rules_[at].pair != pair) at = (at + 1) & (slots - 1);
    rules_[at] = {pair, static_cast<int32_t>(rank), merge.result};
  }
}

const BytePairs::Rule* BytePairs::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (size_t at = (pair * kMultiplier) >> shift_;; at = (at + 1) & (rules_.size() - 1)) {
    if (rules_[at].pair == pair) return &rules_[at];
    if (rules_[at].pair == kNoPair) return nullptr;
  }
}

void BytePairs::symbols_of(std::string_view word, std::vector<Symbol>& symbols) const {
  symbols.clear();
  const auto add = [&](int32_t id) {
    const auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, at - 1, at + 1, false});
  };
  bool unknown = false;  // a token for unknown characters is due
  for (size_t at = 0; at < word.size();) {
    const size_t bytes = options_.byte_level ? 1 : utf8_bytes_of(word[at]);
    const std::string_view character = word.substr(at, bytes);
    const uint32_t code = options_.byte_level ? static_cast<unsigned char>(word[at]) : first_code_point(character);
    at += bytes;
    if (const int32_t id = code < characters_.size() ? characters_[code] : -1; id >= 0) {
      if (unknown) add(options_.unknown);
      unknown = false;
      add(id);
      continue;
    }
    const auto token_of = [&](char byte) { return byte_tokens_[static_cast<unsigned char>(byte)]; };
    if (options_.byte_fallback && std::ranges::all_of(character, [&](char byte) { return token_of(byte) >= 0; })) {
      for (const char byte : character) add(token_of(byte));  // the tokenizers package leaves `unknown` due here, too
      continue;
    }
    if (options_.unknown < 0) continue;
    if (unknown && !options_.fuse_unknown) add(options_.unknown);
    unknown = true;
  }
  if (unknown) add(options_.unknown);
  if (!symbols.empty()) symbols.back().next = -1;
}

void BytePairs::merge(Workspace& work) const {
  std::vector<Symbol>& symbols = work.symbols;
  std::vector<Candidate>& heap = work.candidates;
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const auto candidate_at = [&](int32_t position) {
    const Symbol& symbol = symbols[static_cast<size_t>(position)];
    if (symbol.next < 0) return false;
    const Rule* const rule = find(symbol.id, symbols[static_cast<size_t>(symbol.next)].id);
    if (rule != nullptr) heap.push_back({rule->rank, position, rule->result});
    return rule != nullptr;
  };
  heap.clear();
  for (size_t i = 0; i + 1 < symbols.size(); ++i) candidate_at(static_cast<int32_t>(i));
  std::ranges::make_heap(heap, later);
  while (!heap.empty()) {
    std::ranges::pop_heap(heap, later);
    const Candidate top = heap.back();
    heap.pop_back();
    Symbol& symbol = symbols[static_cast<size_t>(top.position)];
    if (symbol.merged || symbol.next < 0) continue;
    Symbol& right = symbols[static_cast<size_t>(symbol.next)];
    // The symbols may have changed since; as in the tokenizers package the result decides whether the entry still
    // holds.
    const Rule* const rule = find(symbol.id, right.id);
    if (rule == nullptr || rule->result != top.result) continue;
    symbol.id = top.result;
    symbol.next = right.next;
    right.merged = true;
    if (symbol.next >= 0) symbols[static_cast<size_t>(symbol.next)].previous = top.position;
    if (symbol.previous >= 0 && candidate_at(symbol.previous)) std::ranges::push_heap(heap, later);
    if (candidate_at(top.position)) std::ranges::push_heap(heap, later);
  }
}

void BytePairs::encode_uncached(std::string_view word, Workspace& work, std::vector<int32_t>& ids) const {
  if (options_.whole_words) {
    if (const auto whole = vocabulary_.find(word); whole != vocabulary_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  symbols_of(word, work.symbols);
  merge(work);
  for (const Symbol& symbol : work.symbols)
    if (!symbol.merged) ids.push_back(symbol.id);
}

void BytePairs::encode(std::string_view word, std::vector<int32_t>& ids) const {
  thread_local Workspace work;
  thread_local WordCache cache;
  if (word.empty()) return;
  if (word.size() > CachedWord::kMostBytes) return encode_uncached(word, work, ids);
  if (cache.owner != number_) {
    cache.words.assign(size_t{1} << WordCache::kBits, {});
    cache.owner = number_;
  }
  CachedWord& cached = cache.words[hash_of_word(word) >> (64 - WordCache::kBits)];
  if (cached.bytes == word.size() && std::memcmp(cached.text, word.data(), word.size()) == 0) {
    ids.insert(ids.end(), cached.ids, cached.ids + cached.count);
    return;
  }
  const size_t before = ids.size();
  encode_uncached(word, work, ids);
  const size_t count = ids.size() - before;
  if (count > CachedWord::kMostIds) return;
  std::copy(ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end(), cached.ids);
  std::memcpy(cached.text, word.data(), word.size());
  cached.bytes = static_cast<uint8_t>(word.size());
  cached.count = static_cast<uint8_t>(count);
}

}  // namespace furious
