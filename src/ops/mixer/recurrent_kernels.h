// The kernels behind MixerCache. A shape here is that of one token of one sequence (batch 1).
#pragma once

#include <span>

#include "ops/mixer/recurrent.h"

namespace furious {

// Tokens of the window that a step takes at a time. What it launches depends on how many times it does so.
inline constexpr int64_t kStepTokens = 2 * CachePage::kTokens;

// Where the parts of a page begin, in bytes: k comes first.
struct PageLayout {
  int64_t v = 0, log_decay = 0, total = 0, bytes = 0;

  PageLayout(const MixerShape& shape, bool decay, DType dtype, bool totals) {
    const auto number = static_cast<int64_t>(size_of(dtype));
    v = CachePage::kTokens * shape.k_heads * shape.qk_dim * number;
    log_decay = v + CachePage::kTokens * shape.v_heads * shape.v_dim * number;
    total = log_decay + (decay ? CachePage::kTokens * shape.decay_heads * 4 : 0);
    bytes = total + (decay && totals ? CachePage::kTokens * shape.decay_heads * 8 : 0);
  }
};

// One of several folds: state = decayed state + all pending tokens of the slot. The state need not be the slot's own.
struct CacheFold {
  const CacheSlot* slot;
  Tensor state;
};

// A pending token of a slot, as the kernels of the CPU take it.
struct CachedToken {
  const CacheSlot* slot;
  int64_t pending;  // with this token
};

namespace cpu {

// f32 numbers that one packed state takes.
int64_t head_state_numbers(const MixerShape& shape);

// What a GPU knows of the slots, which are empty.
inline CacheRecords new_records(const MixerShape&, int64_t, Device) {
  return {};
}
// To be called when the host has changed anything of these slots but by counting a step's tokens.
inline void cache_slots_changed(const CacheRecords&, std::vector<CacheSlot>&, std::span<const int32_t>) {}
// To be called when log_decay of the pending tokens was written from outside: a GPU keeps its sums.
inline void cache_sum_decay(const MixerSpec&, const MixerShape&, const CacheSlot&) {}

// Puts tokens [1, tokens, heads, dim] behind the pending ones, in pages that exist.
void cache_append(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay);
// Puts one token of each row, [rows, heads, dim], into the row's slot; out = the mixer's output for it, given its q.
// `early`: a GPU may begin with it before the kernel ahead has ended (gpu/launch.cuh); that kernel must not have
// changed these slots.
void cache_step(const MixerSpec& spec, const MixerShape& shape, const CacheRecords& records,
                const std::vector<CacheSlot>& slots, const SlotRows& rows, const Tensor& q, const Tensor& k,
                const Tensor& v, const Tensor& log_decay, const Tensor& out, bool early);
// The output [1, queries, heads, v_dim] of the last pending tokens, given their q [1, queries, q_heads, qk_dim], read
// from the pages.
void cache_read(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& q,
                const Tensor& out);
// Copies the pending tokens of a slot to [1, pending, heads, dim] and, with decay, [1, pending, heads].
void cache_gather(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay);
void cache_fold(const MixerSpec& spec, const MixerShape& shape, std::span<const CacheFold> folds);
// Between the packed state [state_heads, head_state_numbers] and the public layout [1, state_heads, D, columns].
void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state);
void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to);

}  // namespace cpu

namespace cuda {

int64_t head_state_numbers(const MixerShape& shape);
CacheRecords new_records(const MixerShape& shape, int64_t slots, Device device);
void cache_slots_changed(const CacheRecords& records, std::vector<CacheSlot>& slots, std::span<const int32_t> changed);
void cache_sum_decay(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot);
void cache_append(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay);
void cache_step(const MixerSpec& spec, const MixerShape& shape, const CacheRecords& records,
                const std::vector<CacheSlot>& slots, const SlotRows& rows, const Tensor& q, const Tensor& k,
                const Tensor& v, const Tensor& log_decay, const Tensor& out, bool early);
void cache_gather(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay);
void cache_fold(const MixerSpec& spec, const MixerShape& shape, std::span<const CacheFold> folds);
void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state);
void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to);

}  // namespace cuda
}  // namespace furious
