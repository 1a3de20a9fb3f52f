// Batches of tokens for training and evaluation.
//
// A sample is one row of a batch. Row r of step s is a pure function of the data, the options, s and r: sample number
// s·batch + r of an endless sequence, in which every epoch visits each sample once, in an order of its own. So a run
// can stop and resume anywhere, and several processes can each compute some rows of the same batch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/dataset.h"
#include "tensor/tensor.h"

namespace furious {

// A permutation of 0..size-1 without memory: a Feistel network over the next power of four, applied until the result is
// in range. Each (seed, epoch) gives another order.
class Permutation {
 public:
  Permutation(int64_t size, uint64_t seed, uint64_t epoch);
  int64_t operator()(int64_t i) const;

 private:
  uint64_t once(uint64_t value) const;

  uint64_t size_;
  uint64_t seed_;
  uint64_t epoch_;
  int half_bits_;
};

struct Batch {
  Tensor inputs;        // [rows, length] i32
  Tensor targets;       // [rows, length] i32; -1: no target
  Tensor boundaries;    // see ops/boundaries.h; undefined where every row is one document
  Tensor weights = {};  // [rows, length] f32, of the losses; undefined: 1
};

// Rows [first, first + count) of a batch; count -1: all that follow.
struct RowRange {
  int64_t first = 0;
  int64_t count = -1;
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual int64_t batch() const = 0;
  virtual int64_t length() const = 0;
  virtual int32_t vocabulary_size() const = 0;
  virtual Batch at(int64_t step, RowRange rows = {}) const = 0;
  virtual bool known_ahead() const { return true; }  // at() can be called before the step is due
};

enum class Packing {
  packed,    // windows of the concatenated documents
  isolated,  // the same windows with boundaries: no token is predicted from another document
  rows,      // one document per row, cut off at the length, padded with eos
};

std::string name_of(Packing packing);
Packing packing_from_name(const std::string& name);

// A position in the sequence of samples.
struct BatchPosition {
  int64_t epoch = 0;
  int64_t index = 0;  // of the next sample in its epoch's order

  bool operator==(const BatchPosition&) const = default;
};

enum class Order {
  shuffled,  // for training: endless, whole windows only
  once,      // for evaluation: in order, each token predicted once; the last window and the last batch are filled up
};

struct BatchOptions {
  int64_t batch = 1;
  int64_t length = 1;
  Packing packing = Packing::packed;
  Order order = Order::shuffled;
  uint64_t seed = 123;
  BatchPosition start;  // where step 0 begins
  // With rows: each begins with bos, from which the document's first token is predicted. A document that fits is
  // followed by one eos that is predicted, one that is cut off is not. Those that begin with bos already
  // (`furious tokenize --bos`) get no second one.
  bool bos = false;
  // Order::shuffled: an epoch goes through windows of so many samples in the order of the data, and shuffles the
  // samples of each. 0: one window, the whole epoch.
  int64_t shuffle_window = 0;
};

class DatasetBatches final : public BatchSource {
 public:
  DatasetBatches(const Dataset& data, Split split, const BatchOptions& options);

  int64_t batch() const override { return options_.batch; }
  int64_t length() const override { return options_.length; }
  int32_t vocabulary_size() const override { return vocabulary_; }
  Batch at(int64_t step, RowRange rows = {}) const override;

  int64_t samples() const { return samples_; }  // in an epoch
  int64_t steps() const;                        // in an epoch; the last one may be partly filled
  BatchPosition position(int64_t step) const;   // of the first row of this step

 private:
  struct Row;
  int64_t sample_number(int64_t step, int64_t row) const;
  int64_t shuffled(int64_t number) const;
  void fill(int64_t sample, const Row& row) const;
  void fill_window(int64_t window, const Row& row) const;
  void fill_document(int64_t document, const Row& row) const;
  void isolate(int64_t begin, int64_t count, const Row& row) const;

  TokenView tokens_;
  int32_t vocabulary_;
  int32_t padding_;
  int32_t bos_;
  BatchOptions options_;
  int64_t samples_ = 0;
};

}  // namespace furious
