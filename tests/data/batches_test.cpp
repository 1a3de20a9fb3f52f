#include "data/batches.h"

#include <filesystem>
#include <set>

#include "data/corpus.h"
#include "data/tokenize.h"
#include "ops/boundaries.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::same_bits;
using testing::TemporaryFolder;

TEST(Permutation, IsABijection) {
  for (const int64_t size : {1, 2, 3, 4, 5, 16, 17, 100, 1000, 1025}) {
    std::set<int64_t> seen;
    const Permutation order(size, 7, 3);
    for (int64_t i = 0; i < size; ++i) seen.insert(order(i));
    EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), size - 1);
  }
}

TEST(Permutation, EpochsAndSeedsDiffer) {
  const auto equal = [](const Permutation& a, const Permutation& b) {
    int count = 0;
    for (int64_t i = 0; i < 1000; ++i) count += a(i) == b(i);
    return count;
  };
  EXPECT_LT(equal(Permutation(1000, 1, 0), Permutation(1000, 1, 1)), 20);
  EXPECT_LT(equal(Permutation(1000, 1, 0), Permutation(1000, 2, 0)), 20);
  EXPECT_EQ(equal(Permutation(1000, 1, 5), Permutation(1000, 1, 5)), 1000);
}

TEST(Permutation, SupportsMoreElementsThanMemory) {
  const Permutation order((int64_t{1} << 40) + 3, 1, 0);
  for (int64_t i = 0; i < 100; ++i) EXPECT_LT(order(i * 1000003), (int64_t{1} << 40) + 3);
}

class BatchesTest : public ::testing::Test {
 protected:
  // Documents "a", "bb", "ccc", …: with eos, of 2, 3, 4, … tokens.
  Dataset letters(int count) const {
    std::vector<std::string> documents;
    for (int i = 0; i < count; ++i) documents.emplace_back(i + 1, static_cast<char>('a' + i));
    return tokenized(documents, 0);
  }
  Dataset tokenized(const std::vector<std::string>& documents, double test_fraction, bool bos = false) const {
    TokenizeOptions options;
    options.inputs = {folder.write(fmt::format("{}.jsonl", ++last_corpus), testing::json_lines(documents))};
    options.tokenizer = "byte";
    options.out = folder.path(fmt::format("data-{}", last_corpus));
    options.test_fraction = test_fraction;
    options.shard_tokens = 50;
    options.bos = bos;
    tokenize_corpus(options);
    return Dataset(options.out);
  }
  static BatchOptions sized(int64_t batch, int64_t length, Packing packing, Order order) {
    BatchOptions options;
    options.batch = batch;
    options.length = length;
    options.packing = packing;
    options.order = order;
    return options;
  }
  // "^abc|bc." with '^' for bos, '.' for eos and '-' for a target of -1.
  static std::string text(const Tensor& ids) {
    std::string result;
    for (int64_t row = 0; row < ids.size(0); ++row) {
      if (row > 0) result += '|';
      for (int64_t t = 0; t < ids.size(1); ++t) {
        const int32_t id = ids.data<int32_t>()[row * ids.size(1) + t];
        result += id == -1 ? '-' : id == 256 ? '^' : id == 257 ? '.' : static_cast<char>(id);
      }
    }
    return result;
  }
  static std::vector<int32_t> ints(const Tensor& tensor) {
    if (!tensor) return {};
    return {tensor.data<int32_t>(), tensor.data<int32_t>() + tensor.elements()};
  }
  static void expect_same(const Batch& a, const Batch& b) {
    EXPECT_TRUE(same_bits(a.inputs, b.inputs));
    EXPECT_TRUE(same_bits(a.targets, b.targets));
    EXPECT_EQ(ints(a.boundaries), ints(b.boundaries));
  }

  TemporaryFolder folder;
  mutable int last_corpus = 0;
};

