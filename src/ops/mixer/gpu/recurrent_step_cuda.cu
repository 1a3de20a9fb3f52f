#include <cmath>
#include <limits>

#include "gpu/launch.cuh"
#include "ops/mixer/gpu/recurrent.cuh"
#include "ops/mixer/polynomial.h"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = static_cast<int>(kStepTokens);  // tokens of the window that are weighted at once
constexpr int kFewestRows = 64, kMostRows = 1024;      // of the state, for one block
constexpr int kMostWindowBlocks = 64;                  // for one head
constexpr int64_t kEnoughBlocks = 4096;                // several for every place on the largest device
constexpr int kAtOnce = 3;                             // blocks of a multiprocessor that leave room for the next kernel
constexpr int kRowsAhead = 6;                          // of the state, that a thread fetches before it has q
constexpr int kMostGrouped = 8;                        // heads that read a state together
constexpr int kGroupedRowsAhead = 3;                   // fewer, since every head has sums of its own
static_assert(kLargestDim <= kThreads && kThreads / 8 == kPageTokens && kThreads / kSmallestDim <= kChunk);
// A head has no more blocks than its factors have room.
static_assert(kLargestStateRows / kFewestRows + 1 + kMostWindowBlocks <= kMostRows);

// Neighbours of a row as they are loaded.
template <int kVector, class T>
struct RowVector {
  alignas(kVector * sizeof(T)) T values[kVector];

  __device__ void load(const T* from) {
    if constexpr (kVector == 1) {
      values[0] = __ldcg(from);
    } else {
      static_assert(kVector * sizeof(T) == sizeof(uint4));
      *reinterpret_cast<uint4*>(values) = __ldcg(reinterpret_cast<const uint4*>(from));
    }
  }
};

template <class T>
struct Step {
  Cache cache;
  Token<T> q, k, v;
  const float* log_decay;            // [rows, decay_heads]
  const int32_t* rows;               // the slot of each
  int *heads_done, *blocks_done;     // of each row, and of each of its heads
  int state_blocks, state_rows;      // blocks of a head that read the state, and the rows of each
  int window_blocks, window_tokens;  // those that read the window, and the tokens of each
  int all_heads;                     // of all rows
  int group;                         // heads whose blocks read their common state together
  bool windows_first;                // in the order of blocks: what has furthest to go begins first
  float* partials;                   // [rows, heads, blocks, v_dim + 2]: y, n, and `extra`
  T* out;
  Polynomial polynomial;  // f, of all scores but the exponential

  __device__ int blocks() const { return state_blocks + window_blocks; }
  __device__ bool softmax() const { return cache.score == Score::exponential && cache.sum; }
  // The weight of a token whose product with q is `product`, under softmax its exponent. Only a signed mask can reach
  // the largest exponent.
  __device__ float weight(float product, double log_decay) const {
    log_decay = fmin(log_decay, static_cast<double>(kLargestExponent));
    if (softmax()) return product + static_cast<float>(log_decay);
    const float value =
        cache.score == Score::exponential ? expf(fminf(product, kLargestExponent)) : polynomial(product);
    return value * decay_factor(log_decay);
  }
  // `extra` is the largest exponent under softmax; else the first block of the window says there how much is left of
  // the state.
  __device__ float* partial(int64_t row_head, int block) const {
    return partials + (row_head * blocks() + block) * (cache.v_dim + 2);
  }
};

// One head of one row, and the slot of that row.
struct RowHead {
  int row, head, index;  // index counts the heads of all rows
  SlotRecord slot;
};

struct StepMemory {
  alignas(16) float sums[8 * kThreads];
  float q[kLargestDim], k[kLargestDim], v[kLargestDim], log_decay;  // of the new token
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
#pragma unroll 8
    for (int g = 0; g < groups; ++g) y += memory.sums[g * ld + column];
    partial[column] = y;
  }
  if (column == 0) {
    partial[step.cache.v_dim] = normalizer;
    partial[step.cache.v_dim + 1] = extra;
  }
}

