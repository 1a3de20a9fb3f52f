#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "ops/sampling/sampling_kernels.h"
#include "ops/sampling/weights.h"

namespace furious {
namespace {

using namespace sampling;

constexpr int kBins = 4096;
constexpr int64_t kNanosecondsPerLogit = 4;

// Buffers of a thread, which stay for the next row.
struct Row {
  std::vector<float> logits;
  std::vector<uint32_t> weights;
  std::vector<uint64_t> ranks;
};
Row& own_row() {
  static thread_local Row row;
  return row;
}

// The logits as usable() makes them, and whether all were finite.
bool load(std::vector<float>& to, const float* logits, int64_t count) {
  to.resize(static_cast<size_t>(count));
  uint32_t not_finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    not_finite |= is_finite(logits[i]) ? 0u : 1u;
    to[i] = usable(logits[i]);
  }
  return not_finite == 0;
}

void adjust(std::vector<float>& logits, const SlotOptions& all, const SlotHistory& history) {
  const SlotOptions::Head& options = all.head;
  for (int i = 0; i < options.biases; ++i) logits[all.bias_id[i]] = biased(logits[all.bias_id[i]], all.bias[i]);
  if (options.penalties == 0) return;
  int32_t recent[kRepetitionWindow];
  std::copy_n(history.token, kRepetitionWindow, recent);
  std::sort(recent, recent + kRepetitionWindow);
  for (const int32_t *first = recent, *end = recent + kRepetitionWindow; first != end;) {
    const int32_t* const next = std::upper_bound(first, end, *first);
    if (*first >= 0 && static_cast<size_t>(*first) < logits.size())
      logits[*first] = penalized(logits[*first], static_cast<int>(next - first), options.repetition, options.frequency,
                                 options.presence);
    first = next;
  }
}

uint64_t largest_rank(const std::vector<float>& logits) {
  const auto best = std::max_element(logits.begin(), logits.end());  // the first of equals
  return rank_of(*best, static_cast<uint32_t>(best - logits.begin()));
}

uint64_t fill_weights(Row& row, float largest, float scale) {
  row.weights.resize(row.logits.size());
  for (size_t i = 0; i < row.logits.size(); ++i) row.weights[i] = weight_of(row.logits[i], largest, scale);
  uint64_t sum = 0;
  for (const uint32_t weight : row.weights) sum += weight;
  return sum;
}

// The rank of the last token that top-k and top-p keep. Bins of equal width find the few tokens that it is among.
uint64_t last_kept(Row& row, float largest, uint64_t total, const SlotOptions::Head& options) {
  struct Bin {
    uint64_t count = 0, mass = 0;
  };
  float smallest = largest;
  for (const float logit : row.logits) smallest = logit < smallest && is_finite(logit) ? logit : smallest;
  // Past 32 octaves below the largest no weight is above 0.
  const double width =
      std::min(static_cast<double>(largest) - static_cast<double>(smallest), 32.0 / static_cast<double>(options.scale));
  const double bins_per_logit = width > 0 ? kBins / width : 0.0;
  const auto bin_of = [&](float logit) {
    const double distance = (static_cast<double>(largest) - static_cast<double>(logit)) * bins_per_logit;
    return distance < kBins - 1 ? static_cast<size_t>(distance) : size_t{kBins - 1};  // also a banned token
  };
  std::vector<Bin> bins(kBins);
  for (size_t i = 0; i < row.logits.size(); ++i) {
    Bin& bin = bins[bin_of(row.logits[i])];
    bin.count += 1;
    bin.mass += row.weights[i];
  }
  const uint64_t enough = enough_of(total, options.top_p);
  uint64_t count = 0, mass = 0;
  size_t last = 0;
  while (count + bins[last].count < options.top_k && mass + bins[last].mass < enough) {
    count += bins[last].count;
    mass += bins[last].mass;
    ++last;
  }
  row.ranks.clear();
  for (size_t i = 0; i < row.logits.size(); ++i)
    if (bin_of(row.logits[i]) == last) row.ranks.push_back(rank_of(row.logits[i], static_cast<uint32_t>(i)));
  std::sort(row.ranks.begin(), row.ranks.end(), std::greater<>());
  for (const uint64_t rank : row.ranks) {
    count += 1;
    mass += row.weights[id_of_rank(rank)];
    if (count >= options.top_k || mass >= enough) return rank;
  }
  return 0;
}

// From row.logits, which are adjusted.
uint32_t draw(Row& row, const SlotOptions::Head& options, uint64_t position) {
  const uint64_t best = largest_rank(row.logits);
  if (options.greedy != 0) return id_of_rank(best);
  const float largest = logit_of_rank(best);
  uint64_t mass = fill_weights(row, largest, options.scale);
  const bool selects = options.top_k < row.logits.size() || options.top_p != 0;
  if (selects || options.min_weight > 0) {
    const uint64_t last = selects ? last_kept(row, largest, mass, options) : 0;
    mass = 0;
    for (size_t i = 0; i < row.weights.size(); ++i) {
      uint32_t& weight = row.weights[i];
      if (weight < options.min_weight || rank_of(row.logits[i], static_cast<uint32_t>(i)) < last) weight = 0;
      mass += weight;
    }
  }
  uint64_t left = drawn_from(mass, options.seed, position);
  uint32_t id = 0;
  while (left >= row.weights[id]) left -= row.weights[id++];
  return id;
}

// The most probable tokens into columns 1 to k. Returns what is to be subtracted from a logit.
double find_best(Row& row, int32_t k, int32_t* ids, float* log_probabilities) {
  const float largest = logit_of_rank(largest_rank(row.logits));
  const uint64_t mass = fill_weights(row, largest, kLog2E);
  const double subtract = static_cast<double>(largest) + std::log(static_cast<double>(mass) / kLargestWeight);
  row.ranks.resize(row.logits.size());
  for (size_t i = 0; i < row.ranks.size(); ++i) row.ranks[i] = rank_of(row.logits[i], static_cast<uint32_t>(i));
  const int64_t count = std::min<int64_t>(k, static_cast<int64_t>(row.ranks.size()));
  std::partial_sort(row.ranks.begin(), row.ranks.begin() + count, row.ranks.end(), std::greater<>());
  for (int64_t i = 0; i < count; ++i) {
    ids[1 + i] = static_cast<int32_t>(id_of_rank(row.ranks[i]));
    log_probabilities[1 + i] = static_cast<float>(static_cast<double>(logit_of_rank(row.ranks[i])) - subtract);
  }
  return subtract;
}

}  // namespace