TEST_F(BatchesTest, PackedInOrder) {  // a.bb.ccc.dddd.
  const Dataset data = letters(4);
  const DatasetBatches batches(data, Split::train, sized(2, 4, Packing::packed, Order::once));
  EXPECT_EQ(batches.samples(), 4);
  EXPECT_EQ(batches.steps(), 2);
  const Batch first = batches.at(0);
  EXPECT_EQ(text(first.inputs), "a.bb|.ccc");
  EXPECT_EQ(text(first.targets), ".bb.|ccc.");
  EXPECT_FALSE(first.boundaries);
  const Batch last = batches.at(1);
  EXPECT_EQ(text(last.inputs), ".ddd|d...");  // the end, filled up with eos
  EXPECT_EQ(text(last.targets), "dddd|.---");
}

TEST_F(BatchesTest, IsolatedGivesBoundariesAndPredictsNothingAcrossThem) {
  const Dataset data = letters(4);
  const DatasetBatches batches(data, Split::train, sized(2, 4, Packing::isolated, Order::once));
  const Batch first = batches.at(0);
  EXPECT_EQ(text(first.inputs), "a.bb|.ccc");
  EXPECT_EQ(text(first.targets), ".-b.|-cc.");
  EXPECT_EQ(ints(first.boundaries), (std::vector<int32_t>{2, 5}));
  const Batch last = batches.at(1);
  EXPECT_EQ(text(last.targets), "-ddd|.---");
  EXPECT_EQ(ints(last.boundaries), (std::vector<int32_t>{1}));
  EXPECT_EQ(segments_of("test", first.boundaries, 2, 4).size(), 4u);
}

TEST_F(BatchesTest, IsolatedWhereAWindowEndsWithADocument) {  // a.bb. | ccc.d
  const Dataset data = letters(4);
  const DatasetBatches batches(data, Split::train, sized(1, 5, Packing::isolated, Order::once));
  EXPECT_EQ(text(batches.at(0).inputs), "a.bb.");
  EXPECT_EQ(text(batches.at(0).targets), ".-b.-");
  EXPECT_EQ(ints(batches.at(0).boundaries), (std::vector<int32_t>{2}));
  EXPECT_EQ(text(batches.at(1).targets), "cc.-d");
}

// Every target is the next token of the same document; positions without one have -1.
TEST_F(BatchesTest, IsolatedTargetsAreRightOnRandomText) {
  testing::Random random(1);
  const Dataset data = tokenized(testing::random_documents(random, 30), 0);
  const TokenView& tokens = data.tokens(Split::train);
  const DatasetBatches batches(data, Split::train, sized(1, 37, Packing::isolated, Order::once));
  int64_t predicted = 0;
  for (int64_t step = 0; step < batches.steps(); ++step) {
    const Batch batch = batches.at(step);
    for (int64_t t = 0; t < 37 && step * 37 + t < tokens.size(); ++t) {
      const int64_t at = step * 37 + t;
      const bool same = at + 1 < tokens.size() && tokens.document_at(at) == tokens.document_at(at + 1);
      int32_t next = -1;
      if (same) tokens.copy(at + 1, 1, &next);
      ASSERT_EQ(batch.targets.data<int32_t>()[t], next);
      predicted += same;
    }
  }
  EXPECT_EQ(predicted, tokens.size() - tokens.documents());
}

TEST_F(BatchesTest, OneDocumentPerRow) {
  const Dataset data = letters(4);
  const DatasetBatches batches(data, Split::train, sized(4, 3, Packing::rows, Order::once));
  EXPECT_EQ(batches.samples(), 4);
  const Batch batch = batches.at(0);
  EXPECT_EQ(text(batch.inputs), "a..|bb.|ccc|ddd");
  EXPECT_EQ(text(batch.targets), ".--|b.-|cc.|ddd");
  EXPECT_FALSE(batch.boundaries);
}