// The new token, which a kernel before this one has made. The state's blocks need its q alone.
template <bool kAll, class T>
__device__ void load_token(const Step<T>& step, const RowHead& own, StepMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const Cache& cache = step.cache;
  const T* const q = step.q.row(own.row, own.head, cache.heads) + thread;
  const T* const k = step.k.row(own.row, own.head, cache.heads) + thread;
  const T* const v = step.v.row(own.row, own.head, cache.heads) + thread;
  wait_for_previous();
  T raw_q{}, raw_k{}, raw_v{};  // all on their way before the first is there
  float log_decay = 0;
  if (kAll && cache.decay && thread == 0)
    log_decay = __ldcg(step.log_decay + own.row * cache.decay_heads + cache.decay_head(own.head));
  if (thread < cache.qk_dim) raw_q = __ldcg(q);
  if (kAll && thread < cache.qk_dim) raw_k = __ldcg(k);
  if (kAll && thread < cache.v_dim) raw_v = __ldcg(v);
  memory.q[thread] = to_float(raw_q) * cache.scale;
  if (kAll) memory.k[thread] = to_float(raw_k);
  if (kAll) memory.v[thread] = to_float(raw_v);
  if (kAll && thread == 0) memory.log_decay = log_decay;
  __syncthreads();
}

// φ(q)ᵀ[s, z] over the rows of one block. The state stays as it is from token to token, so the first rows are fetched
// before q is there.
template <class T>
__device__ void read_state(const Step<T>& step, const RowHead& own, int block, StepMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int first = block * step.state_rows;
  const int rows = min(step.state_rows, step.cache.state_rows - first);
  const int ld = padded(step.cache.v_dim);
  const int vectors = ld / 4, groups = kThreads / vectors;
  const int column = thread % vectors, group = thread / vectors;
  const float* state = step.cache.state_of(own.slot.state, own.head);
  const float4* values = reinterpret_cast<const float4*>(state + static_cast<int64_t>(first) * ld) + column;
  float4 ahead[kRowsAhead];
#pragma unroll
  for (int i = 0; i < kRowsAhead; ++i) {
    const int r = group + i * groups;
    ahead[i] = group < groups && r < rows ? __ldcs(values + r * vectors) : float4{0, 0, 0, 0};
  }
  const Feature feature = feature_of(step.cache.features, first + min(thread, rows - 1));
  load_token<false>(step, own, memory);
  if (thread < rows) memory.phi[thread] = feature.of(memory.q);
  for (int r = thread + kThreads; r < rows; r += kThreads)
    memory.phi[r] = feature_of(step.cache.features, first + r).of(memory.q);
  __syncthreads();

  if (group < groups) {
    float4 sum{0, 0, 0, 0};
    for (int first_of_these = group; first_of_these < rows; first_of_these += kRowsAhead * groups) {
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        const int r = first_of_these + i * groups, later = r + kRowsAhead * groups;
        const float4 x = ahead[i];
        if (later < rows) ahead[i] = __ldcs(values + later * vectors);  // read once: not to be kept in the cache
        if (r < rows) add_row(sum, memory.phi[r], x);
      }
    }
    reinterpret_cast<float4*>(memory.sums)[thread] = sum;
  }
  float normalizer = 0;
  if (step.cache.sum) {
    const float* z = state + static_cast<int64_t>(step.cache.state_rows) * ld + first;
    for (int r = thread; r < rows; r += kThreads) normalizer = fmaf(memory.phi[r], z[r], normalizer);
  }
  write_partial(step, step.partial(own.index, block), groups, ld, normalizer, 0, memory);
}

// The same for heads that share the state, from own.head on: each row is fetched once.
template <class T>
__device__ void read_shared_state(const Step<T>& step, const RowHead& own, int block, StepMemory& memory) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x), heads = step.group;
  const int first = block * step.state_rows;
  const int rows = min(step.state_rows, cache.state_rows - first);
  const int ld = padded(cache.v_dim);
  const int vectors = ld / 4, groups = kThreads / vectors;
  const int column = thread % vectors, group = thread / vectors;
  const float* state = cache.state_of(own.slot.state, own.head);
  const float4* values = reinterpret_cast<const float4*>(state + static_cast<int64_t>(first) * ld) + column;
  float4 ahead[kGroupedRowsAhead];
