#include "data/mixture.h"

#include <cmath>

#include "data/corpus.h"
#include "data/tokenize.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::same_bits;
using testing::TemporaryFolder;

TEST(Mixture, SharesAreExactAndRowsOfASourceFollowOneAnother) {
  for (const std::vector<double>& shares :
       {std::vector<double>{0.7, 0.3}, {1, 1, 1}, {5, 3, 1, 1}, {0.999, 0.001}, {2}, {1e-6, 1}}) {
    const Mixture mixture(shares);
    double sum = 0;
    for (const double share : shares) sum += share;
    std::vector<int64_t> rows(shares.size());
    for (int64_t n = 0; n < 5000; ++n) {
      const MixedRow row = mixture(n);
      ASSERT_EQ(row.row, rows[row.source]++) << n;
      for (size_t i = 0; i < shares.size(); ++i)
        ASSERT_LE(std::abs(static_cast<double>(rows[i]) - static_cast<double>(n + 1) * shares[i] / sum), 1.5) << n;
    }
  }
  const Mixture mixture({0.7, 0.3});
  const int64_t far = int64_t{1} << 50;
  EXPECT_EQ(mixture(far), mixture(far));
  EXPECT_NEAR(static_cast<double>(mixture(far).row) / static_cast<double>(far), mixture(far).source == 0 ? 0.7 : 0.3,
              1e-9);
  for (const double share : {0.0, -1.0, std::nan("")}) expect_error([&] { Mixture({1, share}); }, {"share", "above 0"});
}

class MixedBatchesTest : public ::testing::Test {
 protected:
  Dataset dataset(const std::string& name, const std::vector<std::string>& documents) const {
    TokenizeOptions options;
    options.inputs = {folder.write(name + ".jsonl", testing::json_lines(documents))};
    options.tokenizer = "byte";
    options.out = folder.path(name);
    options.test_fraction = 0;
    tokenize_corpus(options);
    return Dataset(options.out);
  }
  TemporaryFolder folder;
};

TEST_F(MixedBatchesTest, RowsAreThoseOfTheSources) {
  testing::Random random(1);
  const Dataset a = dataset("a", testing::random_documents(random, 30));
  const Dataset b = dataset("b", testing::random_documents(random, 10));
  BatchOptions options;
  options.length = 16;
  options.packing = Packing::isolated;
  const DatasetBatches alone[2] = {{a, Split::train, options}, {b, Split::train, options}};
  const MixedBatches mixed({alone[0], alone[1]}, {0.75, 0.25}, 4, Order::shuffled);
  const Mixture mixture({0.75, 0.25});
  for (const int64_t step : {0, 1, 7, 1000}) {  // the last in a later epoch of both
    const Batch batch = mixed.at(step);
    std::vector<int32_t> boundaries;
    for (int64_t i = 0; i < 4; ++i) {
      const MixedRow row = mixture(step * 4 + i);
      const Batch expected = alone[row.source].at(row.row);
      EXPECT_TRUE(same_bits(batch.inputs.slice(0, i, 1), expected.inputs));
      EXPECT_TRUE(same_bits(batch.targets.slice(0, i, 1), expected.targets));
      EXPECT_TRUE(same_bits(mixed.at(step, {i, 1}).inputs, expected.inputs));
      if (!expected.boundaries) continue;
      for (int64_t at = 0; at < expected.boundaries.elements(); ++at)
        boundaries.push_back(static_cast<int32_t>(i * 16) + expected.boundaries.data<int32_t>()[at]);
    }
    std::vector<int32_t> found;
    if (batch.boundaries)
      found.assign(batch.boundaries.data<int32_t>(), batch.boundaries.data<int32_t>() + batch.boundaries.elements());
    EXPECT_EQ(found, boundaries);
  }
}

// How often each source occurs in the first rows.
std::vector<int64_t> counts(const std::vector<MixedRow>& order, size_t first, size_t sources) {
  std::vector<int64_t> rows(sources);
  for (size_t i = 0; i < first; ++i) EXPECT_EQ(order[i].row, rows[order[i].source]++);
  return rows;
}

