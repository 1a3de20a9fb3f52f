// Synthetic tasks, generated on the fly: what a mixer can keep and find again. Row r of step s is a pure function of
// the options, s and r.
#pragma once

#include <cstdint>

#include "data/batches.h"

namespace furious {

// What the tasks share: their options say how large the batches are.
template <class Options>
class SyntheticTask : public BatchSource {
 public:
  int64_t batch() const override { return options_.batch; }
  int64_t length() const override { return options_.length; }
  int32_t vocabulary_size() const override { return options_.vocabulary_size; }

 protected:
  explicit SyntheticTask(const Options& options) : options_(options) {}
  Options options_;
};

// Multi-query associative recall (Arora et al., 2023, "Zoology"). A row begins with `pairs` key-value pairs; later each
// key comes again, at a random place, and its value is expected after it.
//
//   ids: 0 is filler; 1 .. V/2-1 are keys; V/2 .. V-1 are values
//   k3 v9 k1 v5 k7 v5 . . k7 v5 . . . . k3 v9 . . k1 v5 . .
//   targets are given at the repeated keys only
struct RecallOptions {
  int64_t batch = 32;
  int64_t length = 128;
  int64_t pairs = 8;
  int32_t vocabulary_size = 256;
  uint64_t seed = 123;
};

class RecallTask final : public SyntheticTask<RecallOptions> {
 public:
  explicit RecallTask(const RecallOptions& options);
  Batch at(int64_t step, RowRange rows = {}) const override;
};

// Pass-key retrieval (Mohtashami and Jaggi, 2023). Somewhere in random filler a marked key of decimal digits stands;
// at the end of the row it is asked for.
//
//   ids: 0 .. 9 are digits; 10 marks the key; 11 asks for it; 12 .. V-1 are filler
//   . . . . 10 4 7 1 1 3 . . . . . . . . . 11 4 7 1 1
//   targets are given from the question on: 4 7 1 1 3
struct PasskeyOptions {
  int64_t batch = 32;
  int64_t length = 256;
  int64_t digits = 5;
  int32_t vocabulary_size = 64;
  double depth = -1;  // of the key in the filler: 0 at its start, 1 at its end; below 0: anywhere
  uint64_t seed = 123;
};

class PasskeyTask final : public SyntheticTask<PasskeyOptions> {
 public:
  explicit PasskeyTask(const PasskeyOptions& options);
  Batch at(int64_t step, RowRange rows = {}) const override;
};

}  // namespace furious
