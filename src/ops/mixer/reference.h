// The oracle: the mixer and its gradients by the formulas, in double precision and plain loops. Slow on purpose.
#pragma once

#include "ops/mixer/shape.h"

namespace furious::reference {

void mixer_forward(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                   const std::vector<Segment>& segments, const MixerResult& result);

void mixer_backward(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                    const std::vector<Segment>& segments, const Tensor& out_gradient,
                    const Tensor& final_state_gradient, const MixerGradients& gradients);

}  // namespace furious::reference
