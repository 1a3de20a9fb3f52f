#include "data/synthetic.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "data/batch_rows.h"

namespace furious {

// The random numbers of one row.
class RowRandom {
 public:
  RowRandom(uint64_t seed, uint64_t stream, int64_t sample) {
    const RandomBits bits = random_bits(seed, stream, static_cast<uint64_t>(sample));
    seed_ = uint64_t{bits.word[0]} << 32 | bits.word[1];
    stream_ = uint64_t{bits.word[2]} << 32 | bits.word[3];
  }

  // Uniform in [0, count).
  int64_t below(int64_t count) {
    if (used_ == 4) {
      bits_ = random_bits(seed_, stream_, counter_++);
      used_ = 0;
    }
    return static_cast<int64_t>(uint64_t{bits_.word[used_++]} * static_cast<uint64_t>(count) >> 32);
  }
  // A number of [low, high]; one half as large is as frequent, counted by octaves.
  int64_t even_on_log_scale(int64_t low, int64_t high) {
    constexpr int64_t kFine = 1 << 20;
    const double place = static_cast<double>(below(kFine)) / static_cast<double>(kFine);
    const double factor = std::pow(static_cast<double>(high + 1) / static_cast<double>(low), place);
    return std::min(high, static_cast<int64_t>(static_cast<double>(low) * factor));
  }
  // Different numbers in [0, count), by their index.
  Permutation distinct(int64_t count) { return Permutation(count, seed_, static_cast<uint64_t>(below(1 << 20))); }

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t counter_ = 0;
  RandomBits bits_ = {};
  int used_ = 4;
};

namespace {

constexpr uint64_t kRecallStream = uint64_t{0x6d716172} << 32;   // "mqar"
constexpr uint64_t kLookupStream = uint64_t{0x6c6f6f6b} << 32;   // "look"
constexpr uint64_t kNeedleStream = uint64_t{0x6e65656c} << 32;   // "neel"
constexpr uint64_t kPasskeyStream = uint64_t{0x6b657973} << 32;  // "keys"

// The ids of tasks with keys and values.
struct PairIds {
  explicit PairIds(int32_t vocabulary_size) : keys(vocabulary_size / 2 - 1), values(vocabulary_size - 1 - keys) {}

  int32_t key(int64_t i) const { return static_cast<int32_t>(1 + i); }
  int32_t value(int64_t i) const { return static_cast<int32_t>(1 + keys + i); }

  int64_t keys, values;  // how many there are
};

}  // namespace

RecallTask::RecallTask(const RecallOptions& options) : SyntheticTask(options) {
  require(options.batch >= 1 && options.pairs >= 1, "recall: batch {}, {} pairs; expected 1 or more", options.batch,
          options.pairs);
  require(options.length >= 4 * options.pairs, "recall: {} pairs and their queries need length {}, not {}",
          options.pairs, 4 * options.pairs, options.length);
  require(options.vocabulary_size / 2 - 1 >= options.pairs, "recall: {} pairs need a vocabulary of {} or more, not {}",
          options.pairs, 2 * options.pairs + 2, options.vocabulary_size);
}

Batch RecallTask::at(int64_t step, RowRange range) const {
  const PairIds ids(options_.vocabulary_size);
  const int64_t pairs = options_.pairs;
  BatchRows rows(options_.batch, options_.length, range, 0);
  for (int64_t i = 0; i < rows.count(); ++i) {
    RowRandom random(options_.seed, kRecallStream, step * options_.batch + rows.first() + i);
    const Permutation key = random.distinct(ids.keys);
    const Permutation slot = random.distinct((options_.length - 2 * pairs) / 2);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int32_t key_id = ids.key(key(pair));
      const int32_t value_id = ids.value(random.below(ids.values));
      const int64_t query = 2 * pairs + 2 * slot(pair);
      for (const int64_t at : {2 * pair, query}) {
        rows.inputs(i)[at] = key_id;
        rows.inputs(i)[at + 1] = value_id;
      }
      rows.targets(i)[query] = value_id;
    }
  }
  return rows.finish();
}

LookupTask::LookupTask(const LookupOptions& options) : SyntheticTask(options) {
  require(options.batch >= 1 && options.length >= 4, "lookup: batch {}, length {}; expected 1 and 4 or more",
          options.batch, options.length);
  const int64_t keys = PairIds(options.vocabulary_size).keys;
  if (options.pairs == 0) options_.pairs = keys;
  require(options_.pairs >= 2 && options_.pairs <= keys, "lookup: {} pairs, expected 2 to {} with a vocabulary of {}",
          options_.pairs, keys, options.vocabulary_size);
}

