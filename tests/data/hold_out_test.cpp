#include "data/hold_out.h"

#include <filesystem>

#include "data/corpus.h"
#include "data/dataset.h"
#include "data/tokenize.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::gzip_of;
using testing::Random;
using testing::random_sentence;
using testing::read_folder;
using testing::TemporaryFolder;

std::string paragraphs(int count) {
  Random random(3);
  std::string text;
  for (int i = 0; i < count; ++i) text += random_sentence(random, 20) + "\nsecond line\n\n";
  return text;
}

int64_t test_from(const std::string& path, double fraction, int64_t least = 0) {
  std::vector<InputFile> files = find_inputs({path});
  hold_out_tail(files, {}, {fraction, 123, least});
  return files[0].test_from;
}

TEST(HoldOut, TheTailOfASingleDocumentBeginsWithAParagraph) {
  const TemporaryFolder folder;
  const std::string text = paragraphs(200);
  const auto size = static_cast<int64_t>(text.size());
  const std::string path = folder.write("a.txt", text);
  for (const double fraction : {0.01, 0.1, 0.5, 0.9}) {
    const int64_t from = test_from(path, fraction);
    EXPECT_EQ(text.substr(static_cast<size_t>(from) - 2, 2), "\n\n") << fraction;
    EXPECT_NEAR(static_cast<double>(size - from), fraction * static_cast<double>(size), 1000) << fraction;
    EXPECT_EQ(test_from(folder.write("a.txt.gz", gzip_of(text)), fraction), from);
  }
  // By default more than a fraction of a small text.
  EXPECT_NEAR(static_cast<double>(size - test_from(path, 0.001, 1 << 20)), 0.1 * static_cast<double>(size), 1000);
  EXPECT_EQ(test_from(path, 0), -1);
}

TEST(HoldOut, WithoutParagraphsALineAWordOrACharacter) {
  const TemporaryFolder folder;
  const auto tail = [&](const std::string& text) {
    return text.substr(static_cast<size_t>(test_from(folder.write("b.txt", text), 0.25)));
  };
  EXPECT_EQ(tail("one two\nthree four\nfive six\n12345"), "five six\n12345");
  EXPECT_EQ(tail("one two three four"), "four");
  EXPECT_EQ(tail("日本語日本語日本"), "日本");
}

TEST(HoldOut, OfSeveralDocumentsTheLongest) {
  const TemporaryFolder folder;
  const std::string text = paragraphs(100);
  std::vector<InputFile> files =
      find_inputs({folder.write("a.txt", "short"), folder.write("b.txt", text), folder.write("c.txt", text + "x")});
  hold_out_tail(files, {}, {1e-4, 123, 1000});
  EXPECT_EQ(files[0].test_from, -1);
  EXPECT_EQ(files[1].test_from, -1);
  EXPECT_GT(files[2].test_from, 0);
  // Where documents divide by themselves, they stay whole.
  files.clear();
  for (int i = 0; i < 40; ++i)
    files.push_back(find_inputs({folder.write(fmt::format("{}.txt", i), paragraphs(i + 1))})[0]);
  hold_out_tail(files, {}, {0.3, 123, 1000});
  for (const InputFile& file : files) EXPECT_EQ(file.test_from, -1);
}

TEST(HoldOut, ATextThatIsTooShortIsAnError) {
  const TemporaryFolder folder;
  expect_error([&] { test_from(folder.write("a.txt", "x"), 0.5); }, {"a.txt", "too short", "--test-fraction 0"});
}

TEST(HoldOut, BothSplitsTogetherAreTheTextForAnyBlockSizeAndAfterStops) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.inputs = {folder.write("a.txt", paragraphs(300))};
  options.tokenizer = "byte";
  options.test_fraction = 0.2;
  const std::string text = testing::read_file(options.inputs[0]);
  std::map<std::string, std::string> first;
  for (const size_t block : {300, 2000, 1 << 20}) {
    options.reader.block_bytes = block;
    options.out = folder.path(fmt::format("out-{}", block));
    int stops = 0;
    TokenizeHooks hooks;
    hooks.stop = [&] { return block == 2000; };
    while (true) {
      try {
        const TokenizeResult result = tokenize_corpus(options, hooks);
        EXPECT_EQ(result.divided.path, options.inputs[0]);
        break;
      } catch (const Stopped&) {
        ASSERT_LT(++stops, 200);
      }
    }
    EXPECT_EQ(stops > 10, block == 2000);
    const Dataset data(options.out);
    std::string all;
    for (const Split split : kSplits) {
      const TokenView& tokens = data.tokens(split);
      ASSERT_EQ(tokens.documents(), 1);
      std::vector<int32_t> ids(static_cast<size_t>(tokens.size()));
      tokens.copy(0, tokens.size(), ids.data());
      all += data.tokenizer()->decode(ids);
    }
    EXPECT_TRUE(all == text) << block;
    auto files = read_folder(options.out);
    files.erase("manifest.json");
    if (first.empty()) first = files;
    EXPECT_TRUE(files == first) << block;
  }
}

TEST(HoldOut, AnEmptySplitIsAnErrorThatLeavesNothing) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.inputs = {folder.write("a.jsonl", testing::json_lines({"one", "two", "three"}))};
  options.tokenizer = "byte";
  options.out = folder.path("out");
  expect_error([&] { tokenize_corpus(options); },
               {"of 3 documents none", "--test-fraction 0.5", "--test-fraction 0 for"});
  EXPECT_FALSE(std::filesystem::exists(options.out));
  options.test_fraction = 0.999999;
  expect_error([&] { tokenize_corpus(options); }, {"all 3 documents", "none is left for training"});
  EXPECT_FALSE(std::filesystem::exists(options.out));
  options.test_fraction = 0;
  EXPECT_EQ(tokenize_corpus(options).manifest[Split::train].total().documents, 3);
}

}  // namespace
}  // namespace furious
