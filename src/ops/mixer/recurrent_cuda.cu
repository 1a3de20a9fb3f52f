#include <cmath>
#include <limits>
#include <numbers>

#include "ops/mixer/recurrent_kernels.h"
#include "tensor/cuda.cuh"

// The packed state of a head: D rows of v_dim values, padded to whole 16-byte vectors, then the normalizer's column.
// A row is contiguous over the values, so that a warp reads whole lines, whatever part of the rows is its own; the
// normalizer's column apart keeps the rows aligned.

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPageTokens = static_cast<int>(CachePage::kTokens);
constexpr int kChunk = 2 * kPageTokens;            // tokens of the window that are weighted at once
constexpr int kFewestRows = 64, kMostRows = 1024;  // of the state, for one block
constexpr int kMostWindowBlocks = 64;              // for one head
constexpr int64_t kEnoughBlocks = 4096;            // several for every place on the largest device
constexpr float kRoot2 = std::numbers::sqrt2_v<float>;
static_assert(kLargestDim <= kThreads && kThreads / 8 == kPageTokens && kThreads / kSmallestDim <= kChunk);
// A head has no more blocks than its factors have room.
static_assert(kLargestDim * (kLargestDim + 1) / 2 / kFewestRows + 1 + kMostWindowBlocks <= kMostRows);

struct Page {
  void* k;
  void* v;
  float* log_decay;
  double* total;
};

// Counters of a cache: pending tokens, heads that are done with a step, and for each head blocks that are done.
constexpr int kPending = 0, kHeadsDone = 1, kBlocksDone = 2;

__host__ __device__ int padded(int64_t dim) {
  return static_cast<int>((dim + 3) / 4 * 4);
}

// exp of a log-decay, where what is too small counts as zero.
__device__ float decay_factor(double log_decay) {
  return log_decay < kErased ? 0.0f : expf(static_cast<float>(log_decay));
}

// The sizes of a cache, and where its window is.
struct Cache {
  Score score;
  bool decay, sum;
  int heads, k_heads, v_heads, qk_dim, v_dim, state_rows;
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
    return pages[token / kPageTokens].total[decay_at(sequence_head, token)];
  }
};

Cache cache_of(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window) {
  return {spec.score,
          spec.decay,
          spec.norm == Norm::sum,
          static_cast<int>(shape.heads),
          static_cast<int>(shape.k_heads),
          static_cast<int>(shape.v_heads),
          static_cast<int>(shape.qk_dim),
          static_cast<int>(shape.v_dim),
          static_cast<int>(shape.state_rows),
          shape.scale,
          window.table ? static_cast<const Page*>(window.table.raw()) : nullptr};
}

// Row f of φ: x[first]·x[second]·factor, where a linear score takes x[first] alone.
struct Feature {
  int first, second;
  float factor;

  // The pairs i ≤ j in order: those of i begin at i·d − i(i−1)/2.
  __device__ Feature(Score score, int f, int d) : first(f), second(-1), factor(1) {
    if (score != Score::squared) return;
    const auto begin = [d](int i) { return i * d - i * (i - 1) / 2; };
    const float b = static_cast<float>(2 * d + 1);
    first = static_cast<int>((b - sqrtf(b * b - 8.0f * static_cast<float>(f))) / 2);
    while (first > 0 && begin(first) > f) --first;
    while (begin(first + 1) <= f) ++first;
    second = first + f - begin(first);
    factor = first == second ? 1.0f : kRoot2;
  }
  __device__ float of(const float* x) const { return second < 0 ? x[first] : x[first] * x[second] * factor; }
};