int32_t cpu::choose_row(const float* logits, int64_t vocabulary, const SlotOptions& options, const SlotHistory& history,
                        uint64_t position) {
  Row& row = own_row();
  load(row.logits, logits, vocabulary);
  adjust(row.logits, options, history);
  return static_cast<int32_t>(draw(row, options.head, position));
}

void cpu::choose(const ChooseCall& call) {
  constexpr int64_t kColumns = 1 + kMostLogProbabilities;
  const SlotOptions greedy;
  const bool shared = call.rows * call.vocabulary * kNanosecondsPerLogit >= kElementsPerThread;
  parallel_for_if(shared, call.rows, [&](int64_t i) {
    const float* const logits = call.logits + i * call.stride;
    const SlotOptions& options = call.slots != nullptr ? call.options[call.slots[i]] : greedy;
    Row& row = own_row();
    const bool finite = load(row.logits, logits, call.vocabulary);
    double subtract = 0;
    if (call.best != nullptr) {
      std::fill_n(call.best + i * kColumns, kColumns, -1);
      std::fill_n(call.log_probabilities + i * kColumns, kColumns, 0.0f);
      if (options.head.log_probabilities >= 0)
        subtract = find_best(row, options.head.log_probabilities, call.best + i * kColumns,
                             call.log_probabilities + i * kColumns);
    }
    uint32_t id = 0;
    if (call.slots == nullptr) {
      id = id_of_rank(largest_rank(row.logits));
    } else {
      SlotHistory& history = call.histories[call.slots[i]];
      adjust(row.logits, options, history);
      id = finite ? draw(row, options.head, history.position) : id_of_rank(largest_rank(row.logits));
      history.token[history.position % kRepetitionWindow] = static_cast<int32_t>(id);
      history.position += 1;
    }
    call.ids[2 * i] = static_cast<int32_t>(id);
    call.ids[2 * i + 1] = finite ? 1 : 0;
    if (call.best != nullptr && options.head.log_probabilities >= 0) {
      call.best[i * kColumns] = static_cast<int32_t>(id);
      call.log_probabilities[i * kColumns] = static_cast<float>(static_cast<double>(usable(logits[id])) - subtract);
    }
  });
}

void cpu::set_options(Device, SlotOptions* to, const SlotOptions& options) {
  *to = options;
}

void cpu::append_tokens(Device, SlotHistory* to, const NewTokens& tokens) {
  if (tokens.restart != 0) {
    to->position = 0;
    std::fill_n(to->token, kRepetitionWindow, -1);
  }
  to->position += tokens.count;
  for (int32_t i = 0; i < tokens.given; ++i)
    to->token[(to->position - static_cast<uint64_t>(tokens.given - i)) % kRepetitionWindow] = tokens.token[i];
}

void cpu::copy_history(Device, SlotHistory* to, const SlotHistory* from) {
  *to = *from;
}

}  // namespace furious
