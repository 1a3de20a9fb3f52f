// The states of the chunked form on tensor cores of compute capability 8.0 and later: bf16, linear and squared scores,
// dimensions of queries, keys and values that are multiples of 8 up to 256, chunks of any length.
#pragma once

#include "ops/mixer/gpu/mixer_cuda.h"

namespace furious::cuda {

inline constexpr int64_t kLargestStateDim = 256;

bool chunk_states_support(const MixerCall& call);

// What the states before the chunks give to their tokens.
struct Past {
  Tensor columns;             // as simple_forward() and tiles_forward() take it; undefined where nothing comes in
  Tensor values, normalizer;  // as inside_chunks_forward() takes it
};
// `hopper`: for inside_chunks_forward(). Writes the final state if the call requests one.
Past chunk_states_past(const MixerCall& call, const ChunkTables& tables, bool hopper);

// Adds to the gradients what goes through the states, and writes the gradient of an initial state; the part of the
// decay of a final state excepted.
void chunk_states_backward(const MixerCall& call, const ChunkTables& tables, const Tensor& out_gradient,
                           const Tensor& final_state_gradient, const HeadGradients& gradients,
                           const Tensor& initial_state_gradient);

}  // namespace furious::cuda
