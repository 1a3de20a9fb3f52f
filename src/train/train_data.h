// The training and test batches that the options name: a tokenized corpus or a synthetic task.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/batches.h"
#include "data/dataset.h"
#include "furious/train.h"

namespace furious {

// A folder of token shards and its share of the rows.
struct DataShare {
  std::string folder;
  double share = 0;  // 0: in proportion to its size

  bool operator==(const DataShare&) const = default;
};
// "a:0.7,b:0.3", "a,b" or "a"; what exists as a whole is one folder, whatever its name contains.
std::vector<DataShare> data_shares(const std::string& data);

// One of the corpora of a run.
struct DataSource {
  std::string folder;
  double share = 0;
  std::unique_ptr<Dataset> dataset;
};
// Open, with one tokenizer, and with shares.
std::vector<DataSource> open_sources(const std::string& data);

struct SourceBatches {
  std::unique_ptr<BatchSource> batches;
  int64_t steps = 0;  // in an epoch
};
// Each token of this split predicted once; of several sources those that have the split, in the order of `test_order`.
SourceBatches once_batches(const std::vector<DataSource>& sources, Split split, BatchOptions options);

struct TrainData {
  std::unique_ptr<Dataset> dataset;            // the first of several; null for a synthetic task
  std::shared_ptr<const Tokenizer> tokenizer;  // null where there is none
  std::unique_ptr<BatchSource> batches;
  std::unique_ptr<BatchSource> test;  // null without a test split; a batch has the rows of one rank's micro-batch
  int64_t test_batches = 0;           // in the test split; 0: endless
  int64_t epoch_steps = 0;            // steps in which each training sample is seen once; 0: endless
  std::string fingerprint;            // of the data, which a resumed run compares

  // `ranks`: processes that share a batch.
  static TrainData open(const TrainOptions& options, int ranks = 1);

  // Whether documents begin with bos, as `furious tokenize --bos` writes them. Needs a dataset.
  bool begins_with_bos() const;
};

// Batches `first`, `first` + stride, `first` + 2·stride, … of another source: one rank's share of the test batches.
class StridedBatches final : public BatchSource {
 public:
  StridedBatches(const BatchSource& source, int64_t first, int64_t stride)
      : source_(source), first_(first), stride_(stride) {}
  int64_t batch() const override { return source_.batch(); }
  int64_t length() const override { return source_.length(); }
  int32_t vocabulary_size() const override { return source_.vocabulary_size(); }
  Batch at(int64_t step, RowRange rows = {}) const override { return source_.at(first_ + stride_ * step, rows); }

 private:
  const BatchSource& source_;
  int64_t first_, stride_;
};

}  // namespace furious
