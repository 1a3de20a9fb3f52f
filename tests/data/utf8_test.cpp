#include "data/utf8.h"

#include "support.h"

namespace furious {
namespace {

std::string repaired(std::string_view text, int64_t expected_count) {
  int64_t count = 0;
  std::string result = replace_invalid_utf8(text, count);
  EXPECT_EQ(count, expected_count) << "in " << result;
  return result;
}

TEST(Utf8, KeepsValidText) {
  const std::string text = "plain, wörld, 日本語, 🐍, \x7F, and more than eight bytes of ASCII";
  EXPECT_EQ(valid_utf8_prefix(text), text.size());
  EXPECT_EQ(repaired(text, 0), text);
  EXPECT_EQ(repaired("", 0), "");
  EXPECT_EQ(utf8_length("aé日🐍"), 4u);
}

TEST(Utf8, BrokenSequencesAreReplacedOnce) {
  EXPECT_EQ(repaired("a\xFFz", 1), "a\uFFFDz");
  EXPECT_EQ(repaired("\x80\x80", 2), "\uFFFD\uFFFD");
  EXPECT_EQ(repaired("\xE2\x82", 1), "\uFFFD");                            // cut off: one character
  EXPECT_EQ(repaired("\xF0\x9F\x90g", 1), "\uFFFDg");                      // the rest of one is missing
  EXPECT_EQ(repaired("\xC0\xAF", 2), "\uFFFD\uFFFD");                      // overlong
  EXPECT_EQ(repaired("\xED\xA0\x80", 3), "\uFFFD\uFFFD\uFFFD");            // a surrogate
  EXPECT_EQ(repaired("\xF4\x90\x80\x80", 4), "\uFFFD\uFFFD\uFFFD\uFFFD");  // beyond U+10FFFF
}

TEST(Utf8Streamer, HoldsBackIncompleteCharacters) {
  Utf8Streamer streamer;
  EXPECT_EQ(streamer.push("a\xF0\x9F"), "a");
  EXPECT_EQ(streamer.push("\x90"), "");
  EXPECT_EQ(streamer.push("\x8D!"), "🐍!");
  EXPECT_EQ(streamer.flush(), "");
  EXPECT_EQ(streamer.push("\xE2\x82"), "");
  EXPECT_EQ(streamer.flush(), "\uFFFD");
  EXPECT_EQ(streamer.flush(), "");
}

TEST(Utf8Streamer, InvalidBytesDoNotStopTheStream) {
  Utf8Streamer streamer;
  EXPECT_EQ(streamer.push("\xFF"), "\uFFFD");
  EXPECT_EQ(streamer.push("\xE2"), "");
  EXPECT_EQ(streamer.push("b"), "\uFFFDb");
}

TEST(Utf8Streamer, AnySplitGivesTheWholeText) {
  testing::Random random(1);
  const std::string text = "aö日🐍\xFFz\xE2\x82 end 🐍";
  int64_t count = 0;
  const std::string expected = replace_invalid_utf8(text, count);
  for (int round = 0; round < 200; ++round) {
    Utf8Streamer streamer;
    std::string result;
    for (size_t at = 0; at < text.size();) {
      const size_t step = std::min<size_t>(text.size() - at, random.integer(1, 5));
      const std::string out = streamer.push(std::string_view(text).substr(at, step));
      EXPECT_EQ(valid_utf8_prefix(out), out.size());
      result += out;
      at += step;
    }
    EXPECT_EQ(result + streamer.flush(), expected);
  }
}

TEST(Utf8, ArbitraryBytesRoundTrip) {
  for (const std::string text : {"", "/data/x", "/däta/日本", "50 %", "C:\\x", "percent"})
    EXPECT_EQ(utf8_of_bytes(text), text);
  EXPECT_EQ(utf8_of_bytes("/a\xff%b\n"), "percent:/a%FF%25b%0A");
  for (const std::string& bytes : {std::string("/a\xff%b\n"), std::string("\xc3"), std::string("percent:x%41"),
                                   std::string("ä\x80"), std::string("\0\x7f%", 3)}) {
    EXPECT_EQ(bytes_of_utf8(utf8_of_bytes(bytes)), bytes);
    EXPECT_EQ(valid_utf8_prefix(utf8_of_bytes(bytes)), utf8_of_bytes(bytes).size());
  }
  EXPECT_EQ(bytes_of_utf8("percent:a%4"), "a%4");
  EXPECT_EQ(bytes_of_utf8("percent:%zz%"), "%zz%");
}

}  // namespace
}  // namespace furious