TEST(TestOrder, TheFirstRowsHaveTheSharesAndAllRowsOccurOnce) {
  const std::vector<MixedRow> order = test_order({1000, 1000, 1000}, {0.2, 0.79, 0.01});
  ASSERT_EQ(order.size(), 3000u);
  EXPECT_EQ(order[0].source, 1u);  // one of each, the largest share first
  EXPECT_EQ(counts(order, 3, 3), (std::vector<int64_t>{1, 1, 1}));
  EXPECT_EQ(counts(order, 3000, 3), (std::vector<int64_t>{1000, 1000, 1000}));
  for (size_t n = 3; n < 1200; ++n) {  // then the second is used up
    const std::vector<int64_t> rows = counts(order, n, 3);
    ASSERT_NEAR(static_cast<double>(rows[0]), 0.2 * static_cast<double>(n), 2);
    ASSERT_GE(rows[2], 1);
    ASSERT_NEAR(static_cast<double>(rows[2]), 0.01 * static_cast<double>(n), 1);
  }
  // One that is used up leaves the rest to the others.
  EXPECT_EQ(counts(test_order({100, 2}, {0.5, 0.5}), 20, 2), (std::vector<int64_t>{18, 2}));
}

TEST(TestOrder, DoesNotDependOnTheOrderOfTheSources) {
  const std::vector<MixedRow> order = test_order({50, 30, 7}, {0.5, 0.3, 0.2});
  const std::vector<MixedRow> other = test_order({7, 50, 30}, {0.2, 0.5, 0.3});
  for (size_t i = 0; i < order.size(); ++i)
    EXPECT_EQ(other[i], (MixedRow{(order[i].source + 1) % 3, order[i].row})) << i;
}

TEST_F(MixedBatchesTest, OnceReadsEachSampleOnce) {
  const Dataset a = dataset("a", {"aaa", "bb"}), b = dataset("b", {"ccc"});
  BatchOptions options;
  options.length = 3;
  options.packing = Packing::rows;
  options.order = Order::once;
  const MixedBatches once({{a, Split::train, options}, {b, Split::train, options}}, {0.6, 0.4}, 2, Order::once);
  EXPECT_EQ(once.steps(), 2);
  EXPECT_EQ(once.at(0).inputs.data<int32_t>()[0], 'a');
  EXPECT_EQ(once.at(0).inputs.data<int32_t>()[3], 'c');
  EXPECT_EQ(once.at(1).inputs.data<int32_t>()[0], 'b');
  for (int i = 3; i < 6; ++i) EXPECT_EQ(once.at(1).targets.data<int32_t>()[i], -1);
}

TEST_F(MixedBatchesTest, AShuffleWindowStaysWithinIt) {
  std::vector<std::string> documents;
  for (int i = 0; i < 26; ++i) documents.push_back(std::string(1, static_cast<char>('a' + i)));
  const Dataset data = dataset("a", documents);
  BatchOptions options;
  options.length = 1;
  options.packing = Packing::rows;
  options.shuffle_window = 10;
  const DatasetBatches batches(data, Split::train, options);
  std::vector<std::string> epochs(2);
  for (int64_t i = 0; i < 52; ++i)
    epochs[static_cast<size_t>(i / 26)] += static_cast<char>(batches.at(i).inputs.data<int32_t>()[0]);
  EXPECT_NE(epochs[0], epochs[1]);
  for (std::string order : epochs) {
    std::string windows[3] = {order.substr(0, 10), order.substr(10, 10), order.substr(20)};
    EXPECT_FALSE(std::ranges::is_sorted(windows[0]) && std::ranges::is_sorted(windows[1]));
    for (std::string& window : windows) std::ranges::sort(window);
    EXPECT_EQ(windows[0] + windows[1] + windows[2], "abcdefghijklmnopqrstuvwxyz");
  }
  // A window as large as the data is the whole epoch, as without one.
  options.shuffle_window = 26;
  const DatasetBatches large(data, Split::train, options);
  options.shuffle_window = 0;
  const DatasetBatches all(data, Split::train, options);
  for (int64_t i = 0; i < 52; ++i) EXPECT_TRUE(same_bits(large.at(i).inputs, all.at(i).inputs));
}

}  // namespace
}  // namespace furious
