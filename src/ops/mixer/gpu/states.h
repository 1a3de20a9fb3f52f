// The states of the chunked form on Hopper: bf16, squared scores (heads of up to 128; values of up to 64 where queries
// have as many) and linear ones without a normalizer (up to 256); every chunk of every head at once.
#pragma once

#include "ops/mixer/gpu/mixer_cuda.h"

namespace furious::cuda {

// Chunks of a multiple of 256 tokens.
bool states_support(const MixerCall& call);

// The state before each chunk: bf16 [batch, heads, chunks, tiles, 64, 64], in the layout of states.cuh. A final state
// is written if the call requests one. That before the first chunk of a call without an initial state is not written.
Tensor chunk_states(const MixerCall& call, const ChunkTables& tables);

// past: [batch, length, heads, v_dim], what the states give to each token; under the sum norm divided by past_n, f32
// [batch, heads, length], their part of the normalizer.
void read_states(const MixerCall& call, const ChunkTables& tables, const Tensor& states, const Tensor& past,
                 const Tensor& past_n);

// Writes the part of the gradients that goes through the states, and the gradient of an initial state.
void state_gradients(const MixerCall& call, const ChunkTables& tables, const Tensor& states,
                     const ScaledGradient& scaled, const HeadGradients& gradients,
                     const Tensor& initial_state_gradient);

}  // namespace furious::cuda