#pragma unroll
  for (int i = 0; i < kGroupedRowsAhead; ++i) {
    const int r = group + i * groups;
    ahead[i] = group < groups && r < rows ? __ldcs(values + r * vectors) : float4{0, 0, 0, 0};
  }
  static_assert(sizeof(memory.sums) == sizeof(float) * kMostGrouped * kLargestDim);
  float* const queries = memory.sums;  // until all heads have their features
  wait_for_previous();
  for (int i = thread; i < heads * cache.qk_dim; i += kThreads) {
    const int head = i / cache.qk_dim, c = i % cache.qk_dim;
    queries[head * kLargestDim + c] =
        to_float(__ldcg(step.q.row(own.row, own.head + head, cache.heads) + c)) * cache.scale;
  }
  __syncthreads();
  for (int r = thread; r < rows; r += kThreads) {
    const Feature feature = feature_of(cache.features, first + r);
    for (int head = 0; head < heads; ++head)
      memory.phi[head * step.state_rows + r] = feature.of(queries + head * kLargestDim);
  }
  __syncthreads();

  float4 sums[kMostGrouped] = {};
  for (int first_of_these = group; group < groups && first_of_these < rows;
       first_of_these += kGroupedRowsAhead * groups) {
#pragma unroll
    for (int i = 0; i < kGroupedRowsAhead; ++i) {
      const int r = first_of_these + i * groups, later = r + kGroupedRowsAhead * groups;
      const float4 x = ahead[i];
      if (later < rows) ahead[i] = __ldcs(values + later * vectors);
      if (r >= rows) continue;
#pragma unroll
      for (int head = 0; head < kMostGrouped; ++head)
        if (head < heads) add_row(sums[head], memory.phi[head * step.state_rows + r], x);
    }
  }
  const float* const z = state + static_cast<int64_t>(cache.state_rows) * ld + first;
#pragma unroll
  for (int head = 0; head < kMostGrouped; ++head) {
    if (head >= heads) break;
    float normalizer = 0;
    for (int r = thread; cache.sum && r < rows; r += kThreads)
      normalizer = fmaf(memory.phi[head * step.state_rows + r], z[r], normalizer);
    if (group < groups) reinterpret_cast<float4*>(memory.sums)[thread] = sums[head];
    write_partial(step, step.partial(own.index + head, block), groups, ld, normalizer, 0, memory);
    __syncthreads();  // before the next head's sums
  }
}

// Puts the new token into its page. Heads that share a k, v or decay leave it to the first of them; all of them read
// the new token from the inputs.
template <class T>
__device__ void keep_token(const Cache& cache, const RowHead& own, double total, const StepMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), token = own.slot.pending, head = own.head;
  const Page page = own.slot.pages[token / kPageTokens];
  if (head % (cache.heads / cache.k_heads) == 0 && thread < cache.qk_dim)
    cache.template k_row<T>(page, head, token)[thread] = from_float<T>(memory.k[thread]);
  if (head % (cache.heads / cache.v_heads) == 0 && thread < cache.v_dim)
    cache.template v_row<T>(page, head, token)[thread] = from_float<T>(memory.v[thread]);
  if (cache.decay && head % (cache.heads / cache.decay_heads) == 0 && thread == 0) {
    *cache.log_decay(page, head, token) = memory.log_decay;
    *cache.total(page, head, token) = total;
  }
}

