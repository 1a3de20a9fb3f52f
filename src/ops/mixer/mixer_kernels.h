// What mixer.cpp calls after all checks.
#pragma once

#include "ops/mixer/shape.h"

namespace furious {

// One call of the mixer, checked. It holds references: it lives no longer than the call.
struct MixerCall {
  const MixerSpec& spec;
  const MixerShape& shape;
  const MixerInputs& inputs;
  const std::vector<Segment>& segments;
  int64_t chunk;  // the whole length in the parallel form
  const MixerResult& result;
  MixerPrecision precision = MixerPrecision::automatic;  // of a GPU's products
  std::string_view* kernel = nullptr;                    // receives the name of the GPU kernels that ran forward
};

// A GPU computes f16 as f32 with products in TF32, which has as many bits of a mantissa and does not overflow; as bf16
// with precision bf16. These are the dtype and the options that it then computes with.
DType computed_dtype(const MixerOptions& options);
MixerOptions computed_options(MixerOptions options, const MixerShape& shape, Device device);

}  // namespace furious

namespace furious::cpu {

void mixer_forward(const MixerCall& call);
// Gradients of q, k and v with fewer heads than the call are sums over the heads they serve.
void mixer_backward(const MixerCall& call, const Tensor& out_gradient, const Tensor& final_state_gradient,
                    const MixerGradients& gradients);

}  // namespace furious::cpu

namespace furious::cuda {

// Whether f32 inputs of this shape can be computed in other precisions than f32.
bool has_tiles(const MixerShape& shape, Device device);

// The faster form for a call without states.
Form choose_form(const MixerCall& call);

// Says once per process and cause why a large call does not run the fast kernels, and what would. mixer_forward() below
// calls it; f16 inputs, which never get there, are for the caller.
void warn_where_slow(const MixerCall& call);

// Returns the states of the chunks, where the backward pass can use them again.
Tensor mixer_forward(const MixerCall& call);
void mixer_backward(const MixerCall& call, const Tensor& out_gradient, const Tensor& final_state_gradient,
                    const MixerGradients& gradients);

}  // namespace furious::cuda
