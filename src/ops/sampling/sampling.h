// Choosing the next token of sequences from their logits, on the device that has them (furious/model.h has the
// options). For every row, in f32:
//
//   l_i = logit_i + bias_i
//   l_i ← l_i / repetition if l_i > 0, else l_i · repetition      if i is among the last kRepetitionWindow tokens
//   l_i ← l_i − frequency · count_i − presence                    if i is among them
//   w_i = round(2^30 · exp((l_i − max l) / temperature))          an integer
//   kept: the k largest l_i; the fewest largest l_i with Σ w ≥ top_p · Σ of all w; all w_i ≥ min_p · max w
//   the token is drawn from those kept with probability w_i / Σ_kept w_j
//
// It is drawn by rejection, without sorting: a round draws two tokens from all with w_i ≥ min_p · max w, each the first
// i with Σ_{j ≤ i} w_j > ⌊u · Σ w_j⌋, u uniform in [0, 1) from (seed, position, round, trial). The first of them that
// top-k and top-p keep is chosen; a token is kept if fewer than k tokens are larger, and if the sum of their w_j is
// less than top_p · Σ of all w. If neither is kept, the next round draws from what is larger than both, and larger than
// a pivot that is not kept.
//
// Of equal l_i the smaller id counts as the larger. With temperature 0 the token is the largest l_i. Overflow of l_i
// ends at the largest f32, a subnormal logit counts as zero.
//
// A CPU and a GPU choose the same token from the same logits: l_i and w_i are made of operations that IEEE 754 defines
// to the last bit (ops/sampling/weights.h), and sums of integers do not depend on their order.
//
// Log-probabilities are those of the logits as they came: before bias, penalties and temperature. They may differ in
// the last bits between devices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "furious/model.h"
#include "ops/slots.h"
#include "tensor/tensor.h"

namespace furious {

inline constexpr int64_t kRepetitionWindow = 256;
inline constexpr int64_t kMostLogitBiases = 300;
inline constexpr int64_t kMostLogProbabilities = 20;
inline constexpr int64_t kLargestSampledVocabulary = 1 << 18;

// Throws an Error that names the option.
void check_sampling(const Sampling& sampling);

// What choose() found for n rows, on its device.
struct Choice {
  Tensor ids;  // i32 [n, 2]: an id, which is one of the vocabulary whatever the logits are; 1 if all are finite, else 0
  // Undefined if no slot of the rows asked for log-probabilities. Column 0 is of the chosen token, columns 1 to k are
  // of the k most probable ones, in order; what was not asked for has id -1 and a log-probability of 0.
  Tensor best;               // i32 [n, 1 + kMostLogProbabilities]
  Tensor log_probabilities;  // f32 [n, 1 + kMostLogProbabilities]
};

// An Error if a row of `ids` (on the CPU) had a logit that is not finite.
void require_finite_logits(const Tensor& ids);

// The options, recent tokens and positions of `slots` sequences, on a device. Nothing but contents() waits for the
// device: calls take effect in the order of the device's work.
class Sampler {
 public:
  // vocabulary: the ids that may be chosen. Logits may have more columns.
  Sampler(int64_t slots, int64_t vocabulary, Device device);

  int64_t slots() const { return static_cast<int64_t>(log_probabilities_.size()); }
  int64_t vocabulary() const { return vocabulary_; }

  void set(int64_t slot, const Sampling& sampling);
  void clear(int64_t slot);  // no tokens; the options stay
  void read(int64_t slot, std::span<const int32_t> tokens);
  void copy(int64_t from, int64_t to);  // tokens and position, not the options

  struct Contents {
    uint64_t position = 0;         // number of tokens of the sequence
    std::vector<int32_t> history;  // the last ones of them, at most kRepetitionWindow
  };
  Contents contents(int64_t slot) const;
  void restore(int64_t slot, const Contents& contents);

  // Chooses a token for every row of logits f32 [n, columns], whose rows are contiguous and may lie apart, and appends
  // it to the slot of the row. It can be recorded in a graph: recorded again when wants_log_probabilities() changes.
  Choice choose(const Tensor& logits, const SlotRows& rows);
  bool wants_log_probabilities(const SlotRows& rows) const;

  // On a GPU: so many blocks for a row, 1, 2, 4 or 8 (more than 1 only on Hopper); 0, the default: by the sizes.
  void set_blocks_per_row(int blocks);

 private:
  void check_slot(int64_t slot, const char* what) const;

  int64_t vocabulary_ = 0;
  int blocks_per_row_ = 0;
  Tensor options_, histories_;  // i32 [slots, ...]: SlotOptions and SlotHistory of every slot
  std::vector<int> log_probabilities_;
};

}  // namespace furious