template <int kVector, class T>
__device__ void load(const T* from, float (&to)[kVector]) {
  if constexpr (kVector == 1) {
    to[0] = to_float(from[0]);
  } else {
    static_assert(kVector * sizeof(T) == sizeof(uint4));
    alignas(16) T values[kVector];
    *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = to_float(values[i]);
  }
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

template <class T>
struct Step {
  Cache cache;
  Token<T> q, k, v;
  const float* log_decay;  // [batch, heads]
  int* counters;
  const float* state;
  int64_t state_numbers;
  int state_blocks, state_rows;      // blocks of a head that read the state, and the rows of each
  int window_blocks, window_tokens;  // those that read the window, and the tokens of each
  float* partials;                   // [batch, heads, blocks, v_dim + 2]: y, n, and `extra`
  T* out;

  __device__ int blocks() const { return state_blocks + window_blocks; }
  __device__ bool softmax() const { return cache.score == Score::exponential && cache.sum; }
  // `extra` is the largest exponent under softmax; else the first block of the window says there how much is left of
  // the state.
  __device__ float* partial(int64_t sequence_head, int block) const {
    return partials + (sequence_head * blocks() + block) * (cache.v_dim + 2);
  }
};

struct StepMemory {
  alignas(16) float sums[8 * kThreads];
  float q[kLargestDim];
  float phi[kMostRows];
  float scores[kChunk], weights[kChunk];
  float warps[32];
  bool last;
};

// Adds up the threads' sums, of which each of `groups` groups holds one row of `ld` in memory.sums, and writes them
// with the block's normalizer. Contains the barrier after which the sums are seen.
template <class T>
__device__ void write_partial(const Step<T>& step, float* partial, int groups, int ld, float normalizer, float extra,
                              StepMemory& memory) {
  normalizer = block_sum(normalizer, memory.warps);
  const int column = static_cast<int>(threadIdx.x);
  if (column < step.cache.v_dim) {
    float y = 0;
    for (int g = 0; g < groups; ++g) y += memory.sums[g * ld + column];
    partial[column] = y;
  }
  if (column == 0) {
    partial[step.cache.v_dim] = normalizer;
    partial[step.cache.v_dim + 1] = extra;
  }
}

// φ(q)ᵀ[s, z] over the rows of one block.
template <class T>
__device__ void read_state(const Step<T>& step, int64_t sequence_head, int block, StepMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int first = block * step.state_rows;
  const int rows = min(step.state_rows, step.cache.state_rows - first);
  for (int r = thread; r < rows; r += kThreads)
    memory.phi[r] = Feature(step.cache.score, first + r, step.cache.qk_dim).of(memory.q);
  __syncthreads();

  const int ld = padded(step.cache.v_dim);
  const int vectors = ld / 4, groups = kThreads / vectors;
  const int column = thread % vectors, group = thread / vectors;
  const float* state = step.state + sequence_head * step.state_numbers;
  const float4* values = reinterpret_cast<const float4*>(state + static_cast<int64_t>(first) * ld) + column;
  if (group < groups) {
    float4 sum{0, 0, 0, 0};
#pragma unroll 4
    for (int r = group; r < rows; r += groups) {
      const float4 x = __ldcs(values + r * vectors);  // read once: not to be kept in the cache
      const float phi = memory.phi[r];
      sum.x = fmaf(phi, x.x, sum.x);
      sum.y = fmaf(phi, x.y, sum.y);
      sum.z = fmaf(phi, x.z, sum.z);
      sum.w = fmaf(phi, x.w, sum.w);
    }
    reinterpret_cast<float4*>(memory.sums)[thread] = sum;
  }
  float normalizer = 0;
  if (step.cache.sum) {
    const float* z = state + static_cast<int64_t>(step.cache.state_rows) * ld + first;
    for (int r = thread; r < rows; r += kThreads) normalizer = fmaf(memory.phi[r], z[r], normalizer);
  }
  write_partial(step, step.partial(sequence_head, block), groups, ld, normalizer, 0, memory);
}

// Puts the new token into its page. Heads that share a k or v leave it to the first of them; all of them read the new
// token from the inputs.
template <class T>
__device__ void keep_token(const Step<T>& step, int batch, int head, int slot, double total) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x);
  const Page page = cache.pages[slot / kPageTokens];
  if (head % (cache.heads / cache.k_heads) == 0 && thread < cache.qk_dim)
    cache.template k_row<T>(page, batch, head, slot)[thread] = step.k.row(batch, head, cache.heads)[thread];
  if (head % (cache.heads / cache.v_heads) == 0 && thread < cache.v_dim)
    cache.template v_row<T>(page, batch, head, slot)[thread] = step.v.row(batch, head, cache.heads)[thread];
  if (cache.decay && thread == 0) {
    const int64_t sequence_head = static_cast<int64_t>(batch) * cache.heads + head;
    page.log_decay[cache.decay_at(sequence_head, slot)] = step.log_decay[sequence_head];
    page.total[cache.decay_at(sequence_head, slot)] = total;
  }
}