// As the authors' trainer has them: ids = [bos] + document, cut off after length + 1, filled up with eos; inputs are
// all but the last, targets all but the first, where the input is no padding.
TEST_F(BatchesTest, RowsThatBeginWithBos) {
  // Of 5: much shorter, one that leaves room for eos, one that fills the row, one longer, much longer. An empty one is
  // not in the shards, so it is no row.
  const std::vector<std::string> documents = {"a", "", "bbbb", "ccccc", "dddddd", "eeeeeeeeeeee"};
  const std::string inputs = "^a...|^bbbb|^cccc|^dddd|^eeee";
  const std::string targets = "a.---|bbbb.|ccccc|ddddd|eeeee";
  for (const bool stored : {false, true}) {  // in the shards; no second one is added
    const Dataset data = tokenized(documents, 0, stored);
    BatchOptions options = sized(5, 5, Packing::rows, Order::once);
    options.bos = true;
    const DatasetBatches batches(data, Split::train, options);
    EXPECT_EQ(batches.samples(), 5);
    EXPECT_EQ(text(batches.at(0).inputs), inputs) << stored;
    EXPECT_EQ(text(batches.at(0).targets), targets) << stored;
    EXPECT_FALSE(batches.at(0).boundaries);
  }
}

TEST_F(BatchesTest, RowsWithBosMatchTheAuthorsOnRandomText) {
  testing::Random random(5);
  const Dataset data = tokenized(testing::random_documents(random, 40), 0);
  const TokenView& tokens = data.tokens(Split::train);
  for (const int64_t length : {1, 2, 16, 37, 4000}) {
    BatchOptions options = sized(1, length, Packing::rows, Order::once);
    options.bos = true;
    const DatasetBatches batches(data, Split::train, options);
    for (int64_t row = 0; row < tokens.documents(); ++row) {
      const DocumentRange range = tokens.document(row);
      std::vector<int32_t> ids(static_cast<size_t>(range.length()), 256);  // bos, and the document without its eos
      tokens.copy(range.begin, range.length() - 1, ids.data() + 1);
      const int64_t there = std::min(length + 1, range.length());
      ids.resize(static_cast<size_t>(length + 1), 257);
      const Batch batch = batches.at(row);
      for (int64_t t = 0; t < length; ++t) {
        ASSERT_EQ(batch.inputs.data<int32_t>()[t], ids[static_cast<size_t>(t)]);
        ASSERT_EQ(batch.targets.data<int32_t>()[t], t < there ? ids[static_cast<size_t>(t + 1)] : -1);
      }
    }
  }
}

TEST_F(BatchesTest, BosNeedsRowsAndATokenizerWithBos) {
  const Dataset data = letters(3);
  for (const Packing packing : {Packing::packed, Packing::isolated}) {
    BatchOptions options = sized(1, 2, packing, Order::once);
    options.bos = true;
    expect_error([&] { DatasetBatches(data, Split::train, options); },
                 {"bos", "packing is " + name_of(packing), "rows", "tokenize --bos"});
  }
  // The same shards, of a tokenizer without bos.
  const std::string path = folder.path("data-without");
  std::filesystem::copy(folder.path(fmt::format("data-{}", last_corpus)), path,
                        std::filesystem::copy_options::recursive);
  std::string manifest = testing::read_file(path + "/manifest.json");
  const size_t at = manifest.find("256", manifest.find("\"bos\""));
  ASSERT_NE(at, std::string::npos) << manifest;
  manifest.replace(at, 3, "-1");
  manifest.replace(manifest.find("\"checksum\""), 10, "\"changed\"");
  folder.write("data-without/manifest.json", manifest);
  BatchOptions options = sized(1, 2, Packing::rows, Order::once);
  options.bos = true;
  const Dataset without(path);
  expect_error([&] { DatasetBatches(without, Split::train, options); }, {"tokenizer has no bos"});
}

TEST_F(BatchesTest, PadsAPartialBatch) {
  const Dataset data = letters(3);
  const DatasetBatches batches(data, Split::train, sized(2, 3, Packing::rows, Order::once));
  EXPECT_EQ(batches.steps(), 2);
  EXPECT_EQ(text(batches.at(1).inputs), "ccc|...");
  EXPECT_EQ(text(batches.at(1).targets), "cc.|---");
}

