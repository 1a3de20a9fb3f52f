#include "data/batches.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/names.h"
#include "base/random.h"
#include "data/batch_rows.h"

namespace furious {
namespace {

constexpr uint64_t kOrderStream = uint64_t{0x6f72646572} << 24;  // "order"; the low bits are the epoch
constexpr uint64_t kWindowStream = 0x77696e646f77;               // "window"
constexpr int kRounds = 6;

const std::vector<std::string>& packing_names() {
  static const std::vector<std::string> names = {"packed", "isolated", "rows"};
  return names;
}

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t epoch)
    : size_(static_cast<uint64_t>(size)), seed_(seed), epoch_(epoch) {
  require(size >= 1, "permutation of {} elements, expected 1 or more", size);
  half_bits_ = std::max(1, (static_cast<int>(std::bit_width(size_ - 1)) + 1) / 2);
}

uint64_t Permutation::once(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t mixed = random_bits(seed_, kOrderStream + epoch_, round << 32 | right).word[0] & mask;
    left = std::exchange(right, left ^ mixed);
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t i) const {
  uint64_t value = static_cast<uint64_t>(i);
  do value = once(value);
  while (value >= size_);
  return static_cast<int64_t>(value);
}

std::string name_of(Packing packing) {
  return packing_names()[static_cast<size_t>(packing)];
}

Packing packing_from_name(const std::string& name) {
  const auto& names = packing_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) unknown_name("packing", name, names);
  return static_cast<Packing>(found - names.begin());
}

// The destination of one sample.
struct DatasetBatches::Row {
  int32_t* inputs;
  int32_t* targets;
  int64_t first;  // position of the row in the flattened batch
  std::vector<int32_t>& boundaries;
};

DatasetBatches::DatasetBatches(const Dataset& data, Split split, const BatchOptions& options)
    : tokens_(data.tokens(split)),
      vocabulary_(data.manifest().tokenizer.vocabulary_size),
      padding_(std::max(0, data.manifest().tokenizer.eos)),
      bos_(data.manifest().tokenizer.bos),
      options_(options) {
  require(options.batch >= 1, "batches: batch {}, expected 1 or more", options.batch);
  require(options.length >= 1, "batches: length {}, expected 1 or more", options.length);
  require(options.shuffle_window >= 0, "batches: a shuffle window of {}, expected 0 or more", options.shuffle_window);
  require(!options.bos || options.packing == Packing::rows,
          "batches: bos needs packing rows, but the packing is {}; use packing rows, or `furious tokenize --bos`",
          name_of(options.packing));
  require(!options.bos || bos_ >= 0, "{}: its tokenizer has no bos; leave bos out, or use a tokenizer with bos",
          tokens_.name());
  require(tokens_.size() > 0, "{} is empty{}", tokens_.name(),
          split == Split::test ? "; tokenize with a larger --test-fraction" : "");
  if (options.packing == Packing::rows) {
    samples_ = tokens_.documents();
  } else if (options.order == Order::once) {
    samples_ = std::max<int64_t>(1, (tokens_.size() - 1 + options.length - 1) / options.length);
  } else {
    samples_ = (tokens_.size() - 1) / options.length;
    require(samples_ > 0, "{} has {} tokens; length {} needs at least {}: use more text or a smaller length",
            tokens_.name(), tokens_.size(), options.length, options.length + 1);
  }
  require(options.start.epoch >= 0 && options.start.index >= 0 && options.start.index < samples_,
          "batches: position {} of epoch {}, but an epoch of {} at length {} has {} samples", options.start.index,
          options.start.epoch, tokens_.name(), options.length, samples_);
}

int64_t DatasetBatches::steps() const {
  return (samples_ + options_.batch - 1) / options_.batch;
}

int64_t DatasetBatches::sample_number(int64_t step, int64_t row) const {
  return options_.start.epoch * samples_ + options_.start.index + step * options_.batch + row;
}

BatchPosition DatasetBatches::position(int64_t step) const {
  const int64_t number = sample_number(step, 0);
  return {number / samples_, number % samples_};
}

// The sample at this place of the endless sequence.
int64_t DatasetBatches::shuffled(int64_t number) const {
  const auto epoch = static_cast<uint64_t>(number / samples_);
  const int64_t index = number % samples_, window = options_.shuffle_window;
  if (window == 0 || window >= samples_) return Permutation(samples_, options_.seed, epoch)(index);
  const int64_t begin = index / window * window;
  const RandomBits bits = random_bits(options_.seed, kWindowStream, static_cast<uint64_t>(begin));
  const uint64_t seed = uint64_t{bits.word[0]} << 32 | bits.word[1];
  return begin + Permutation(std::min(window, samples_ - begin), seed, epoch)(index - begin);
}

Batch DatasetBatches::at(int64_t step, RowRange range) const {
  require(step >= 0, "batches: step {}, expected 0 or more", step);
  BatchRows rows(options_.batch, options_.length, range, padding_);
  std::vector<int32_t> boundaries;
  for (int64_t i = 0; i < rows.count(); ++i) {
    const int64_t number = sample_number(step, rows.first() + i);
    const Row row = {rows.inputs(i), rows.targets(i), i * options_.length, boundaries};
    if (options_.order == Order::once) {
      if (number < samples_) fill(number, row);
    } else {
      fill(shuffled(number), row);
    }
  }
  return rows.finish(boundaries);
}

void DatasetBatches::fill(int64_t sample, const Row& row) const {
  if (options_.packing == Packing::rows)
    fill_document(sample, row);
  else
    fill_window(sample, row);
}

void DatasetBatches::fill_window(int64_t window, const Row& row) const {
  const int64_t begin = window * options_.length;
  const int64_t count = std::min(options_.length, tokens_.size() - begin);
  const int64_t predicted = std::min(options_.length, tokens_.size() - 1 - begin);
  tokens_.copy(begin, count, row.inputs);
  tokens_.copy(begin + 1, predicted, row.targets);
  if (options_.packing == Packing::isolated) isolate(begin, count, row);
}

// Marks where documents begin inside tokens [begin, begin + count) and drops the targets that begin one.
void DatasetBatches::isolate(int64_t begin, int64_t count, const Row& row) const {
  for (int64_t document = tokens_.document_at(begin);; ++document) {
    const int64_t end = tokens_.document(document).end - begin;  // where the next one starts
    if (end > count) return;
    row.targets[end - 1] = -1;
    if (end == count) return;
    row.boundaries.push_back(static_cast<int32_t>(row.first + end));
  }
}

void DatasetBatches::fill_document(int64_t document, const Row& row) const {
  const DocumentRange range = tokens_.document(document);  // of one token or more
  int32_t first = 0;
  tokens_.copy(range.begin, 1, &first);
  const int64_t added = options_.bos && first != bos_ ? 1 : 0;
  if (added > 0) row.inputs[0] = bos_;
  tokens_.copy(range.begin, std::min(options_.length, range.length()) - added, row.inputs + added);
  tokens_.copy(range.begin + 1 - added, std::min(options_.length, range.length() - 1 + added), row.targets);
}

}  // namespace furious