// The weight of a token, or its exponent under softmax.
template <class T>
__device__ float weight_of(const Step<T>& step, float score, double log_decay) {
  if (step.softmax()) return score + static_cast<float>(log_decay);
  const float factor = decay_factor(log_decay);
  switch (step.cache.score) {
    case Score::linear:
      return score * factor;
    case Score::squared:
      return score * score * factor;
    default:
      return expf(fminf(score, kLargestExponent)) * factor;
  }
}

// Σ_j w_j [v_j, 1] over the tokens of one block, the new one among them.
template <int kVector, class T>
__device__ void read_window(const Step<T>& step, int batch, int head, int block, StepMemory& memory) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t sequence_head = static_cast<int64_t>(batch) * cache.heads + head;
  const int pending = step.counters[kPending];
  const int first = block * step.window_tokens;
  const int end = min(first + step.window_tokens, pending + 1);
  double now = 0;
  if (cache.decay) now = static_cast<double>(step.log_decay[sequence_head]);
  if (cache.decay && pending > 0) now += cache.total(sequence_head, pending - 1);
  if (first <= pending && pending < end) keep_token(step, batch, head, pending, now);
  const T* new_k = step.k.row(batch, head, cache.heads);
  const T* new_v = step.v.row(batch, head, cache.heads);

  const int vectors = cache.v_dim / kVector, groups = kThreads / vectors;
  const int column = thread % vectors * kVector, group = thread / vectors;
  float sums[kVector] = {};
  float normalizer = 0;  // of the tokens that this thread has weighted
  float largest = -INFINITY;
  for (int chunk = first; chunk < end; chunk += kChunk) {
    const int count = min(kChunk, end - chunk);
    const Page page0 = cache.pages[chunk / kPageTokens];
    const Page page1 = cache.pages[(chunk + min(kPageTokens, count - 1)) / kPageTokens];
    const int lane = thread % 8;  // eight threads for a token
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = half * kPageTokens + thread / 8;
      float score = 0;
      if (j < count) {
        const T* k = chunk + j == pending ? new_k : cache.template k_row<T>(half == 0 ? page0 : page1, batch, head, j);
        for (int c = lane * kVector; c < cache.qk_dim; c += 8 * kVector) {
          float x[kVector];
          load(k + c, x);
#pragma unroll
          for (int i = 0; i < kVector; ++i) score = fmaf(x[i], memory.q[c + i], score);
        }
      }
      for (int offset = 4; offset > 0; offset /= 2) score += __shfl_xor_sync(0xFFFFFFFFu, score, offset);
      if (lane == 0) {
        float weight = step.softmax() ? -INFINITY : 0.0f;
        if (j < count) {
          double log_decay = 0;
          if (cache.decay && chunk + j != pending)
            log_decay = now - (half == 0 ? page0 : page1).total[cache.decay_at(sequence_head, j)];
          weight = weight_of(step, score, log_decay);
        }
        memory.scores[j] = weight;
      }
    }
    __syncthreads();
    float rescale = 1;
    if (step.softmax()) {
      float most = fmaxf(memory.scores[thread % 32], memory.scores[thread % 32 + 32]);
      for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
      most = fmaxf(most, largest);
      rescale = expf(largest - most);
      largest = most;
    }
    if (thread < kChunk) {
      const float weight = step.softmax() ? expf(memory.scores[thread] - largest) : memory.scores[thread];
      memory.weights[thread] = weight;
      normalizer = normalizer * rescale + weight;
    }
    __syncthreads();
    if (group < groups) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] *= rescale;
      for (int j = group; j < count; j += groups) {
        const T* v =
            chunk + j == pending ? new_v : cache.template v_row<T>(j < kPageTokens ? page0 : page1, batch, head, j);
        float x[kVector];
        load(v + column, x);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[i] = fmaf(memory.weights[j], x[i], sums[i]);
      }
    }
  }
  if (group < groups) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) memory.sums[group * cache.v_dim + column + i] = sums[i];
  }
  write_partial(step, step.partial(sequence_head, step.state_blocks + block), groups, cache.v_dim, normalizer,
                step.softmax() ? largest : decay_factor(now), memory);
}

