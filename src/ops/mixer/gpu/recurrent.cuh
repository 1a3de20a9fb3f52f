// What the kernels of a MixerCache share.
//
// The packed state of a head: D rows of v_dim values, padded to whole 16-byte vectors, then the normalizer's column.
// A row is contiguous over the values, so that a warp reads whole lines, whatever part of the rows is its own; the
// normalizer's column apart keeps the rows aligned.
#pragma once

#include "ops/mixer/features.h"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/recurrent_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {

inline constexpr int kPageTokens = static_cast<int>(CachePage::kTokens);

struct Page {
  void* k;
  void* v;
  float* log_decay;
  double* total;
};

// Counters of a cache: pending tokens, all tokens, heads that are done with a step, and for each head blocks that are
// done.
inline constexpr int kPending = 0, kTokens = 1, kHeadsDone = 2, kBlocksDone = 3;

__host__ __device__ inline int padded(int64_t dim) {
  return static_cast<int>((dim + 3) / 4 * 4);
}

// Squares and exponentials sum to a negative n by rounding only.
__device__ inline float normalized(Score score, float y, float n) {
  const float size = score == Score::squared || score == Score::exponential ? n : fabsf(n);
  return size < kSmallestNormalizer ? 0.0f : y / n;
}

// The sizes of a cache, and where its window is.
struct Cache {
  Score score;
  bool decay, sum;
  int heads, k_heads, v_heads, qk_dim, v_dim, state_rows;
  FeatureMap features;
  float scale;
  const Page* pages;

  __device__ int k_head(int head) const { return head / (heads / k_heads); }
  __device__ int v_head(int head) const { return head / (heads / v_heads); }
  // Rows of one token, in the page that holds it.
  template <class T>
  __device__ T* k_row(const Page& page, int batch, int head, int token) const {
    const int64_t row = (static_cast<int64_t>(batch) * k_heads + k_head(head)) * kPageTokens + token % kPageTokens;
    return static_cast<T*>(page.k) + row * qk_dim;
  }
  template <class T>
  __device__ T* v_row(const Page& page, int batch, int head, int token) const {
    const int64_t row = (static_cast<int64_t>(batch) * v_heads + v_head(head)) * kPageTokens + token % kPageTokens;
    return static_cast<T*>(page.v) + row * v_dim;
  }
  // The place of one token's decay.
  __device__ int64_t decay_at(int64_t sequence_head, int token) const {
    return sequence_head * kPageTokens + token % kPageTokens;
  }
  __device__ double total(int64_t sequence_head, int token) const {
    return __ldcg(pages[token / kPageTokens].total + decay_at(sequence_head, token));
  }
};

inline Cache cache_of(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window) {
  return {spec.score,
          spec.decay,
          spec.norm == Norm::sum,
          static_cast<int>(shape.heads),
          static_cast<int>(shape.k_heads),
          static_cast<int>(shape.v_heads),
          static_cast<int>(shape.qk_dim),
          static_cast<int>(shape.v_dim),
          static_cast<int>(shape.state_rows),
          shape.features,
          shape.scale,
          window.table ? static_cast<const Page*>(window.table.raw()) : nullptr};
}

// One token of every sequence, [batch, own heads, dim].
template <class T>
struct Token {
  const T* data;
  int64_t batch_stride, head_stride;
  int own_heads;

  __device__ const T* row(int batch, int head, int heads) const {
    return data + batch * batch_stride + head / (heads / own_heads) * head_stride;
  }
};

template <class T>
auto token(const Tensor& x) {
  return Token<typename OnDevice<T>::Type>{pointer<T>(x), x.stride(0), x.stride(1), static_cast<int>(x.size(1))};
}

// Into the L2 cache, a line of 128 bytes.
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from));
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
