// The kernels behind MixerCache. `window` is what the cache keeps token by token, `state` the packed state of each head
// ([batch, heads, head_state_numbers]), or not there before the first fold.
#pragma once

#include "ops/mixer/recurrent.h"

namespace furious {

// Tokens of the window that a step takes at a time. What it launches depends on how many times it does so.
inline constexpr int64_t kStepTokens = 2 * CachePage::kTokens;

namespace cpu {

// f32 numbers that the packed state of one head takes.
int64_t head_state_numbers(const MixerShape& shape);

// To be called when pages came or went, or when `pending` or `tokens` was set: a GPU keeps a record of them.
inline void cache_window_changed(Device, const MixerShape&, CacheWindow&) {}
// To be called when log_decay of the pending tokens was written from outside: a GPU keeps its sums.
inline void cache_sum_decay(const MixerShape&, const CacheWindow&) {}

// Puts tokens [batch, tokens, heads, dim] behind the pending ones, in pages that are there.
void cache_append(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay);
// The same for one token [batch, heads, dim]; out = the mixer's output for it, given its q. `early`: a GPU may begin
// with it before the kernel ahead has ended (tensor/launch.cuh); that kernel must not have changed the cache.
void cache_step(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& state,
                const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& out,
                bool early);
// state = decayed state + all pending tokens.
void cache_fold(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& state);
// Between the packed state and the public layout [batch, heads, D, columns].
void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state);
void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to);

}  // namespace cpu

namespace cuda {

int64_t head_state_numbers(const MixerShape& shape);
void cache_window_changed(Device device, const MixerShape& shape, CacheWindow& window);
void cache_sum_decay(const MixerShape& shape, const CacheWindow& window);
void cache_append(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay);
void cache_step(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& state,
                const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& out,
                bool early);
void cache_fold(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& state);
void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state);
void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to);

}  // namespace cuda
}  // namespace furious
