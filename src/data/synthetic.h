// Synthetic retrieval tasks, generated on the fly. Row r of step s is a pure function of
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

class RowRandom;

// Keys that keep their values: a document is one key-value pair after another, drawn from a dictionary of its own, and
// wherever a key comes again its value is expected. What associative recall and the retrieval of needles test can be
// learned here soon: all the time something is asked for, easy (short documents, few keys) as often as hard. A row is
// documents of 2 pairs to all that fit, with 2 to `pairs` different keys, each even on a logarithmic scale.
//
//   ids: as for recall
//   k3 v9 k1 v5 k3 v9 k3 v9 | k7 v5 k1 v2 k7 v5 | k3 v8 k1 v6 …
struct LookupOptions {
  int64_t batch = 32;
  int64_t length = 64;
  int64_t pairs = 0;  // at most; 0: as many as there are keys
  int32_t vocabulary_size = 258;
  uint64_t seed = 123;
};

class LookupTask final : public SyntheticTask<LookupOptions> {
 public:
  explicit LookupTask(const LookupOptions& options);
  Batch at(int64_t step, RowRange rows = {}) const override;

 private:
  void fill(int64_t slots, RowRandom& random, int32_t* inputs, int32_t* targets) const;
};

// A needle in a haystack of needles: pairs of different keys and their values, and one of the keys again, which asks
// for its value. The length is 2·pairs + 1.
//
//   ids: as for recall
//   k3 v9 k1 v5 k7 v5 k2 v8 k1          the target, at the last key: v5
struct NeedleOptions {
  int64_t batch = 32;
  int64_t pairs = 16;
  int32_t vocabulary_size = 258;
  double depth = -1;  // of the pair that is asked for: 0 the first, 1 the last; below 0: any
  uint64_t seed = 123;
};

class NeedleTask final : public BatchSource {
 public:
  explicit NeedleTask(const NeedleOptions& options);
  int64_t batch() const override { return options_.batch; }
  int64_t length() const override { return 2 * options_.pairs + 1; }
  int32_t vocabulary_size() const override { return options_.vocabulary_size; }
  Batch at(int64_t step, RowRange rows = {}) const override;

 private:
  NeedleOptions options_;
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
