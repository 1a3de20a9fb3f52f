#include "data/synthetic.h"

#include <cmath>

#include "base/error.h"
#include "base/random.h"
#include "data/batch_rows.h"

namespace furious {
namespace {

constexpr uint64_t kRecallStream = uint64_t{0x6d716172} << 32;   // "mqar"
constexpr uint64_t kPasskeyStream = uint64_t{0x6b657973} << 32;  // "keys"

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
  // Different numbers in [0, count), by their index.
  Permutation distinct(int64_t count) { return Permutation(count, seed_, static_cast<uint64_t>(below(1 << 20))); }

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t counter_ = 0;
  RandomBits bits_ = {};
  int used_ = 4;
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
  const int64_t keys = options_.vocabulary_size / 2 - 1;
  const int64_t pairs = options_.pairs;
  BatchRows rows(options_.batch, options_.length, range, 0);
  for (int64_t i = 0; i < rows.count(); ++i) {
    RowRandom random(options_.seed, kRecallStream, step * options_.batch + rows.first() + i);
    const Permutation key = random.distinct(keys);
    const Permutation slot = random.distinct((options_.length - 2 * pairs) / 2);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const auto key_id = static_cast<int32_t>(1 + key(pair));
      const auto value_id = static_cast<int32_t>(1 + keys + random.below(options_.vocabulary_size - 1 - keys));
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
