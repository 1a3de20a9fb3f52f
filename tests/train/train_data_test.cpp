#include "train/train_data.h"

#include "train/small_run.h"

namespace furious {
namespace {

using namespace furious::testing;

// Documents of one letter, with a test split of the same.
std::string letters(const TemporaryFolder& folder, char letter) {
  const std::string name(1, letter);
  std::vector<std::string> documents;
  for (int i = 0; i < 200; ++i) documents.emplace_back(static_cast<size_t>(20 + i), letter);
  TokenizeOptions options;
  options.inputs = {folder.write(name + ".jsonl", json_lines(documents))};
  options.tokenizer = "byte";
  options.out = folder.path(name);
  options.test_fraction = 0.3;
  tokenize_corpus(options);
  return options.out;
}

// The letters of the rows in the first test batches.
std::string first_rows(const TrainOptions& options, int64_t batches) {
  const TrainData data = TrainData::open(options);
  std::string rows;
  for (int64_t step = 0; step < batches; ++step) {
    const Batch batch = data.test->at(step);
    for (int64_t row = 0; row < batch.inputs.size(0); ++row) {
      const int32_t* ids = batch.inputs.data<int32_t>() + row * batch.inputs.size(1);
      rows += static_cast<char>(ids[0] == data.tokenizer->eos() ? ids[1] : ids[0]);
    }
  }
  return rows;
}

TEST(TrainDataTest, TestBatchesOfAMixtureHaveItsShares) {
  const TemporaryFolder folder;
  const std::string a = letters(folder, 'a'), b = letters(folder, 'b');
  TrainOptions options = small_options(a + ":0.75," + b + ":0.25", folder.path("run"));
  const std::string rows = first_rows(options, 8);  // of 4
  EXPECT_EQ(std::ranges::count(rows, 'a'), 24);
  EXPECT_EQ(std::ranges::count(rows, 'b'), 8);
  options.data = b + ":0.25," + a + ":0.75";
  EXPECT_EQ(first_rows(options, 8), rows);
  options.accumulate = 2;  // the same rows in smaller batches
  EXPECT_EQ(first_rows(options, 16), rows);
  options.data = a + ":0.99," + b + ":0.01";
  EXPECT_NE(first_rows(options, 2).find('b'), std::string::npos);
}

TEST(TrainDataTest, ASourceWithoutATestSplitIsLeftOut) {
  const TemporaryFolder folder;
  const std::string a = letters(folder, 'a'), data = small_data(folder);
  TokenizeOptions options;
  options.inputs = {folder.path("a.jsonl")};
  options.tokenizer = "byte";
  options.out = folder.path("none");
  options.test_fraction = 0;
  tokenize_corpus(options);
  TrainOptions mixed = small_options(options.out + "," + a, folder.path("run"));
  EXPECT_EQ(first_rows(mixed, 2), std::string(8, 'a'));
  mixed.data = options.out + "," + options.out;
  EXPECT_EQ(TrainData::open(mixed).test, nullptr);
}

}  // namespace
}  // namespace furious