// Σ_j w_j [v_j, 1] over the tokens of one block, the new one among them. Older ones are there before q is: the first of
// them are fetched then, where a thread takes one piece of a row.
template <int kVector, class T>
__device__ void read_window(const Step<T>& step, const RowHead& own, int block, StepMemory& memory) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x), head = own.head;
  const Page* const pages = own.slot.pages;
  const int pending = own.slot.pending;
  const int first = block * step.window_tokens;
  const int end = min(first + step.window_tokens, pending + 1);
  const int first_page = first / kPageTokens, last_page = pending / kPageTokens;
  const Page first_pages[2] = {pages[first_page], pages[min(first_page + 1, last_page)]};
  const bool whole = cache.qk_dim == 8 * kVector && cache.v_dim == 8 * kVector;
  RowVector<kVector, T> k_ahead[2] = {}, v_ahead[2] = {};
  double totals_ahead[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = half * kPageTokens + thread / 8;
    if (!whole || first + j >= min(end, pending)) continue;
    k_ahead[half].load(cache.template k_row<T>(first_pages[half], head, j) + thread % 8 * kVector);
    v_ahead[half].load(cache.template v_row<T>(first_pages[half], head, j) + thread % 8 * kVector);
    if (cache.decay) totals_ahead[half] = *cache.total(first_pages[half], head, j);
  }
  double now = 0;
  if (cache.decay && pending > 0) now = cache.total_until(pages, head, pending - 1);
  load_token<true>(step, own, memory);
  now += static_cast<double>(memory.log_decay);
  if (first <= pending && pending < end) keep_token<T>(cache, own, now, memory);

  const int vectors = cache.v_dim / kVector, groups = kThreads / vectors;
  const int column = thread % vectors * kVector, group = thread / vectors;
  float sums[kVector] = {};
  float normalizer = 0;  // of the tokens that this thread has weighted
  float largest = -INFINITY;
  for (int chunk = first; chunk < end; chunk += kChunk) {
    const int count = min(kChunk, end - chunk);
    const Page page0 = pages[chunk / kPageTokens];
    const Page page1 = pages[(chunk + min(kPageTokens, count - 1)) / kPageTokens];
    const bool ahead = whole && chunk == first;
    const int lane = thread % 8;  // eight threads for a token
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = half * kPageTokens + thread / 8;
      float score = 0;
      if (j < count) {
        const bool is_new = chunk + j == pending;
        const T* k = cache.template k_row<T>(half == 0 ? page0 : page1, head, j);
        for (int c = lane * kVector; c < cache.qk_dim; c += 8 * kVector) {
          RowVector<kVector, T> x = k_ahead[half];
          if (!ahead && !is_new) x.load(k + c);
#pragma unroll
          for (int i = 0; i < kVector; ++i)
            score = fmaf(is_new ? memory.k[c + i] : to_float(x.values[i]), memory.q[c + i], score);
        }
      }
      for (int offset = 4; offset > 0; offset /= 2) score += __shfl_xor_sync(0xFFFFFFFFu, score, offset);
      if (lane == 0) {
        float weight = step.softmax() ? -INFINITY : 0.0f;
        // What a sliding window has passed is less than a page, so that no chunk is without a token that counts.
        if (j < count && (cache.window == 0 || chunk + j > pending - cache.window)) {
          double log_decay = 0;
          if (cache.decay && chunk + j != pending)
            log_decay = now - (ahead ? totals_ahead[half] : *cache.total(half == 0 ? page0 : page1, head, j));
          weight = step.weight(score, log_decay);
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
        const bool is_new = chunk + j == pending;
        RowVector<kVector, T> x = j < kPageTokens ? v_ahead[0] : v_ahead[1];
        if (!ahead && !is_new) x.load(cache.template v_row<T>(j < kPageTokens ? page0 : page1, head, j) + column);
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          sums[i] = fmaf(memory.weights[j], is_new ? memory.v[column + i] : to_float(x.values[i]), sums[i]);
      }
    }
  }
  if (group < groups) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) memory.sums[group * cache.v_dim + column + i] = sums[i];
  }
  write_partial(step, step.partial(own.index, step.state_blocks + block), groups, cache.v_dim, normalizer,
                step.softmax() ? largest : decay_factor(now), memory);
}