// The output of a head, from what its blocks have written, always in the same order: groups of threads take every so
// many blocks, so that few loads wait for each other.
template <class T>
__device__ void combine(const Step<T>& step, int64_t sequence_head, StepMemory& memory) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x);
  const auto at = [&](int block, int i) { return __ldcg(step.partial(sequence_head, block) + i); };
  const int normalizer_at = cache.v_dim, extra_at = cache.v_dim + 1;
  const float left = step.softmax() ? 0.0f : at(step.state_blocks, extra_at);
  float* factors = memory.phi;  // of each block's part
  for (int b = thread; b < step.blocks(); b += kThreads)
    factors[b] = step.softmax() ? at(b, extra_at) : b < step.state_blocks ? left : 1.0f;
  __syncthreads();
  float largest = -INFINITY;
  if (step.softmax())
    for (int b = 0; b < step.blocks(); ++b) largest = fmaxf(largest, factors[b]);

  const int groups = kThreads / cache.v_dim, group = thread / cache.v_dim, own = thread % cache.v_dim;
  if (group < groups) {
    float y = 0, n = 0;
#pragma unroll 4
    for (int b = group; b < step.blocks(); b += groups) {
      const float factor = step.softmax() ? expf(factors[b] - largest) : factors[b];
      y += factor > 0 ? factor * at(b, own) : 0.0f;
      n += factor > 0 ? factor * at(b, normalizer_at) : 0.0f;
    }
    memory.sums[group * cache.v_dim + own] = y;
    if (own == 0) memory.scores[group] = n;
  }
  __syncthreads();
  if (thread >= cache.v_dim) return;
  float y = 0, n = 0;
  for (int g = 0; g < groups; ++g) {
    y += memory.sums[g * cache.v_dim + thread];
    n += memory.scores[g];
  }
  // Only linear scores can sum to a negative n by right; others do so by rounding.
  const float size = cache.score == Score::linear ? fabsf(n) : n;
  if (cache.sum) y = size < kSmallestNormalizer ? 0.0f : y / n;
  step.out[sequence_head * cache.v_dim + thread] = from_float<T>(y);
}

// A step of all heads. The blocks of a head read parts of its state and its window; the one that is done last adds up
// what they have written.
template <int kVector, class T>
__global__ void __launch_bounds__(kThreads, 4) step_kernel(const Step<T> step) {
  __shared__ StepMemory memory;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t sequence_head = blockIdx.x / step.blocks();
  const int block = static_cast<int>(blockIdx.x % step.blocks());
  const int batch = static_cast<int>(sequence_head / step.cache.heads);
  const int head = static_cast<int>(sequence_head % step.cache.heads);
  if (thread < step.cache.qk_dim)
    memory.q[thread] = to_float(step.q.row(batch, head, step.cache.heads)[thread]) * step.cache.scale;
  __syncthreads();
  // The window first: it has further to go for its numbers.
  if (block < step.window_blocks)
    read_window<kVector>(step, batch, head, block, memory);
  else
    read_state(step, sequence_head, block - step.window_blocks, memory);

  __threadfence();
  __syncthreads();
  int* done = step.counters + kBlocksDone + sequence_head;
  if (thread == 0) memory.last = atomicAdd(done, 1) == step.blocks() - 1;
  __syncthreads();
  if (!memory.last) return;
  __threadfence();
  combine(step, sequence_head, memory);
  if (thread != 0) return;
  *done = 0;
  __threadfence();
  const int heads = static_cast<int>(gridDim.x / step.blocks());
  if (atomicAdd(step.counters + kHeadsDone, 1) == heads - 1) {
    step.counters[kHeadsDone] = 0;
    step.counters[kPending] += 1;
  }
}

// Sums of log_decay from the first pending token; a warp for a head, 32 tokens at a time.
__global__ void sum_decay_kernel(Cache cache, int64_t sequence_heads, int first, int end) {
  const int64_t sequence_head = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (sequence_head >= sequence_heads) return;
  double before = first > 0 ? cache.total(sequence_head, first - 1) : 0;
  for (int t = first; t < end; t += 32) {
    const int own = t + lane;
    const Page page = cache.pages[min(own, end - 1) / kPageTokens];
    double sum = own < end ? static_cast<double>(page.log_decay[cache.decay_at(sequence_head, own)]) : 0;
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
      if (lane >= offset) sum += other;
    }
    sum += before;
    if (own < end) page.total[cache.decay_at(sequence_head, own)] = sum;
    before = __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
}

// A tensor [batch, tokens, own heads, dim].
template <class T>
struct Tokens {
  const T* data;
  int64_t batch_stride, token_stride, head_stride;
};

template <class T>
auto tokens(const Tensor& x) {
  return Tokens<typename OnDevice<T>::Type>{pointer<T>(x), x.stride(0), x.stride(1), x.stride(2)};
}