TEST_F(BatchesTest, AnEpochVisitsEveryWindowOnceInItsOwnOrder) {
  testing::Random random(2);
  const Dataset data = tokenized(testing::random_documents(random, 30), 0);
  const DatasetBatches batches(data, Split::train, sized(1, 16, Packing::packed, Order::shuffled));
  const auto epoch = [&](int64_t number) {
    std::vector<std::string> windows;
    for (int64_t i = 0; i < batches.samples(); ++i)
      windows.push_back(text(batches.at(number * batches.samples() + i).inputs));
    return windows;
  };
  std::vector<std::string> first = epoch(0);
  std::vector<std::string> second = epoch(1);
  EXPECT_NE(first, second);
  std::sort(first.begin(), first.end());
  std::sort(second.begin(), second.end());
  EXPECT_EQ(first, second);
  EXPECT_EQ(batches.samples(), (data.tokens(Split::train).size() - 1) / 16);
}

TEST_F(BatchesTest, ResumesFromAPositionWithAnyBatchSize) {
  testing::Random random(3);
  const Dataset data = tokenized(testing::random_documents(random, 20), 0);
  const BatchOptions options = sized(4, 16, Packing::isolated, Order::shuffled);
  const DatasetBatches batches(data, Split::train, options);
  for (const int64_t step : {0, 3, 25}) {
    BatchOptions later = options;
    later.start = batches.position(step);
    const DatasetBatches continued(data, Split::train, later);
    EXPECT_EQ(continued.position(0), batches.position(step));
    for (int64_t i = 0; i < 30; ++i) expect_same(continued.at(i), batches.at(step + i));
    later.batch = 2;
    const DatasetBatches halves(data, Split::train, later);
    EXPECT_TRUE(same_bits(halves.at(1).inputs, batches.at(step, {2, 2}).inputs));
  }
}

TEST_F(BatchesTest, RangesOfRowsEqualSlicesOfTheBatch) {
  testing::Random random(4);
  const Dataset data = tokenized(testing::random_documents(random, 20), 0);
  const DatasetBatches batches(data, Split::train, sized(6, 16, Packing::isolated, Order::shuffled));
  const Batch whole = batches.at(5);
  std::vector<int32_t> boundaries;
  for (int64_t rank = 0; rank < 3; ++rank) {
    const Batch part = batches.at(5, {rank * 2, 2});
    EXPECT_EQ(text(part.inputs), text(whole.inputs.slice(0, rank * 2, 2)));
    EXPECT_EQ(text(part.targets), text(whole.targets.slice(0, rank * 2, 2)));
    for (const int32_t boundary : ints(part.boundaries))
      boundaries.push_back(boundary + static_cast<int32_t>(rank * 2 * 16));
  }
  EXPECT_EQ(boundaries, ints(whole.boundaries));
  expect_error([&] { batches.at(0, {5, 2}); }, {"rows 5..6", "batch of 6"});
}

TEST_F(BatchesTest, LengthLongerThanTheData) {
  const Dataset data = letters(3);  // 9 tokens
  expect_error([&] { DatasetBatches(data, Split::train, sized(1, 9, Packing::packed, Order::shuffled)); },
               {"9 tokens", "length 9", "at least 10"});
  EXPECT_EQ(DatasetBatches(data, Split::train, sized(1, 8, Packing::packed, Order::shuffled)).samples(), 1);
  const DatasetBatches once(data, Split::train, sized(1, 12, Packing::packed, Order::once));
  EXPECT_EQ(text(once.at(0).targets), ".bb.ccc.----");
}

TEST_F(BatchesTest, AnEmptyTestPartIsAnError) {
  const Dataset data = letters(3);
  expect_error([&] { DatasetBatches(data, Split::test, sized(1, 4, Packing::packed, Order::once)); },
               {"test split", "empty", "--test-fraction"});
}

TEST_F(BatchesTest, AOneTokenCorpusCanBeEvaluated) {
  const Dataset data = tokenized({"x"}, 0);
  const DatasetBatches rows(data, Split::train, sized(1, 4, Packing::rows, Order::shuffled));
  EXPECT_EQ(text(rows.at(0).inputs), "x...");
  EXPECT_EQ(text(rows.at(0).targets), ".---");
}

TEST(Packing, NamesRoundTrip) {
  for (const Packing packing : {Packing::packed, Packing::isolated, Packing::rows})
    EXPECT_EQ(packing_from_name(name_of(packing)), packing);
  expect_error([] { packing_from_name("pack"); }, {"unknown packing", "did you mean \"packed\""});
}

}  // namespace
}  // namespace furious