// The output of a head, from what its blocks have written, always in the same order: groups of threads take every so
// many blocks, so that few loads wait for each other. Only the blocks that had anything to read have written.
template <class T>
__device__ void combine(const Step<T>& step, const RowHead& own_head, StepMemory& memory) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x);
  const int begin = own_head.slot.state != nullptr ? 0 : step.state_blocks;
  const int end = step.state_blocks + own_head.slot.pending / step.window_tokens + 1;
  const auto at = [&](int block, int i) { return __ldcg(step.partial(own_head.index, block) + i); };
  const int normalizer_at = cache.v_dim, extra_at = cache.v_dim + 1;
  const float left = step.softmax() ? 0.0f : at(step.state_blocks, extra_at);
  float* exponents = memory.phi;  // the largest of each block
  float largest = -INFINITY;
  if (step.softmax()) {
    for (int b = begin + thread; b < end; b += kThreads) exponents[b] = at(b, extra_at);
    __syncthreads();
    for (int b = begin; b < end; ++b) largest = fmaxf(largest, exponents[b]);
  }

  const int groups = kThreads / cache.v_dim, group = thread / cache.v_dim, own = thread % cache.v_dim;
  if (group < groups) {
    float y = 0, n = 0;
    for (int first = begin + group; first < end; first += 8 * groups) {
      float part[8], part_n[8];  // all on their way before the first is there
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int b = first + i * groups;
        part[i] = b < end ? at(b, own) : 0.0f;
        part_n[i] = b < end && own == 0 ? at(b, normalizer_at) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int b = first + i * groups;
        if (b >= end) break;
        const float factor = step.softmax() ? expf(exponents[b] - largest) : b < step.state_blocks ? left : 1.0f;
        y += factor > 0 ? factor * part[i] : 0.0f;
        n += factor > 0 ? factor * part_n[i] : 0.0f;
      }
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
  if (cache.sum) y = normalized(cache.score, y, n);
  step.out[static_cast<int64_t>(own_head.index) * cache.v_dim + thread] = from_float<T>(y);
}

// A step of all heads of all rows. The blocks of a head read parts of its state and its window; the one that is done
// last adds up what they have written. Blocks that another row needs for its state or its longer window do nothing.
// kGrouped: heads share a state, and the blocks of the state work for a group of them.
template <int kVector, bool kGrouped, class T>
__global__ void __launch_bounds__(kThreads, kGrouped ? 3 : 4) step_kernel(const Step<T> step) {
  __shared__ StepMemory memory;
  const int thread = static_cast<int>(threadIdx.x);
  start_next();
  const int index = static_cast<int>(blockIdx.x), windows = step.all_heads * step.window_blocks;
  const int group = kGrouped ? step.group : 1, group_windows = group * step.window_blocks;
  // The first head that the block works for, and how many: those of a group where it reads their state.
  int row_head = 0, block = 0, heads = 1;
  const auto window_block = [&](int at) {
    row_head = at / step.window_blocks;
    block = at % step.window_blocks;
  };
  const auto state_block = [&](int at_group, int at) {
    row_head = at_group * group;
    block = step.window_blocks + at;
    heads = group;
  };
  if (step.windows_first && index < windows) {
    window_block(index);
  } else if (step.windows_first) {
    state_block((index - windows) / step.state_blocks, (index - windows) % step.state_blocks);
  } else {
    const int per_group = group_windows + step.state_blocks, at_group = index / per_group, at = index % per_group;
    if (at < group_windows)
      window_block(at_group * group_windows + at);
    else
      state_block(at_group, at - group_windows);
  }
  const int row = row_head / step.cache.heads;
  SlotRecord* const record = step.cache.slots + __ldcg(step.rows + row);
  RowHead own{row, row_head % step.cache.heads, row_head, load_slot(record)};
  if (block >= step.window_blocks) {
    if constexpr (kGrouped) {
      if (own.slot.state != nullptr) read_shared_state(step, own, block - step.window_blocks, memory);
    } else {
      if (own.slot.state != nullptr) read_state(step, own, block - step.window_blocks, memory);
    }
  } else if (block * step.window_tokens <= own.slot.pending) {
    read_window<kVector>(step, own, block, memory);
  }
  wait_for_previous();  // in blocks that had nothing to read

  for (int i = 0; i < heads; ++i, ++own.head, ++own.index) {
    __syncthreads();
    int* done = step.blocks_done + own.index;
    if (thread == 0) {
      __threadfence();
      memory.last = atomicAdd(done, 1) == step.blocks() - 1;
      __threadfence();
    }
    __syncthreads();
    if (!memory.last) continue;
    if (thread == kThreads - 1) {  // beside the rest: all blocks of the head have read the record
      *done = 0;
      if (atomicAdd(step.heads_done + row, 1) == step.cache.heads - 1) {
        step.heads_done[row] = 0;
        record->pending += 1;
        record->tokens += 1;
      }
    }
    combine(step, own, memory);
  }
}

