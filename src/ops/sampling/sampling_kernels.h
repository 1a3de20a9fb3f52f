// What the kernels of ops/sampling/sampling.h work on.
#pragma once

#include "ops/sampling/sampling.h"

namespace furious {

// The options of a slot as kernels read them, sent to a GPU as an argument of a kernel.
struct SlotOptions {
  struct Head {
    uint64_t seed = 0;
    uint64_t top_p = 0;           // times 2^64; 0: all
    uint32_t top_k = UINT32_MAX;  // UINT32_MAX: all
    uint32_t min_weight = 0;
    float scale = 0;  // log2(e) / temperature
    float repetition = 1, frequency = 0, presence = 0;
    int32_t greedy = 1, penalties = 0;  // 0 or 1
    int32_t log_probabilities = -1;
    int32_t biases = 0;
  } head;
  int32_t bias_id[kMostLogitBiases] = {};
  float bias[kMostLogitBiases] = {};
};
static_assert(sizeof(SlotOptions) <= 4000 && sizeof(SlotOptions) % sizeof(uint64_t) == 0);

struct SlotHistory {
  uint64_t position = 0;
  int32_t token[kRepetitionWindow];  // number p of the sequence at p % kRepetitionWindow; -1: none
};

// Tokens to append to a history, or to put in place of it.
struct NewTokens {
  uint64_t count = 0;  // all, of which the last ones are given
  int32_t given = 0;
  int32_t restart = 0;  // 1: in place of the tokens of before
  int32_t token[kRepetitionWindow];
};

SlotOptions slot_options(const Sampling& sampling, int64_t vocabulary);

struct ChooseCall {
  const float* logits;
  int64_t stride, rows, vocabulary;
  const int32_t* slots;        // of the rows
  const SlotOptions* options;  // of all slots, as are the histories
  SlotHistory* histories;
  int32_t* ids;              // [rows, 2]
  int32_t* best;             // [rows, 1 + kMostLogProbabilities], or null
  float* log_probabilities;  // likewise
  Device device;
  int blocks;  // for a row on a GPU; 0: by the sizes
};

namespace cpu {
void choose(const ChooseCall& call);
void set_options(Device device, SlotOptions* to, const SlotOptions& options);
void append_tokens(Device device, SlotHistory* to, const NewTokens& tokens);
void copy_history(Device device, SlotHistory* to, const SlotHistory* from);
}  // namespace cpu
namespace cuda {
void choose(const ChooseCall& call);
void set_options(Device device, SlotOptions* to, const SlotOptions& options);
void append_tokens(Device device, SlotHistory* to, const NewTokens& tokens);
void copy_history(Device device, SlotHistory* to, const SlotHistory* from);
}  // namespace cuda

}  // namespace furious
