// What the CPU forms share outside of vector code: scratch memory, the job of one head, and the entry points that
// mixer.cpp calls after all checks.
#pragma once

#include <cstring>

#include "ops/mixer/shape.h"

namespace furious::cpu {

// f32 scratch from the arena; a request of a steady-state step never reaches the system.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(size_t count) : memory_(Tensor::empty({static_cast<int64_t>(count)}, DType::f32)) {}
  static Scratch zeros(size_t count) {
    Scratch scratch(count);
    std::memset(scratch.data(), 0, count * sizeof(float));
    return scratch;
  }
  float* data() const { return memory_ ? memory_.data<float>() : nullptr; }
  explicit operator bool() const { return memory_.defined(); }

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

void mixer_forward(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                   const std::vector<Segment>& segments, int64_t chunk, const MixerResult& result);

void mixer_backward(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                    const std::vector<Segment>& segments, int64_t chunk, const MixerResult& result,
                    const Tensor& out_gradient, const Tensor& final_state_gradient, const MixerGradients& gradients);

}  // namespace furious::cpu
