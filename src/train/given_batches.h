// Batches that a caller gives one by one, instead of those of a corpus.
#pragma once

#include "data/batches.h"

namespace furious {

class GivenBatches final : public BatchSource {
 public:
  explicit GivenBatches(int32_t vocabulary) : vocabulary_(vocabulary) {}

  // The batch of every step from here on. Boundaries must be in order and in the batch.
  void give(Batch batch) { current_ = std::move(batch); }

  int64_t batch() const override { return current_.inputs ? current_.inputs.size(0) : 0; }
  int64_t length() const override { return current_.inputs ? current_.inputs.size(1) : 0; }
  int32_t vocabulary_size() const override { return vocabulary_; }
  Batch at(int64_t step, RowRange rows = {}) const override;
  bool known_ahead() const override { return false; }

 private:
  int32_t vocabulary_;
  Batch current_;
};

}  // namespace furious
