#include "data/byte_pairs.h"

#include <map>
#include <numeric>

#include "support.h"

namespace furious {
namespace {

using testing::Random;

// Straight from the definition: the pair of the lowest rank, the leftmost of these, until there is none.
std::vector<int32_t> merged_naively(std::vector<int32_t> ids, const std::vector<Merge>& merges) {
  while (true) {
    size_t best = merges.size(), place = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      for (size_t rank = 0; rank < best; ++rank)
        if (merges[rank].left == ids[i] && merges[rank].right == ids[i + 1]) best = rank, place = i;
    if (best == merges.size()) return ids;
    ids[place] = merges[best].result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
}

TEST(BytePairs, MergesLikeTheDefinition) {
  Random random(1);
  for (int trial = 0; trial < 50; ++trial) {
    IdOfText vocabulary;
    std::vector<std::string> tokens;
    for (const char letter : {'a', 'b', 'c'}) tokens.emplace_back(1, letter);
    std::vector<Merge> merges;
    for (size_t i = 0; i < tokens.size(); ++i) vocabulary[tokens[i]] = static_cast<int32_t>(i);
    for (int i = 0; i < 20; ++i) {
      const auto last = static_cast<int64_t>(tokens.size()) - 1;
      const auto left = static_cast<int32_t>(random.integer(0, last));
      const auto right = static_cast<int32_t>(random.integer(0, last));
      const std::string result = tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
      const auto id = static_cast<int32_t>(tokens.size());
      if (result.size() > 8 || !vocabulary.emplace(result, id).second) continue;
      tokens.push_back(result);
      merges.push_back({left, right, id});
    }
    std::array<int32_t, 256> none;
    none.fill(-1);
    for (const bool byte_level : {false, true}) {
      const BytePairs model(vocabulary, merges, none, {.byte_level = byte_level});
      for (int i = 0; i < 40; ++i) {
        std::string word;
        for (int64_t letters = random.integer(1, 40); letters > 0; --letters)
          word += static_cast<char>('a' + random.integer(0, 2));
        std::vector<int32_t> expected;
        for (const char letter : word) expected.push_back(letter - 'a');
        expected = merged_naively(expected, merges);
        for (int again = 0; again < 2; ++again) {  // the second time perhaps from the cache
          std::vector<int32_t> ids = {7};
          model.encode(word, ids);
          EXPECT_EQ(std::vector<int32_t>(ids.begin() + 1, ids.end()), expected) << word;
        }
      }
    }
  }
}

TEST(BytePairs, UnknownCharacters) {
  std::array<int32_t, 256> bytes;
  bytes.fill(-1);
  const IdOfText vocabulary = {{"a", 1}, {"é", 2}};
  const auto ids = [&](const BytePairOptions& options, const std::array<int32_t, 256>& byte_tokens) {
    std::vector<int32_t> result;
    BytePairs(vocabulary, {}, byte_tokens, options).encode("xaxyéz", result);
    return result;
  };
  EXPECT_EQ(ids({}, bytes), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(ids({.unknown = 0}, bytes), (std::vector<int32_t>{0, 1, 0, 0, 2, 0}));
  EXPECT_EQ(ids({.fuse_unknown = true, .unknown = 0}, bytes), (std::vector<int32_t>{0, 1, 0, 2, 0}));
  std::iota(bytes.begin(), bytes.end(), 1000);
  EXPECT_EQ(ids({.byte_fallback = true, .unknown = 0}, bytes),
            (std::vector<int32_t>{1000 + 'x', 1, 1000 + 'x', 1000 + 'y', 2, 1000 + 'z'}));
}

TEST(BytePairs, LettersStandForBytes) {
  for (int byte = 0; byte < 256; ++byte)
    EXPECT_EQ(bytes_of_letters(letter_of_byte(static_cast<unsigned char>(byte))),
              std::string(1, static_cast<char>(byte)));
  EXPECT_EQ(bytes_of_letters("ĠtheĊ"), " the\n");
  EXPECT_EQ(bytes_of_letters("a b"), std::nullopt);
  EXPECT_EQ(bytes_of_letters("漢"), std::nullopt);
}

}  // namespace
}  // namespace furious
