#include "ops/mixer/cpu/head_job.h"

#include <algorithm>

namespace furious::cpu {

float* state_of(const Tensor& state, int64_t batch, int64_t head) {
  return state ? state.data<float>() + batch * state.stride(0) + head * state.stride(1) : nullptr;
}

int64_t work_of(const MixerCall& call) {
  int64_t pairs = 0;
  for (const Segment& segment : call.segments)
    pairs += (segment.length() - call.shape.first_query) * std::min(segment.length(), call.chunk);
  return pairs * call.shape.heads * (call.shape.qk_dim + call.shape.v_dim);
}

HeadJob forward_job(const MixerCall& call, int64_t index) {
  const MixerShape& shape = call.shape;
  const Segment& segment = call.segments[index / shape.heads];
  const int64_t head = index % shape.heads;
  const auto rows = [&](const Tensor& tensor) {
    return HeadRows(tensor, segment.batch, segment.begin, head, shape.heads);
  };
  const auto per_token = [&](const Tensor& tensor) {
    return tensor ? tensor.data<float>() + (segment.batch * shape.heads + head) * shape.queries() + segment.begin
                  : nullptr;
  };
  HeadJob job;
  job.length = static_cast<size_t>(segment.length());
  job.chunk = static_cast<size_t>(std::min(call.chunk, segment.length()));
  job.first_query = static_cast<size_t>(shape.first_query);
  job.q = rows(call.inputs.q);
  job.k = rows(call.inputs.k);
  job.v = rows(call.inputs.v);
  job.out = rows(call.result.out);
  if (call.spec.decay) job.log_decay = rows(call.inputs.log_decay);
  job.normalizer = per_token(call.result.normalizer);
  job.maximum = per_token(call.result.maximum);
  if (segment.begin == 0) job.initial_state = state_of(call.inputs.initial_state, segment.batch, head);
  if (segment.end == shape.length) job.final_state = state_of(call.result.final_state, segment.batch, head);
  return job;
}

HeadJob backward_job(const MixerCall& call, int64_t index, const BackwardTensors& tensors) {
  const MixerShape& shape = call.shape;
  const Segment& segment = call.segments[index / shape.heads];
  const int64_t head = index % shape.heads;
  const auto rows = [&](const Tensor& tensor) {
    return HeadRows(tensor, segment.batch, segment.begin, head, shape.heads);
  };
  HeadJob job = forward_job(call, index);
  job.out_gradient = rows(tensors.out_gradient);
  job.dq = rows(tensors.gradients.q);
  job.dk = rows(tensors.gradients.k);
  job.dv = rows(tensors.gradients.v);
  if (call.spec.decay) {
    const Tensor& da = tensors.gradients.log_decay;
    job.log_decay_gradient =
        da.data<float>() + segment.batch * da.stride(0) + segment.begin * da.stride(1) + head * da.stride(2);
    job.log_decay_gradient_stride = da.stride(1);
  }
  if (segment.begin == 0) job.initial_state_gradient = state_of(tensors.gradients.initial_state, segment.batch, head);
  if (segment.end == shape.length)
    job.final_state_gradient = state_of(tensors.final_state_gradient, segment.batch, head);
  return job;
}

}  // namespace furious::cpu