// Whether rows that begin there can be read by 16 bytes.
bool aligned(const Tensor& x) {
  const auto bytes = [&](int64_t elements) { return elements * static_cast<int64_t>(size_of(x.dtype())); };
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && bytes(x.stride(0)) % 16 == 0 &&
         bytes(x.stride(1)) % 16 == 0 && bytes(x.size(2)) % 16 == 0;
}

}  // namespace

void cache_step(const MixerSpec& spec, const MixerShape& shape, const CacheRecords& records,
                const std::vector<CacheSlot>& slots, const SlotRows& rows, const Tensor& q, const Tensor& k,
                const Tensor& v, const Tensor& log_decay, const Tensor& out, bool early) {
  const int64_t heads = rows.size() * shape.heads;
  const Cache cache = cache_of(spec, shape, k.dtype(), records);
  const float* const decays = log_decay ? log_decay.data<float>() : nullptr;
  const auto* const slot_of_row = rows.table.data<int32_t>();
  int64_t longest = 0;
  bool any_state = false;
  for (int32_t slot : rows.slots) {
    longest = std::max(longest, slots[slot].pending);
    any_state = any_state || slots[slot].state;
  }
  // Blocks that a head should have: few heads fill the device once, with one block for the window.
  const int64_t places = kAtOnce * multiprocessors() / heads;
  const int64_t share = places > 2 ? places - 1 : divide_up(kEnoughBlocks, heads);
  // Of the heads that share a state, as many as read it together.
  int group = static_cast<int>(any_state ? shape.heads / shape.state_heads : 1);
  while (group > kMostGrouped || shape.heads / shape.state_heads % group != 0) --group;
  int state_blocks = 0, state_rows = 0;
  if (any_state) {
    const int fewest = divide_up(shape.state_rows, kMostRows / group), most = divide_up(shape.state_rows, kFewestRows);
    state_rows = divide_up(shape.state_rows, std::clamp<int64_t>(group * share, fewest, std::max(fewest, most)));
    state_blocks = divide_up(shape.state_rows, state_rows);
  }
  const int64_t chunks = divide_up(longest + 1, kChunk);
  const int window_chunks = divide_up(chunks, std::clamp<int64_t>(share, 1, kMostWindowBlocks));
  const int window_blocks = divide_up(chunks, window_chunks);
  const int64_t blocks = heads * window_blocks + heads / group * state_blocks;
  const Tensor partials =
      Tensor::empty({heads * (state_blocks + window_blocks), shape.v_dim + 2}, DType::f32, out.device());
  with_activation_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using OnGpu = typename OnDevice<T>::Type;
    const Step<OnGpu> step{cache,
                           token<T>(q),
                           token<T>(k),
                           token<T>(v),
                           decays,
                           slot_of_row,
                           records.done.data<int32_t>(),
                           records.done.data<int32_t>() + slots.size(),
                           state_blocks,
                           state_rows,
                           window_blocks,
                           window_chunks * kChunk,
                           static_cast<int>(heads),
                           group,
                           places > 2,
                           partials.data<float>(),
                           pointer<T>(out),
                           polynomial_of(spec)};
    const auto grid = static_cast<unsigned>(blocks);
    const cudaStream_t s = stream(out.device());
    const auto launch = [&](auto vector) {
      if (group > 1)
        launch_early(early, step_kernel<vector(), true, OnGpu>, grid, kThreads, 0, s, step);
      else
        launch_early(early, step_kernel<vector(), false, OnGpu>, grid, kThreads, 0, s, step);
    };
    if (aligned(k) && aligned(v))
      launch(std::integral_constant<int, 16 / sizeof(OnGpu)>());
    else
      launch(std::integral_constant<int, 1>());
  });
}

}  // namespace furious::cuda
