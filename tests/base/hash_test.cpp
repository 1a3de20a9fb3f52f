#include "base/hash.h"

#include "support.h"

namespace furious {
namespace {

using testing::Random;

uint64_t hash_of_text(const std::string& text) {
  return hash_of_large(std::as_bytes(std::span(text)));
}

TEST(Hash, LargeHashDependsOnEveryByteAndTheLength) {
  Random random(1);
  for (const int64_t size : {1, 7, 8, 31, 32, 33, 1000, (1 << 20) - 1, 1 << 20, (3 << 20) + 5}) {
    std::string text(size, 'x');
    const uint64_t before = hash_of_text(text);
    EXPECT_EQ(before, hash_of_text(text));
    EXPECT_NE(before, hash_of_text(text + '\0'));
    for (int i = 0; i < 20; ++i) {
      char& byte = text[i == 0 ? 0 : i == 1 ? size - 1 : random.integer(0, size - 1)];
      const char bit = static_cast<char>(1 << random.integer(0, 7));
      byte ^= bit;
      EXPECT_NE(before, hash_of_text(text));
      byte ^= bit;
    }
  }
  EXPECT_NE(hash_of_text(""), hash_of_text(std::string(1, '\0')));
}

// Files contain these hashes, so they must never change.
TEST(Hash, LargeHashOfPiecesHasAFixedValue) {
  std::string text(5 * LargeHash::kBlock + 77, ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 + i / 1000);
  const auto bytes = std::as_bytes(std::span(text));
  LargeHash pieces;
  pieces.add(bytes.first(2 * LargeHash::kBlock));
  pieces.add({});
  pieces.add(bytes.subspan(2 * LargeHash::kBlock));
  EXPECT_EQ(pieces.finish(), hash_of_text(text));
  EXPECT_EQ(hash_text(hash_of_text(text)), "d0d125bba80ce5fa");
}

TEST(Hash, LargeHashIsTheSameForAnyNumberOfThreads) {
  const std::string text(5 << 20, 'y');
  const int before = threads();
  const uint64_t expected = hash_of_text(text);
  set_threads(1);
  EXPECT_EQ(hash_of_text(text), expected);
  set_threads(before);
}

}  // namespace
}  // namespace furious