// One block for one token of one sequence.
template <class T>
__global__ void append_kernel(Cache cache, Tokens<T> k, Tokens<T> v, Tokens<float> log_decay, int64_t length,
                              int first) {
  const int64_t batch = blockIdx.x / length, t = blockIdx.x % length;
  const int slot = first + static_cast<int>(t), at = slot % kPageTokens;
  const Page page = cache.pages[slot / kPageTokens];
  const auto keep = [&](void* to, const Tokens<T>& from, int heads, int dim) {
    for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += kThreads) {
      const int head = i / dim, c = i % dim;
      static_cast<T*>(to)[((batch * heads + head) * kPageTokens + at) * dim + c] =
          from.data[batch * from.batch_stride + t * from.token_stride + head * from.head_stride + c];
    }
  };
  keep(page.k, k, cache.k_heads, cache.qk_dim);
  keep(page.v, v, cache.v_heads, cache.v_dim);
  if (!cache.decay) return;
  for (int head = static_cast<int>(threadIdx.x); head < cache.heads; head += kThreads)
    page.log_decay[cache.decay_at(batch * cache.heads + head, slot)] =
        log_decay.data[batch * log_decay.batch_stride + t * log_decay.token_stride + head * log_decay.head_stride];
}

// state = exp(A_end)·state + Σ_j exp(A_end − A_j) φ(k_j)[v_j, 1]ᵀ over the pending tokens. A block has 64 rows and 64
// columns of one head's state, a thread 4 × 4 of them.
constexpr int kFoldTile = 64, kFoldTokens = 16;

template <class T>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(Cache cache, float* states, int64_t state_numbers, int pending, int row_tiles, int column_tiles) {
  __shared__ float k[kFoldTokens * kLargestDim];
  __shared__ alignas(16) float phi[kFoldTokens][kFoldTile];
  __shared__ alignas(16) float v[kFoldTokens][kFoldTile];
  __shared__ float weights[kFoldTokens];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t sequence_head = blockIdx.x / (row_tiles * column_tiles);
  const int tile = static_cast<int>(blockIdx.x % (row_tiles * column_tiles));
  const int first_row = tile / column_tiles * kFoldTile, first_column = tile % column_tiles * kFoldTile;
  const int batch = static_cast<int>(sequence_head / cache.heads);
  const int head = static_cast<int>(sequence_head % cache.heads);
  const double end = cache.decay ? cache.total(sequence_head, pending - 1) : 0;

  const int own = thread % kFoldTile;  // the row of φ and the column of v that this thread prepares
  const bool own_row = first_row + own < cache.state_rows;
  const Feature feature(cache.score, own_row ? first_row + own : 0, cache.qk_dim);
  const int row = thread / 16 * 4, column = thread % 16 * 4;
  float sums[4][4] = {};
  float normalizer = 0;  // of row `own`, in the first 64 threads
  for (int t0 = 0; t0 < pending; t0 += kFoldTokens) {
    const int count = min(kFoldTokens, pending - t0);
    const Page page = cache.pages[t0 / kPageTokens];
    __syncthreads();
    for (int i = thread; i < kFoldTokens * cache.qk_dim; i += kThreads) {
      const int t = i / cache.qk_dim, c = i % cache.qk_dim;
      k[i] = t < count ? to_float(cache.template k_row<T>(page, batch, head, t0 + t)[c]) : 0.0f;
    }
    if (thread < kFoldTokens) {
      float weight = thread < count ? 1.0f : 0.0f;
      if (cache.decay && thread < count) weight = decay_factor(end - cache.total(sequence_head, t0 + thread));
      weights[thread] = weight;
    }
    __syncthreads();
    for (int t = thread / kFoldTile; t < kFoldTokens; t += kThreads / kFoldTile) {
      phi[t][own] = own_row ? feature.of(k + t * cache.qk_dim) : 0.0f;
      const bool is_value = t < count && first_column + own < cache.v_dim;
      v[t][own] = is_value
                      ? to_float(cache.template v_row<T>(page, batch, head, t0 + t)[first_column + own]) * weights[t]
                      : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kFoldTokens; ++t) {
      const float4 p = *reinterpret_cast<const float4*>(&phi[t][row]);
      const float4 x = *reinterpret_cast<const float4*>(&v[t][column]);
      const float rows[4] = {p.x, p.y, p.z, p.w}, columns[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[r][c] = fmaf(rows[r], columns[c], sums[r][c]);
    }
    if (thread < kFoldTile)
      for (int t = 0; t < kFoldTokens; ++t) normalizer = fmaf(phi[t][thread], weights[t], normalizer);
  }

  const int ld = padded(cache.v_dim);
  float* state = states + sequence_head * state_numbers;
  const float left = cache.decay ? decay_factor(end) : 1.0f;
  for (int r = 0; r < 4; ++r) {
    if (first_row + row + r >= cache.state_rows || first_column + column >= ld) continue;
    float4* to =
        reinterpret_cast<float4*>(state + static_cast<int64_t>(first_row + row + r) * ld + first_column + column);
    float4 x = *to;
    x.x = fmaf(left, x.x, sums[r][0]);
    x.y = fmaf(left, x.y, sums[r][1]);
    x.z = fmaf(left, x.z, sums[r][2]);
    x.w = fmaf(left, x.w, sums[r][3]);
    *to = x;
  }
  if (cache.sum && first_column == 0 && thread < kFoldTile && own_row) {
    float* z = state + static_cast<int64_t>(cache.state_rows) * ld + first_row + own;
    *z = fmaf(left, *z, normalizer);
  }
}

// Between the packed state and the public layout, element by element of the latter.
__global__ void convert_kernel(Cache cache, float* packed, int64_t packed_numbers, float* open, int columns,
                               int64_t count, bool to_packed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int column = static_cast<int>(i % columns);
  const int64_t row = i / columns % cache.state_rows, sequence_head = i / columns / cache.state_rows;
  const int ld = padded(cache.v_dim);
  float* place = packed + sequence_head * packed_numbers +
                 (column < cache.v_dim ? row * ld + column : static_cast<int64_t>(cache.state_rows) * ld + row);
  if (to_packed)
    *place = open[i];
  else
    open[i] = *place;
}

void convert(const MixerSpec& spec, const MixerShape& shape, const Tensor& packed, const Tensor& open, bool to_packed) {
  const int64_t count = open.elements();
  convert_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream(packed.device())>>>(
      cache_of(spec, shape, {}), packed.data<float>(), packed.stride(1), open.data<float>(),
      static_cast<int>(shape.state_columns), count, to_packed);
  check_launch("mixer_cache");
}

// Some pages at once, as arguments of a kernel: no copy from the host that would have to be waited for.
struct PageList {
  static constexpr int kMost = 32;
  Page pages[kMost];
};

__global__ void list_pages_kernel(Page* table, PageList list, int count, int* counters, int pending) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) table[i] = list.pages[i];
  if (i == 0) counters[kPending] = pending;
}

