// What a form costs, counted: the ground on which `automatic` chooses and `furious bench` states its floor.
#pragma once

#include "ops/mixer/shape.h"

namespace furious {

enum class Pass : uint8_t { forward, backward };

// Floating-point operations of one pass, counting only (i, j) with j ≤ i.
double parallel_flops(const MixerShape& shape, const std::vector<Segment>& segments, Pass pass);
double chunked_flops(const MixerShape& shape, const std::vector<Segment>& segments, int64_t chunk, Pass pass);

// The chunk that suits a state of these dimensions on a device.
int64_t default_chunk(const MixerSpec& spec, int64_t qk_dim, int64_t v_dim, Device device = {},
                      DType dtype = DType::f32);

// Where Hopper has kernels for states (ops/mixer/gpu/states.h): the longest text for which the parallel form is faster.
int64_t longest_parallel(const MixerSpec& spec, int64_t qk_dim, int64_t v_dim);
// Bytes of states, for one head of one sequence, in longer texts: those that a forward pass keeps for the backward
// pass, and those that are in memory while the mixer computes its backward pass.
struct StateBytes {
  int64_t kept, working;
};
StateBytes state_bytes(const MixerSpec& spec, int64_t qk_dim, int64_t v_dim, int64_t length, Device device,
                       DType dtype);
// Whether such states are small beside the tokens of a chunk, so that they are kept; others are computed again. Those
// of narrow heads are padded.
bool states_are_kept(const MixerSpec& spec, int64_t qk_dim);

// Parallel or chunked, whichever is estimated to take less time on the CPU. Looks at the decays: tiles that decay has
// erased cost the parallel form nothing.
Form choose_form(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                 const std::vector<Segment>& segments, int64_t chunk);

}  // namespace furious
