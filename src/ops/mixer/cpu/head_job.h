// What the CPU forms share outside of vector code: scratch memory, and the work of a call as one job for each document
// and head.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/parallel.h"
#include "base/subnormals.h"
#include "ops/mixer/mixer_kernels.h"

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

// One document of one head: rows of a tensor [batch, length, heads, dim], `stride` elements apart, or f32 rows in
// pages.
struct HeadRows {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;
  const float* const* pages =
      nullptr;  // where the rows of each page begin, `page_offset` elements before those of this head
  int64_t page_rows = 0, page_offset = 0;

  HeadRows() = default;
  // Tokens from `begin` of row `batch`, in the head of `tensor` that serves head `head` of `heads`.
  HeadRows(const Tensor& tensor, int64_t batch, int64_t begin, int64_t head, int64_t heads)
      : dtype(tensor.dtype()), stride(tensor.stride(1)) {
    const int64_t own = head / (heads / tensor.size(2));
    const int64_t offset = batch * tensor.stride(0) + begin * stride + own * tensor.stride(2);
    data = static_cast<std::byte*>(tensor.raw()) + offset * static_cast<int64_t>(size_of(dtype));
  }

  template <class T>
  const T* row(size_t index) const {
    if constexpr (std::is_same_v<T, float>)
      if (pages != nullptr) {
        const auto at = static_cast<int64_t>(index);
        return pages[at / page_rows] + page_offset + at % page_rows * stride;
      }
    return static_cast<const T*>(data) + static_cast<int64_t>(index) * stride;
  }
};

// The numbers of one sequence and head in a tensor [batch, heads, ...]; null for an undefined tensor.
float* state_of(const Tensor& state, int64_t batch, int64_t head);

// One document of one head. What is optional and missing is null.
struct HeadJob {
  size_t length = 0, chunk = 0;
  size_t first_query = 0;  // q, out, normalizer and maximum have only the rows from this one on
  HeadRows q, k, v, out;
  HeadRows log_decay;  // f32
  float* normalizer = nullptr;
  float* maximum = nullptr;
  const float* initial_state = nullptr;
  float* final_state = nullptr;

  // Backward.
  HeadRows out_gradient, dq, dk, dv;
  float* log_decay_gradient = nullptr;
  int64_t log_decay_gradient_stride = 0;
  const float* final_state_gradient = nullptr;
  float* initial_state_gradient = nullptr;
};

struct BackwardTensors {
  Tensor out_gradient, final_state_gradient;
  MixerGradients gradients;  // q, k and v with a head for every head of the call
};

// The jobs of a call, and the least multiplications that all of them together take: those of the quadratic part.
inline int64_t job_count(const MixerCall& call) {
  return static_cast<int64_t>(call.segments.size()) * call.shape.heads;
}
int64_t work_of(const MixerCall& call);
HeadJob forward_job(const MixerCall& call, int64_t index);
HeadJob backward_job(const MixerCall& call, int64_t index, const BackwardTensors& tensors);

// Runs body(head) for every head, of every document too: side by side when there are enough multiplications to do and
// enough heads to fill the threads, or more of them than `parts` that a head alone could be shared out in; else one
// after another, each with all threads inside.
template <class Body>
void for_each_head(int64_t heads, int64_t parts, int64_t work, Body&& body) {
  const auto flushed = [&](int64_t i) {
    const FlushSubnormals flush;
    body(i);
  };
  constexpr int64_t kWorthThreads = 2 << 20;  // some tens of microseconds
  if ((heads >= threads() || heads > parts) && work > kWorthThreads) {
    parallel_for(heads, flushed);
  } else {
    for (int64_t i = 0; i < heads; ++i) flushed(i);
  }
}

template <class Body>
void for_each_job(const MixerCall& call, Body&& body) {
  constexpr int64_t kPart = 192;  // queries (kBlock in scores-inl.h)
  int64_t parts = 1;
  for (const Segment& segment : call.segments)
    parts = std::max(parts, (segment.length() - call.shape.first_query + kPart - 1) / kPart);
  for_each_head(job_count(call), parts, work_of(call), body);
}

}  // namespace furious::cpu
