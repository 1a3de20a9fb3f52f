// What the CPU forms share outside of vector code: scratch memory, the job of one head, and the entry points that
// mixer.cpp calls after all checks.
#pragma once

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "base/subnormals.h"
#include "ops/mixer/shape.h"

namespace furious::cpu {

// Scratch from the arena; a request of a steady-state step never reaches the system.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(size_t count) : memory_(Tensor::empty({static_cast<int64_t>(count)}, DTypeOf<T>::value)) {}
  static Scratch zeros(size_t count) {
    Scratch scratch(count);
    std::memset(scratch.data(), 0, count * sizeof(T));
    return scratch;
  }
  T* data() const { return memory_ ? memory_.data<T>() : nullptr; }

 private:
  Tensor memory_;
};

// One document of one head: rows of a tensor [batch, length, heads, dim], `stride` elements apart.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;

  Rows() = default;
  // Tokens from `begin` of row `batch`, in the head of `tensor` that serves head `head` of `heads`.
  Rows(const Tensor& tensor, int64_t batch, int64_t begin, int64_t head, int64_t heads)
      : dtype(tensor.dtype()), stride(tensor.stride(1)) {
    const int64_t own = head / (heads / tensor.size(2));
    const int64_t offset = batch * tensor.stride(0) + begin * stride + own * tensor.stride(2);
    data = static_cast<std::byte*>(tensor.raw()) + offset * static_cast<int64_t>(size_of(dtype));
  }
};

// The numbers of one sequence and head in a tensor [batch, heads, ...]; null for a tensor that is not there.
float* state_of(const Tensor& state, int64_t batch, int64_t head);

// All there is to know about one document of one head. What is optional and not there is null.
struct HeadJob {
  size_t length = 0, chunk = 0;
  Rows q, k, v, out;
  const float* log_decay = nullptr;
  int64_t log_decay_stride = 0;
  float* normalizer = nullptr;
  float* maximum = nullptr;
  const float* initial_state = nullptr;
  float* final_state = nullptr;

  // Backward.
  Rows out_gradient, dq, dk, dv;
  float* log_decay_gradient = nullptr;
  int64_t log_decay_gradient_stride = 0;
  const float* final_state_gradient = nullptr;
  float* initial_state_gradient = nullptr;
};

struct BackwardTensors {
  Tensor out_gradient, final_state_gradient;
  MixerGradients gradients;  // q, k and v with a head for every head of the call
};

// The tensors of a call, and the job of each document and head in them.
struct MixerCall {
  const MixerSpec& spec;
  const MixerShape& shape;
  const MixerInputs& inputs;
  const std::vector<Segment>& segments;
  int64_t chunk;
  const MixerResult& result;

  int64_t jobs() const { return static_cast<int64_t>(segments.size()) * shape.heads; }
  // Multiplications of the quadratic part, the least that all jobs together take.
  int64_t work() const {
    int64_t pairs = 0;
    for (const Segment& segment : segments) pairs += segment.length() * std::min(segment.length(), chunk);
    return pairs * shape.heads * (shape.qk_dim + shape.v_dim);
  }
  HeadJob forward_job(int64_t index) const;
  HeadJob backward_job(int64_t index, const BackwardTensors& tensors) const;
};

void mixer_forward(const MixerCall& call);
// Gradients of q, k and v with fewer heads than the call are sums over the heads they serve.
void mixer_backward(const MixerCall& call, const Tensor& out_gradient, const Tensor& final_state_gradient,
                    const MixerGradients& gradients);

// Runs body(job) for every job: side by side when there are enough to fill the threads and enough to do, else one after
// another, each with all threads inside.
template <class Body>
void for_each_job(const MixerCall& call, Body&& body) {
  const auto flushed = [&](int64_t i) {
    const FlushSubnormals flush;
    body(i);
  };
  constexpr int64_t kWorthThreads = 2 << 20;  // some tens of microseconds
  if (call.jobs() >= threads() && call.work() > kWorthThreads) {
    parallel_for(call.jobs(), flushed);
  } else {
    for (int64_t i = 0; i < call.jobs(); ++i) flushed(i);
  }
}

}  // namespace furious::cpu
