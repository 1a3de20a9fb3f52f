#include "data/composition.h"

#include <utf8proc.h>

#include <cstdlib>

#include "support.h"

namespace furious {
namespace {

using testing::Random;

std::string utf8_of(unsigned code) {
  utf8proc_uint8_t bytes[4];
  return {reinterpret_cast<const char*>(bytes),
          static_cast<size_t>(utf8proc_encode_char(static_cast<int>(code), bytes))};
}

std::string composed_whole(const std::string& text) {
  utf8proc_uint8_t* const result = utf8proc_NFC(reinterpret_cast<const utf8proc_uint8_t*>(text.c_str()));
  std::string out(reinterpret_cast<const char*>(result));
  std::free(result);
  return out;
}

TEST(Composition, LeavesFrequentCharactersAsTheyAre) {
  int checked = 0;
  for (unsigned code = 0x300; code < 0x20000; ++code) {
    if (!is_always_composed(code)) continue;
    const utf8proc_property_t* const property = utf8proc_get_property(static_cast<int>(code));
    EXPECT_EQ(property->combining_class, 0) << code;
    for (const char* before : {"", "a", "\u09C7", "\u1100", "\uAC00"})
      EXPECT_EQ(composed_whole(before + utf8_of(code)), before + utf8_of(code)) << code;
    ++checked;
  }
  EXPECT_GT(checked, 30000);
}

TEST(Composition, OfPartsIsThatOfTheWhole) {
  const std::vector<std::string> pieces = {"a",      "e\u0301", "\u0301", "é",      "\u0323\u0307", "\uAC00", "\u11A8",
                                           "\u1100", "\u1161",  "漢",     "“",      "\u212B",       " ",      "\u09C7",
                                           "\u09BE", "\u0344",  "😀",      "\u0958", "xyz ",         "ü"};
  Random random(1);
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (int64_t n = random.integer(0, 12); n > 0; --n) text += random.pick(pieces);
    ASSERT_EQ(canonical_composition(text), composed_whole(text)) << text;
  }
}

// The character before the final letters of Hangul is none of them.
TEST(Composition, KeepsTheCharacterBeforeTheFinalsOfHangul) {
  EXPECT_EQ(canonical_composition("\uC888\u11A7"), "\uC888\u11A7");
  EXPECT_EQ(canonical_composition("\u11A7e\u0301\u1102\u1161\u11A7\u11A7\u1102\u1161\u11A8"),
            "\u11A7é\uB098\u11A7\u11A7\uB099");
}

}  // namespace
}  // namespace furious
