#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "ops/sampling/sampling_kernels.h"
#include "ops/sampling/weights.h"

namespace furious {
namespace {

using namespace sampling;

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

uint64_t rank_in(const Row& row, size_t i) {
  return rank_of(row.logits[i], static_cast<uint32_t>(i));
}

// The first token whose weights, with those before it, are more than `wanted`.
size_t find(const Row& row, uint64_t wanted) {
  size_t i = 0;
  while (wanted >= row.weights[i]) wanted -= row.weights[i++];
  return i;
}

struct Above {
  uint64_t count = 0, mass = 0;
};
Above tokens_above(const Row& row, uint64_t rank) {
  const float logit = logit_of_rank(rank);
  Above above;
  for (size_t i = 0; i < row.logits.size(); ++i) {
    const bool is_above = row.logits[i] > logit || (row.logits[i] == logit && i < id_of_rank(rank));
    above.count += is_above ? 1 : 0;
    above.mass += is_above ? row.weights[i] : 0;
  }
  return above;
}

// From row.logits, which are adjusted.
uint32_t draw(Row& row, const SlotOptions::Head& options, uint64_t position) {
  const uint64_t best = largest_rank(row.logits);
  if (options.greedy != 0) return id_of_rank(best);
  const uint64_t all = fill_weights(row, logit_of_rank(best), options.scale);
  uint64_t mass = all;
  if (options.min_weight > 0) {
    mass = 0;
    for (uint32_t& weight : row.weights) mass += weight = weight < options.min_weight ? 0 : weight;
  }
  const bool selects = options.top_k != UINT32_MAX || options.top_p != 0;
  const uint64_t enough = enough_of(all, options.top_p);
  for (int round = 0;; ++round) {
    uint64_t floor = 0;
    size_t drawn[kTrials];
    for (int t = 0; t < kTrials; ++t) drawn[t] = find(row, drawn_from(mass, options.seed, position, round, t));
    if (!selects) return static_cast<uint32_t>(drawn[0]);
    for (const size_t i : drawn) {
      const Above above = tokens_above(row, rank_in(row, i));
      if (above.count < options.top_k && above.mass < enough) return static_cast<uint32_t>(i);
      if (rank_in(row, i) < floor) continue;
      floor = rank_in(row, i);
      mass = above.mass;
    }
    for (size_t i = 0; i < row.weights.size(); ++i)
      if (rank_in(row, i) <= floor) row.weights[i] = 0;
  }
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

void cpu::choose(const ChooseCall& call) {
  constexpr int64_t kColumns = 1 + kMostLogProbabilities;
  const bool shared = call.rows * call.vocabulary * kNanosecondsPerLogit >= kElementsPerThread;
  parallel_for_if(shared, call.rows, [&](int64_t i) {
    const float* const logits = call.logits + i * call.stride;
    const SlotOptions& options = call.options[call.slots[i]];
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
    SlotHistory& history = call.histories[call.slots[i]];
    adjust(row.logits, options, history);
    const uint32_t id = finite ? draw(row, options.head, history.position) : id_of_rank(largest_rank(row.logits));
    history.token[history.position % kRepetitionWindow] = static_cast<int32_t>(id);
    history.position += 1;
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
