// The chunked form of linear scores on tensor cores: a block walks over the chunks of a head with the state in its
// registers, so that every token is read once.
#pragma once

#include "ops/mixer/gpu/mixer_cuda.h"

namespace furious::cuda {

inline constexpr int64_t kLargestWalkDim = 128;

// bf16, linear scores without a normalizer, dimensions that are multiples of 8 up to kLargestWalkDim; unless
// forced, values of at most 64.
bool walk_supports(const MixerCall& call);
// Returns the states that enter the segments of the heads, for the backward pass (MixerResult::states); undefined where
// heads are not divided.
Tensor walk_forward(const MixerCall& call, const TokenTables& tokens);
// Writes the gradients of every head and that of an initial state. A gradient of the final state is not supported.
void walk_backward(const MixerCall& call, const TokenTables& tokens, const Tensor& out_gradient,
                   const HeadGradients& gradients, const Tensor& initial_state_gradient);

}  // namespace furious::cuda
