#include "decode/text_stream.h"

#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

std::string all_of(TextStream stream, const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += stream.push(piece);
  return text + stream.finish();
}

TEST(TextStream, EmitsCompleteCharacters) {
  TextStream stream({});
  EXPECT_EQ(stream.push("a\xC3"), "a");
  EXPECT_EQ(stream.push("\xA9z"), "\xC3\xA9z");
  EXPECT_EQ(stream.push("\xF0\x9F"), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_FALSE(stream.stopped());
}

TEST(TextStream, HoldsBackPossibleStopStrings) {
  TextStream stream({"END", "\n\n"});
  EXPECT_EQ(stream.push("some E"), "some ");
  EXPECT_EQ(stream.push("N"), "");
  EXPECT_EQ(stream.push("Tity\n"), "ENTity");
  EXPECT_EQ(stream.push("x EE"), "\nx E");
  EXPECT_EQ(stream.push("ND and more"), "");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.push("more"), "");
  EXPECT_EQ(stream.finish(), "");
}

TEST(TextStream, TheStopStringThatEndsFirstCounts) {
  EXPECT_EQ(all_of(TextStream({"bc", "ab"}), {"xabc"}), "x");
  EXPECT_EQ(all_of(TextStream({"abcd", "bc"}), {"xa", "b", "c", "d"}), "xa");
  EXPECT_EQ(all_of(TextStream({"abcd", "bc"}), {"xabcd"}), "xa");
  EXPECT_EQ(all_of(TextStream({"bc", "abc"}), {"xabc"}), "x");
  EXPECT_EQ(all_of(TextStream({"\xC3\xA9"}), {"caf\xC3", "\xA9!"}), "caf");
}

TEST(TextStream, FinishReturnsHeldBackText) {
  EXPECT_EQ(all_of(TextStream({"stop"}), {"do not sto"}), "do not sto");
}

// The output does not depend on how a text is split into tokens.
TEST(TextStream, ResultDoesNotDependOnTheSplitIntoTokens) {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (int64_t i = random.integer(0, 30); i > 0; --i) text += static_cast<char>('a' + random.integer(0, 1));
    std::vector<std::string> stop(random.integer(1, 2));
    for (std::string& s : stop)
      for (int64_t i = random.integer(2, 5); i > 0; --i) s += static_cast<char>('a' + random.integer(0, 1));
    size_t end = text.size();  // of the text shown
    for (size_t at = 1; at <= text.size() && end == text.size(); ++at)
      for (const std::string& s : stop)
        if (text.substr(0, at).ends_with(s)) end = std::min(end, at - s.size());
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size(); at += pieces.back().size())
      pieces.push_back(text.substr(at, random.integer(1, 4)));
    EXPECT_EQ(all_of(TextStream(stop), pieces), text.substr(0, end)) << text;
  }
}

TEST(TextStream, RefusesEmptyAndInvalidStopStrings) {
  expect_error([] { TextStream({"x", ""}); }, {"stop string is empty"});
  expect_error([] { TextStream({"x\xC3"}); }, {"not valid UTF-8"});
}

}  // namespace
}  // namespace furious
