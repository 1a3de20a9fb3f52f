// The CPU kernels behind MixerCache.
#pragma once

#include "ops/mixer/recurrent.h"

namespace furious::cpu {

// f32 numbers that the packed state of one head takes.
int64_t head_state_numbers(const MixerShape& shape);

// out = the mixer's output for the last of `pending` tokens in the pages, given its q.
void cache_read(const MixerSpec& spec, const MixerShape& shape, const std::vector<CachePage>& pages, int64_t pending,
                const Tensor& state, const Tensor& q, const Tensor& out);
// state = decayed state + all pending tokens.
void cache_fold(const MixerSpec& spec, const MixerShape& shape, const std::vector<CachePage>& pages, int64_t pending,
                const Tensor& state);
// Between the packed state and the public layout [batch, heads, D, columns].
void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state);
void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to);

}  // namespace furious::cpu