Batch LookupTask::at(int64_t step, RowRange range) const {
  BatchRows rows(options_.batch, options_.length, range, 0);
  std::vector<int32_t> boundaries;
  for (int64_t i = 0; i < rows.count(); ++i) {
    RowRandom random(options_.seed, kLookupStream, step * options_.batch + rows.first() + i);
    for (int64_t t = 0; t + 1 < options_.length;) {
      if (t > 0) boundaries.push_back(static_cast<int32_t>(i * options_.length + t));
      const int64_t left = (options_.length - t) / 2;
      const int64_t slots = left < 4 ? left : random.even_on_log_scale(2, left);
      fill(slots, random, rows.inputs(i) + t, rows.targets(i) + t);
      t += 2 * slots;
    }
  }
  return rows.finish(boundaries);
}

// One document of so many pairs.
void LookupTask::fill(int64_t slots, RowRandom& random, int32_t* inputs, int32_t* targets) const {
  const PairIds ids(options_.vocabulary_size);
  const int64_t pairs = std::min(slots, options_.pairs);
  const Permutation key = random.distinct(ids.keys);
  std::vector<int32_t> values(static_cast<size_t>(pairs < 2 ? pairs : random.even_on_log_scale(2, pairs)), 0);
  for (int64_t t = 0; t < 2 * slots; t += 2) {
    const int64_t pair = random.below(static_cast<int64_t>(values.size()));
    if (values[pair] != 0)
      targets[t] = values[pair];
    else
      values[pair] = ids.value(random.below(ids.values));
    inputs[t] = ids.key(key(pair));
    inputs[t + 1] = values[pair];
  }
}

NeedleTask::NeedleTask(const NeedleOptions& options) : options_(options) {
  require(options.batch >= 1 && options.pairs >= 1, "needle: batch {}, {} pairs; expected 1 or more", options.batch,
          options.pairs);
  require(options.pairs <= PairIds(options.vocabulary_size).keys,
          "needle: {} pairs need a vocabulary of {} or more, not {}", options.pairs, 2 * options.pairs + 2,
          options.vocabulary_size);
  require(options.depth <= 1, "needle: depth {}, expected at most 1", options.depth);
}

Batch NeedleTask::at(int64_t step, RowRange range) const {
  const PairIds ids(options_.vocabulary_size);
  const int64_t last = 2 * options_.pairs;
  BatchRows rows(options_.batch, length(), range, 0);
  for (int64_t i = 0; i < rows.count(); ++i) {
    RowRandom random(options_.seed, kNeedleStream, step * options_.batch + rows.first() + i);
    const Permutation key = random.distinct(ids.keys);
    int32_t* inputs = rows.inputs(i);
    for (int64_t pair = 0; pair < options_.pairs; ++pair) {
      inputs[2 * pair] = ids.key(key(pair));
      inputs[2 * pair + 1] = ids.value(random.below(ids.values));
    }
    const int64_t any = random.below(options_.pairs);
    const double place = options_.depth * static_cast<double>(options_.pairs - 1);
    const int64_t asked = options_.depth < 0 ? any : std::llround(place);
    inputs[last] = inputs[2 * asked];
    rows.targets(i)[last] = inputs[2 * asked + 1];
  }
  return rows.finish();
}

PasskeyTask::PasskeyTask(const PasskeyOptions& options) : SyntheticTask(options) {
  require(options.batch >= 1 && options.digits >= 1, "passkey: batch {}, {} digits; expected 1 or more", options.batch,
          options.digits);
  require(options.length >= 2 * options.digits + 1,
          "passkey: a key of {} digits and its question need length {}, not {}", options.digits, 2 * options.digits + 1,
          options.length);
  require(options.vocabulary_size > 12, "passkey: vocabulary {}, expected 13 or more", options.vocabulary_size);
  require(options.depth <= 1, "passkey: depth {}, expected at most 1", options.depth);
}

Batch PasskeyTask::at(int64_t step, RowRange range) const {
  constexpr int32_t kMark = 10;
  constexpr int32_t kQuestion = 11;
  const int64_t digits = options_.digits;
  const int64_t question = options_.length - digits;   // then all digits but the last, which is only predicted
  const int64_t places = question - (digits + 1) + 1;  // where the mark may stand
  BatchRows rows(options_.batch, options_.length, range, 0);
  for (int64_t i = 0; i < rows.count(); ++i) {
    RowRandom random(options_.seed, kPasskeyStream, step * options_.batch + rows.first() + i);
    int32_t* inputs = rows.inputs(i);
    for (int64_t t = 0; t < question; ++t)
      inputs[t] = static_cast<int32_t>(12 + random.below(options_.vocabulary_size - 12));
    const int64_t anywhere = random.below(places);
    const int64_t mark = options_.depth < 0 ? anywhere : std::llround(options_.depth * static_cast<double>(places - 1));
    inputs[mark] = kMark;
    inputs[question] = kQuestion;
    for (int64_t d = 0; d < digits; ++d) {
      const auto digit = static_cast<int32_t>(random.below(10));
      inputs[mark + 1 + d] = digit;
      if (d + 1 < digits) inputs[question + 1 + d] = digit;
      rows.targets(i)[question + d] = digit;
    }
  }
  return rows.finish();
}

}  // namespace furious
