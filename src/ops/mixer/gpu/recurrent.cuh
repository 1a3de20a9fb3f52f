// What the kernels of a MixerCache share.
//
// The packed state of a head: D rows of v_dim values, padded to whole 16-byte vectors, then the normalizer's column.
// A row is contiguous over the values, so that a warp reads whole lines, whatever part of the rows is its own; the
// normalizer's column apart keeps the rows aligned.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>

#include "ops/mixer/features.h"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/recurrent_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {

inline constexpr int kPageTokens = static_cast<int>(CachePage::kTokens);

// kPageTokens tokens of one slot, in one piece of memory: k [k_heads, kPageTokens, qk_dim], v [v_heads, kPageTokens,
// v_dim] and, with decay, log_decay [decay_heads, kPageTokens] f32 and f64 sums of log_decay from the first pending
// token up to each. A Cache knows where each begins.
struct Page {
  char* memory;
};

// What the kernels know of a slot. They find it through the rows of a step: row i belongs to slots[rows[i]], so that
// the same launch serves other slots, and the same slots with more tokens, when the numbers here and there change.
struct alignas(16) SlotRecord {
  const Page* pages;
  float* state;  // [state_heads, state_numbers]; null before the first fold
  int32_t pending, tokens;
  int32_t unused[2];
};
static_assert(sizeof(SlotRecord) == 32 && offsetof(SlotRecord, tokens) == 4 * CacheRecords::kTokensWord);

// In two loads, past the first-level cache: an earlier kernel may have changed it.
__device__ inline SlotRecord load_slot(const SlotRecord* from) {
  SlotRecord slot;
  const uint4 *words = reinterpret_cast<const uint4*>(from), first = __ldcg(words), second = __ldcg(words + 1);
  slot.pages = reinterpret_cast<const Page*>(static_cast<uint64_t>(first.y) << 32 | first.x);
  slot.state = reinterpret_cast<float*>(static_cast<uint64_t>(first.w) << 32 | first.z);
  slot.pending = static_cast<int32_t>(second.x);
  slot.tokens = static_cast<int32_t>(second.y);
  return slot;
}

__host__ __device__ inline int padded(int64_t dim) {
  return static_cast<int>((dim + 3) / 4 * 4);
}

// Squares and exponentials sum to a negative n by rounding only.
__device__ inline float normalized(Score score, float y, float n) {
  const float size = score == Score::squared || score == Score::exponential ? n : fabsf(n);
  return size < kSmallestNormalizer ? 0.0f : y / n;
}

// The sizes of a cache, and where its slots are.
struct Cache {
  Score score;
  bool decay, sum;
  int heads, k_heads, v_heads, decay_heads, state_heads, qk_dim, v_dim, state_rows;
  int window;                             // sliding; 0: none
  int state_numbers;                      // of one packed state
  int v_begin, decay_begin, total_begin;  // bytes from the begin of a page
  FeatureMap features;
  float scale;
  SlotRecord* slots;

  __device__ int k_head(int head) const { return head / (heads / k_heads); }
  __device__ int v_head(int head) const { return head / (heads / v_heads); }
  __device__ int decay_head(int head) const { return head / (heads / decay_heads); }
  __device__ int state_head(int head) const { return head / (heads / state_heads); }
  // Where the state of a head begins.
  __device__ float* state_of(float* states, int head) const {
    return states + static_cast<int64_t>(state_head(head)) * state_numbers;
  }
  // Rows of one token, in the page that holds it.
  template <class T>
  __device__ T* k_row(Page page, int head, int token) const {
    return reinterpret_cast<T*>(page.memory) + (k_head(head) * kPageTokens + token % kPageTokens) * qk_dim;
  }
  template <class T>
  __device__ T* v_row(Page page, int head, int token) const {
    return reinterpret_cast<T*>(page.memory + v_begin) + (v_head(head) * kPageTokens + token % kPageTokens) * v_dim;
  }
  __device__ float* log_decay(Page page, int head, int token) const {
    return reinterpret_cast<float*>(page.memory + decay_begin) + decay_head(head) * kPageTokens + token % kPageTokens;
  }
  __device__ double* total(Page page, int head, int token) const {
    return reinterpret_cast<double*>(page.memory + total_begin) + decay_head(head) * kPageTokens + token % kPageTokens;
  }
  __device__ double total_until(const Page* pages, int head, int token) const {
    return __ldcg(total(pages[token / kPageTokens], head, token));
  }
};

// `dtype` is that of k and v in the pages.
inline Cache cache_of(const MixerSpec& spec, const MixerShape& shape, DType dtype, const CacheRecords& records = {}) {
  const PageLayout layout(shape, spec.decay, dtype, true);
  return {spec.score,
          spec.decay,
          spec.norm == Norm::sum,
          static_cast<int>(shape.heads),
          static_cast<int>(shape.k_heads),
          static_cast<int>(shape.v_heads),
          static_cast<int>(shape.decay_heads),
          static_cast<int>(shape.state_heads),
          static_cast<int>(shape.qk_dim),
          static_cast<int>(shape.v_dim),
          static_cast<int>(shape.state_rows),
          static_cast<int>(std::min<int64_t>(spec.window, INT_MAX)),
          static_cast<int>(head_state_numbers(shape)),
          static_cast<int>(layout.v),
          static_cast<int>(layout.log_decay),
          static_cast<int>(layout.total),
          shape.features,
          shape.scale,
          records.slots ? static_cast<SlotRecord*>(records.slots.raw()) : nullptr};
}

// One token of each row, [rows, own heads, dim].
template <class T>
struct Token {
  const T* data;
  int64_t row_stride, head_stride;
  int own_heads;

  __device__ const T* row(int row, int head, int heads) const {
    return data + row * row_stride + head / (heads / own_heads) * head_stride;
  }
};

template <class T>
auto token(const Tensor& x) {
  return Token<typename OnDevice<T>::Type>{pointer<T>(x), x.stride(0), x.stride(1), static_cast<int>(x.size(1))};
}

__device__ inline void add_row(float4& sum, float phi, const float4& x) {
  sum.x = fmaf(phi, x.x, sum.x);
  sum.y = fmaf(phi, x.y, sum.y);
  sum.z = fmaf(phi, x.z, sum.z);
  sum.w = fmaf(phi, x.w, sum.w);
}

inline int divide_up(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

}  // namespace furious::cuda
