#include "data/text_pattern.h"

#include "data/text_splitter.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;

std::vector<std::string> pieces(const TextSplitter& splitter, const std::string& text) {
  std::vector<std::string> result;
  splitter.split(text, [&](std::string_view piece) { result.emplace_back(piece); });
  return result;
}

std::vector<std::string> isolated(const std::string& pattern, const std::string& text) {
  return pieces(TextSplitter(TextPattern(pattern, "test"), SplitBehavior::isolated), text);
}

using Texts = std::vector<std::string>;

TEST(TextPattern, SplitsAtMatchesAndBetween) {
  EXPECT_EQ(isolated("\\p{N}", "ab12c"), (Texts{"ab", "1", "2", "c"}));
  EXPECT_EQ(isolated("(?=b)", "abab"), (Texts{"a", "ba", "b"}));  // empty matches
  EXPECT_EQ(isolated("x*", "axxb"), (Texts{"a", "xx", "b"}));
  EXPECT_EQ(isolated("x", ""), Texts{});
}

// White space as Unicode's White_Space: the Mongolian vowel separator is not.
TEST(TextPattern, ReadsSpacesLikeOniguruma) {
  EXPECT_EQ(isolated("\\s+", "a\u3000\u0085b\u180Ec"), (Texts{"a", "\u3000\u0085", "b\u180Ec"}));
  EXPECT_EQ(isolated("[^\\s]+", "a\u3000\u180Eb"), (Texts{"a", "\u3000", "\u180Eb"}));
  EXPECT_EQ(isolated("\\S", "a b"), (Texts{"a", " ", "b"}));
  EXPECT_EQ(isolated("(?i:'s)", "a'\u017Fb'S"), (Texts{"a", "'\u017F", "b", "'S"}));
}

TEST(TextPattern, RefusesWhatOnigurumaReadsOtherwise) {
  for (const char* part : {"\\w",    "\\b",     "\\1",    "\\x",   "\\Q", "\\p{Han}", "\\pL",
                           "(?R)",   "(?<n>",   "(*UTF)", "(?m:",  "^",   "$",        ".",
                           "{1,3}?", "{1,2,3}", "{,3}",   "{999}", "[[",  "[a&&",     "[]"}) {
    const std::string pattern = std::string("a") + part;
    expect_error([&] { TextPattern(pattern, "file"); }, {"file", "not supported"});
  }
  expect_error([] { TextPattern("[ab", "file"); }, {"ends inside of []"});
  expect_error([] { TextPattern("a\\", "file"); }, {"not supported"});
  expect_error([] { TextPattern("(a", "file"); }, {"file", "damaged"});
  expect_error([] { TextPattern(std::string(5000, 'a'), "file"); }, {"5000 bytes"});
}

TEST(TextPattern, EndsWhereAPatternWouldSearchForAges) {
  const TextPattern hostile("((a+)+)+[bc]", "test");
  TextPattern::Match match;
  expect_error([&] { hostile.find(std::string(64, 'a') + "d", 0, match); }, {"regular expression fails"});
}

TEST(TextSplitter, MergesAsItsBehaviorSays) {
  const auto with = [](SplitBehavior behavior, bool invert = false) { return TextSplitter("-", behavior, invert); };
  const std::string text = "-a--b-";
  EXPECT_EQ(pieces(with(SplitBehavior::isolated), text), (Texts{"-", "a", "-", "-", "b", "-"}));
  EXPECT_EQ(pieces(with(SplitBehavior::removed), text), (Texts{"a", "b"}));
  EXPECT_EQ(pieces(with(SplitBehavior::removed, true), text), (Texts{"-", "-", "-", "-"}));
  EXPECT_EQ(pieces(with(SplitBehavior::merged_with_previous), text), (Texts{"-", "a-", "-", "b-"}));
  EXPECT_EQ(pieces(with(SplitBehavior::merged_with_next), text), (Texts{"-a", "-", "-b", "-"}));
  EXPECT_EQ(pieces(with(SplitBehavior::contiguous), text), (Texts{"-", "a", "--", "b", "-"}));
}

}  // namespace
}  // namespace furious
