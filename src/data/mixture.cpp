#include "data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "data/batch_rows.h"

namespace furious {
namespace {

constexpr int kShareBits = 32;

// ⌊n·share + ½⌋
int64_t rows_of(int64_t n, uint64_t share) {
  const auto product = static_cast<unsigned __int128>(n) * share + (uint64_t{1} << (kShareBits - 1));
  return static_cast<int64_t>(product >> kShareBits);
}

}  // namespace

Mixture::Mixture(const std::vector<double>& shares) {
  double left = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (const double share : shares) {
    require(share > 0 && std::isfinite(left), "data: a share of {}, expected a number above 0", share);
    shares_.push_back(static_cast<uint64_t>(std::llround(std::min(1.0, share / left) * std::exp2(kShareBits))));
    left -= share;
  }
}

MixedRow Mixture::operator()(int64_t number) const {
  for (size_t source = 0; source + 1 < shares_.size(); ++source) {
    const int64_t before = rows_of(number, shares_[source]);
    if (rows_of(number + 1, shares_[source]) > before) return {source, before};
    number -= before;
  }
  return {shares_.size() - 1, number};
}

std::vector<MixedRow> test_order(const std::vector<int64_t>& samples, const std::vector<double>& shares) {
  std::vector<int64_t> taken(samples.size());
  // Equal numbers go to the larger share, whatever the order of the corpora.
  const auto place = [&](size_t source) {
    return std::pair(static_cast<double>(taken[source]) / shares[source], -shares[source]);
  };
  std::vector<MixedRow> order(static_cast<size_t>(std::accumulate(samples.begin(), samples.end(), int64_t{0})));
  for (MixedRow& row : order) {
    size_t next = samples.size();
    for (size_t source = 0; source < samples.size(); ++source)
      if (taken[source] < samples[source] && (next == samples.size() || place(source) < place(next))) next = source;
    row = {next, taken[next]++};
  }
  return order;
}

MixedBatches::MixedBatches(std::vector<DatasetBatches> sources, const std::vector<double>& shares, int64_t batch,
                           Order order)
    : sources_(std::move(sources)), batch_(batch) {
  require(!sources_.empty() && sources_.size() == shares.size() && batch >= 1,
          "batches: {} sources with {} shares in batches of {}", sources_.size(), shares.size(), batch);
  if (order == Order::shuffled) {
    mixture_.emplace(shares);
    return;
  }
  std::vector<int64_t> samples;
  for (const DatasetBatches& source : sources_) samples.push_back(source.samples());
  order_ = test_order(samples, shares);
}

int64_t MixedBatches::steps() const {
  int64_t samples = 0;
  for (const DatasetBatches& source : sources_) samples += source.samples();
  return (samples + batch_ - 1) / batch_;
}

std::optional<MixedRow> MixedBatches::row(int64_t number) const {
  if (mixture_) return (*mixture_)(number);
  if (number < static_cast<int64_t>(order_.size())) return order_[static_cast<size_t>(number)];
  return std::nullopt;
}

Batch MixedBatches::at(int64_t step, RowRange range) const {
  require(step >= 0, "batches: step {}, expected 0 or more", step);
  BatchRows rows(batch_, length(), range, 0);
  std::vector<int32_t> boundaries;
  for (int64_t i = 0; i < rows.count(); ++i) {
    const auto mixed = row(step * batch_ + rows.first() + i);
    if (!mixed) continue;
    const Batch one = sources_[mixed->source].at(mixed->row);
    std::copy_n(one.inputs.data<int32_t>(), length(), rows.inputs(i));
    std::copy_n(one.targets.data<int32_t>(), length(), rows.targets(i));
    if (!one.boundaries) continue;
    for (int64_t b = 0; b < one.boundaries.elements(); ++b)
      boundaries.push_back(static_cast<int32_t>(i * length()) + one.boundaries.data<int32_t>()[b]);
  }
  return rows.finish(boundaries);
}

}  // namespace furious
