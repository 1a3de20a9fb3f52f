// Batches from several corpora.
//
// The rows of all batches form one endless sequence, of which row n belongs to one corpus. Of the first n rows, corpus
// 0 has ⌊n·share + ½⌋, spread evenly; the rows that it leaves are divided in the same way between corpus 1 and those
// after it, and so on. Within a corpus, rows follow in the order in which it would be trained alone, epoch after epoch.
// So a row is a pure function of its number, any batch can be computed by itself, and every batch has the same
// composition up to a row.
//
// A test reads each sample once, and often only the first rows. Their order is that of `test_order`, which has the
// shares of the corpora from the first row on.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "data/batches.h"

namespace furious {

// Row `row` of corpus `source`.
struct MixedRow {
  size_t source = 0;
  int64_t row = 0;

  bool operator==(const MixedRow&) const = default;
};

class Mixture {
 public:
  explicit Mixture(const std::vector<double>& shares);  // positive, in any proportion
  MixedRow operator()(int64_t number) const;

 private:
  std::vector<uint64_t> shares_;  // of what earlier sources leave, in units of 2⁻³²; the last has the rest
};

// The samples of all corpora, each once: the next one is always of the corpus that has the fewest rows for its share.
// So the first rows are one of each corpus, the largest share first; after them the first n have n·share of each, up to
// the number of corpora. A corpus that is used up leaves the rest to the others.
std::vector<MixedRow> test_order(const std::vector<int64_t>& samples, const std::vector<double>& shares);

class MixedBatches final : public BatchSource {
 public:
  // `sources` have batches of one row and this order.
  MixedBatches(std::vector<DatasetBatches> sources, const std::vector<double>& shares, int64_t batch, Order order);

  int64_t batch() const override { return batch_; }
  int64_t length() const override { return sources_.front().length(); }
  int32_t vocabulary_size() const override { return sources_.front().vocabulary_size(); }
  Batch at(int64_t step, RowRange rows = {}) const override;

  int64_t steps() const;  // in which each sample of each source occurs once, with Order::once

 private:
  std::optional<MixedRow> row(int64_t number) const;

  std::vector<DatasetBatches> sources_;
  std::optional<Mixture> mixture_;  // Order::shuffled
  std::vector<MixedRow> order_;     // Order::once
  int64_t batch_;
};

}  // namespace furious