// Whether rows that begin there can be read by 16 bytes.
bool aligned(const Tensor& x) {
  const auto bytes = [&](int64_t elements) { return elements * static_cast<int64_t>(size_of(x.dtype())); };
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && bytes(x.stride(0)) % 16 == 0 &&
         bytes(x.stride(1)) % 16 == 0 && bytes(x.size(2)) % 16 == 0;
}

int divide_up(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

}  // namespace

int64_t head_state_numbers(const MixerShape& shape) {
  return shape.state_rows * padded(shape.v_dim) + padded(shape.state_rows);
}

void cache_window_changed(Device device, const MixerShape& shape, CacheWindow& window) {
  constexpr int64_t kWords = sizeof(Page) / sizeof(int32_t);
  const auto count = static_cast<int64_t>(window.pages.size());
  if (!window.counters) window.counters = Tensor::zeros({kBlocksDone + shape.batch * shape.heads}, DType::i32, device);
  if (!window.table || count * kWords > window.table.elements()) {
    window.table = Tensor::empty({kWords * std::max<int64_t>(PageList::kMost, 2 * count)}, DType::i32, device);
    window.listed = 0;
  }
  window.listed = std::min(window.listed, count);
  do {
    PageList list;
    const auto some = std::min<int64_t>(PageList::kMost, count - window.listed);
    for (int64_t i = 0; i < some; ++i) {
      const CachePage& page = window.pages[window.listed + i];
      list.pages[i] = {page.k.raw(), page.v.raw(), page.log_decay ? page.log_decay.data<float>() : nullptr,
                       page.total ? page.total.data<double>() : nullptr};
    }
    list_pages_kernel<<<1, PageList::kMost, 0, stream(device)>>>(
        static_cast<Page*>(window.table.raw()) + window.listed, list, static_cast<int>(some),
        window.counters.data<int32_t>(), static_cast<int>(window.pending));
    check_launch("mixer_cache");
    window.listed += some;
  } while (window.listed < count);
}

void cache_step(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& state,
                const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& out) {
  const int64_t heads = shape.batch * shape.heads;
  const int64_t share = divide_up(kEnoughBlocks, heads);  // blocks that a head should have
  int state_blocks = 0, state_rows = 0;
  if (state) {
    const int fewest = divide_up(shape.state_rows, kMostRows), most = divide_up(shape.state_rows, kFewestRows);
    state_rows = divide_up(shape.state_rows, std::clamp<int64_t>(share, fewest, most));
    state_blocks = divide_up(shape.state_rows, state_rows);
  }
  const int64_t chunks = divide_up(window.pending + 1, kChunk);
  const int window_chunks = divide_up(chunks, std::clamp<int64_t>(share, 1, kMostWindowBlocks));
  const int window_blocks = divide_up(chunks, window_chunks);
  const int64_t blocks = heads * (state_blocks + window_blocks);
  const Tensor partials = Tensor::empty({blocks, shape.v_dim + 2}, DType::f32, out.device());
  with_activation_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using OnGpu = typename OnDevice<T>::Type;
    const Step<OnGpu> step{cache_of(spec, shape, window),
                           token<T>(q),
                           token<T>(k),
                           token<T>(v),
                           log_decay ? log_decay.data<float>() : nullptr,
                           window.counters.data<int32_t>(),
                           state ? state.data<float>() : nullptr,
                           state ? state.stride(1) : 0,
                           state_blocks,
                           state_rows,
                           window_blocks,
                           window_chunks * kChunk,
                           partials.data<float>(),
                           pointer<T>(out)};
    const auto grid = static_cast<unsigned>(blocks);
    if (aligned(k) && aligned(v))
      step_kernel<16 / sizeof(OnGpu)><<<grid, kThreads, 0, stream(out.device())>>>(step);
    else
      step_kernel<1><<<grid, kThreads, 0, stream(out.device())>>>(step);
  });
  check_launch("mixer_cache.step");
}

void cache_append(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay) {
  const int64_t length = k.size(1);
  const Cache cache = cache_of(spec, shape, window);
  const auto first = static_cast<int>(window.pending);
  const cudaStream_t s = stream(k.device());
  with_activation_type(k.dtype(), [&](auto zero) {
    using T = decltype(zero);
    append_kernel<<<blocks_for(shape.batch * length, 1), kThreads, 0, s>>>(
        cache, tokens<T>(k), tokens<T>(v), spec.decay ? tokens<float>(log_decay) : Tokens<float>{}, length, first);
  });
  check_launch("mixer_cache.prefill");
  if (!spec.decay) return;
  const int64_t heads = shape.batch * shape.heads;
  sum_decay_kernel<<<blocks_for(heads, kThreads / 32), kThreads, 0, s>>>(cache, heads, first,
                                                                         first + static_cast<int>(length));
  check_launch("mixer_cache.prefill");
}

void cache_sum_decay(const MixerShape& shape, const CacheWindow& window) {
  const int64_t heads = shape.batch * shape.heads;
  sum_decay_kernel<<<blocks_for(heads, kThreads / 32), kThreads, 0, stream(window.table.device())>>>(
      cache_of({}, shape, window), heads, 0, static_cast<int>(window.pending));
  check_launch("mixer_cache");
}

void cache_fold(const MixerSpec& spec, const MixerShape& shape, const CacheWindow& window, const Tensor& state) {
  const int row_tiles = divide_up(shape.state_rows, kFoldTile), column_tiles = divide_up(shape.v_dim, kFoldTile);
  const int64_t blocks = shape.batch * shape.heads * row_tiles * column_tiles;
  with_activation_type(window.pages[0].k.dtype(), [&](auto zero) {
    using T = typename OnDevice<decltype(zero)>::Type;
    fold_kernel<T><<<blocks_for(blocks, 1), kThreads, 0, stream(state.device())>>>(
        cache_of(spec, shape, window), state.data<float>(), state.stride(1), static_cast<int>(window.pending),
        row_tiles, column_tiles);
  });
  check_launch("mixer_cache.fold");
}

void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state) {
  convert(spec, shape, state, from, true);
}

void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to) {
  convert(spec, shape, state, to, false);
}

}  // namespace furious::cuda
