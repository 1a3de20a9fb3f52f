#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "ops/elementwise.h"
#include "ops/mixer/gpu/recurrent.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;

// Sums of log_decay from the first pending token; a warp for a head of the decays, 32 tokens at a time.
__global__ void sum_decay_kernel(Cache cache, const Page* pages, int first, int end) {
  const int own_head = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (own_head >= cache.decay_heads) return;
  const int head = own_head * (cache.heads / cache.decay_heads);
  double before = first > 0 ? cache.total_until(pages, head, first - 1) : 0;
  for (int t = first; t < end; t += 32) {
    const int own = t + lane;
    const Page page = pages[min(own, end - 1) / kPageTokens];
    double sum = own < end ? static_cast<double>(*cache.log_decay(page, head, own)) : 0;
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
      if (lane >= offset) sum += other;
    }
    sum += before;
    if (own < end) *cache.total(page, head, own) = sum;
    before = __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
}

// A tensor [1, tokens, own heads, dim].
template <class T>
struct TokenRows {
  T* data;
  int64_t token_stride, head_stride;
};

template <class T>
auto token_rows(const Tensor& x) {
  return TokenRows<typename OnDevice<T>::Type>{pointer<T>(x), x.stride(1), x.stride(2)};
}

// One block for one token: into its page, or from there.
template <class T, bool kToPage>
__global__ void move_kernel(Cache cache, const Page* pages, TokenRows<T> k, TokenRows<T> v, TokenRows<float> log_decay,
                            int first) {
  const int64_t t = blockIdx.x;
  const int token = first + static_cast<int>(t), thread = static_cast<int>(threadIdx.x);
  const Page page = pages[token / kPageTokens];
  const auto move = [&](auto& in_page, auto& outside) {
    if constexpr (kToPage)
      in_page = outside;
    else
      outside = in_page;
  };
  const auto move_heads = [&](char* part, const TokenRows<T>& x, int heads, int dim) {
    for (int i = thread; i < heads * dim; i += kThreads) {
      const int head = i / dim, c = i % dim;
      move(reinterpret_cast<T*>(part)[(head * kPageTokens + token % kPageTokens) * dim + c],
           x.data[t * x.token_stride + head * x.head_stride + c]);
    }
  };
  move_heads(page.memory, k, cache.k_heads, cache.qk_dim);
  move_heads(page.memory + cache.v_begin, v, cache.v_heads, cache.v_dim);
  if (!cache.decay) return;
  for (int head = thread; head < cache.decay_heads; head += kThreads)
    move(*cache.log_decay(page, head * (cache.heads / cache.decay_heads), token),
         log_decay.data[t * log_decay.token_stride + head * log_decay.head_stride]);
}

// state = exp(A_end)·state + Σ_j exp(A_end − A_j) φ(k_j)[v_j, 1]ᵀ over the pending tokens. A block has 64 rows and 64
// columns of one state, a thread 8 × 4 of them. A fold of all layers is what every so many tokens wait for: the
// blocks of 16 heads of 64 all fit on the multiprocessors at once, and a block asks for its state first and then for
// all of a page together. Several slots fold in one launch.
struct FoldList {
  static constexpr int kMost = 64;
  struct Fold {
    const Page* pages;
    float* state;
    int pending;
  } folds[kMost];
};

constexpr int kFoldTile = 64, kFoldThreads = 128, kFoldRows = 8, kFoldBlocks = 4;

template <class T>
__global__ void __launch_bounds__(kFoldThreads, kFoldBlocks)
    fold_kernel(const Cache cache, const __grid_constant__ FoldList list, int row_tiles, int column_tiles) {
  constexpr int kOfThread = kPageTokens * kFoldTile / kFoldThreads;  // numbers of a page, for a tile of columns
  constexpr int kStep = kFoldThreads / kFoldTile;                    // tokens between them
  __shared__ float k[kPageTokens * kLargestDim];
  __shared__ alignas(16) float phi[kPageTokens][kFoldTile];  // weighted
  __shared__ alignas(16) float v[kPageTokens][kFoldTile];
  static_assert(kPageTokens == 32);  // one for each lane
  start_next();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, tiles = row_tiles * column_tiles;
  const int all_states = static_cast<int>(blockIdx.x) / tiles, tile = static_cast<int>(blockIdx.x) % tiles;
  const int first_row = tile / column_tiles * kFoldTile, first_column = tile % column_tiles * kFoldTile;
  // The first of the heads that share the state.
  const int head = all_states % cache.state_heads * (cache.heads / cache.state_heads);
  const FoldList::Fold& fold = list.folds[all_states / cache.state_heads];
  const Page* const pages = fold.pages;
  const int pending = fold.pending;
  // The row of φ and the column of v that this thread prepares, and of which tokens first.
  const int own = thread % kFoldTile, own_token = thread / kFoldTile;
  const bool own_row = first_row + own < cache.state_rows, own_column = first_column + own < cache.v_dim;
  const Feature feature = feature_of(cache.features, own_row ? first_row + own : 0);
  const int row = thread / 16 * kFoldRows, column = thread % 16 * 4, ld = padded(cache.v_dim);
  float* const state = cache.state_of(fold.state, head);
  float* const to = state + static_cast<int64_t>(first_row + row) * ld + first_column + column;
  float* const z = state + static_cast<int64_t>(cache.state_rows) * ld + first_row + own;
  const int rows = first_column + column < ld ? cache.state_rows - first_row - row : 0;
  const bool has_normalizer = cache.sum && first_column == 0 && thread < kFoldTile && own_row;

  wait_for_previous();
#pragma unroll
  for (int r = 0; r < kFoldRows; ++r)
    if (r < rows) prefetch(to + r * ld);
  const double end = cache.decay ? cache.total_until(pages, head, pending - 1) : 0;
  float sums[kFoldRows][4] = {};
  float normalizer = 0;
#pragma unroll 1
  for (int t0 = 0; t0 < pending; t0 += kPageTokens) {
    const Page page = pages[t0 / kPageTokens];
    const int count = min(kPageTokens, pending - t0);
    // The tokens of a head lie one behind the other.
    const T* const page_k = cache.template k_row<T>(page, head, 0);
    const T* const page_v = cache.template v_row<T>(page, head, 0) + first_column + own;
    T some_v[kOfThread];
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int t = own_token + i * kStep;
      some_v[i] = own_column && t < count ? __ldcg(page_v + t * cache.v_dim) : T(0.0f);
    }
    float weight = 1;  // of the token that is the lane's
    if (cache.decay && lane < count) weight = decay_factor(end - __ldcg(cache.total(page, head, lane)));
    __syncthreads();
#pragma unroll 1
    for (int first = thread; first < kPageTokens * cache.qk_dim; first += kOfThread * kFoldThreads) {
      T some_k[kOfThread];
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const int at = first + i * kFoldThreads;
        some_k[i] = at < count * cache.qk_dim ? __ldcg(page_k + at) : T(0.0f);
      }
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const int at = first + i * kFoldThreads;
        if (at < kPageTokens * cache.qk_dim) k[at] = to_float(some_k[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) v[own_token + i * kStep][own] = to_float(some_v[i]);
    __syncthreads();
#pragma unroll 4
    for (int t = own_token; t < kPageTokens; t += kStep) {
      const float weight_of_token = __shfl_sync(0xFFFFFFFFu, weight, t);
      // A series has a feature that is 1 where there is no token, too.
      phi[t][own] = own_row && t < count ? feature.of(k + t * cache.qk_dim) * weight_of_token : 0.0f;
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < kPageTokens; ++t) {
      const float4 x = *reinterpret_cast<const float4*>(&v[t][column]);
#pragma unroll
      for (int r = 0; r < kFoldRows; r += 4) {
        const float4 p = *reinterpret_cast<const float4*>(&phi[t][row + r]);
        const float by_row[4] = {p.x, p.y, p.z, p.w}, by_column[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[r + i][c] = fmaf(by_row[i], by_column[c], sums[r + i][c]);
      }
    }
    if (has_normalizer) {
#pragma unroll 8
      for (int t = 0; t < kPageTokens; ++t) normalizer += phi[t][own];
    }
  }

  const float left = cache.decay ? decay_factor(end) : 1.0f;
  float4 old[kFoldRows];
#pragma unroll
  for (int r = 0; r < kFoldRows; ++r)
    if (r < rows) old[r] = __ldcg(reinterpret_cast<const float4*>(to + r * ld));
#pragma unroll
  for (int r = 0; r < kFoldRows; ++r)
    if (r < rows)
      *reinterpret_cast<float4*>(to + r * ld) = {fmaf(left, old[r].x, sums[r][0]), fmaf(left, old[r].y, sums[r][1]),
                                                 fmaf(left, old[r].z, sums[r][2]), fmaf(left, old[r].w, sums[r][3])};
  if (has_normalizer) *z = fmaf(left, __ldcg(z), normalizer);
}

// Between the packed state and the public layout, element by element of the latter.
__global__ void convert_kernel(Cache cache, float* packed, float* open, int columns, int64_t count, bool to_packed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int column = static_cast<int>(i % columns);
  const int64_t row = i / columns % cache.state_rows, head = i / columns / cache.state_rows;
  const int ld = padded(cache.v_dim);
  float* place = packed + head * cache.state_numbers +
                 (column < cache.v_dim ? row * ld + column : static_cast<int64_t>(cache.state_rows) * ld + row);
  if (to_packed)
    *place = open[i];
  else
    open[i] = *place;
}

void convert(const MixerSpec& spec, const MixerShape& shape, const Tensor& packed, const Tensor& open, bool to_packed) {
  const int64_t count = open.elements();
  convert_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream(packed.device())>>>(
      cache_of(spec, shape, DType::f32), packed.data<float>(), open.data<float>(),
      static_cast<int>(shape.state_columns), count, to_packed);
  check_launch("mixer_cache");
}

// Words to write, as arguments of a kernel: no copy from the host that would have to be waited for.
struct WordList {
  static constexpr int kMost = 128;
  struct Word {
    uint64_t* to;
    uint64_t value;
  } words[kMost];
};

__global__ void write_words_kernel(const __grid_constant__ WordList list, int count) {
  wait_for_previous();
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) *list.words[i].to = list.words[i].value;
}

uint64_t word_of(const void* address) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(address));
}

const Page* table_of(const CacheSlot& slot) {
  return static_cast<const Page*>(slot.table.raw());
}

}  // namespace

int64_t head_state_numbers(const MixerShape& shape) {
  return shape.state_rows * padded(shape.v_dim) + padded(shape.state_rows);
}

CacheRecords new_records(const MixerShape& shape, int64_t slots, Device device) {
  return {Tensor::zeros({slots, static_cast<int64_t>(sizeof(SlotRecord) / sizeof(int32_t))}, DType::i32, device),
          Tensor::zeros({slots * (1 + shape.heads)}, DType::i32, device)};
}

void cache_slots_changed(const CacheRecords& records, std::vector<CacheSlot>& slots, std::span<const int32_t> changed) {
  constexpr int64_t kWords = sizeof(Page) / sizeof(int32_t), kFewest = 8;
  static_assert(sizeof(Page) == sizeof(uint64_t));
  const Device device = records.slots.device();
  WordList list;
  int count = 0;
  const auto flush = [&] {
    if (count > 0) launch_early(true, write_words_kernel, 1, WordList::kMost, 0, stream(device), list, count);
    count = 0;
  };
  const auto write = [&](void* to, uint64_t value) {
    list.words[count++] = {static_cast<uint64_t*>(to), value};
    if (count == WordList::kMost) flush();
  };
  for (int32_t index : changed) {
    CacheSlot& slot = slots[index];
    const auto pages = static_cast<int64_t>(slot.pages.size());
    slot.listed = std::min(slot.listed, pages);
    if (pages > 0 && (!slot.table || pages * kWords > slot.table.elements())) {
      slot.table = Tensor::empty({kWords * std::max(kFewest, 2 * pages)}, DType::i32, device);
      slot.listed = 0;
    }
    for (; slot.listed < pages; ++slot.listed)
      write(static_cast<Page*>(slot.table.raw()) + slot.listed, word_of(slot.pages[slot.listed].memory.raw()));
    auto* const record = static_cast<SlotRecord*>(records.slots.raw()) + index;
    write(&record->pages, word_of(slot.table.raw()));
    write(&record->state, word_of(slot.state.raw()));
    write(&record->pending, static_cast<uint32_t>(slot.pending) | static_cast<uint64_t>(slot.tokens) << 32);
  }
  flush();
}

namespace {

// TokenRows [1, tokens, heads, dim] into the pages of a slot, from token `first` on, or from there.
template <bool kToPage>
void move_tokens(const Cache& cache, const CacheSlot& slot, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                 int64_t first) {
  with_activation_type(k.dtype(), [&](auto zero) {
    using T = decltype(zero);
    move_kernel<typename OnDevice<T>::Type, kToPage><<<blocks_for(k.size(1), 1), kThreads, 0, stream(k.device())>>>(
        cache, table_of(slot), token_rows<T>(k), token_rows<T>(v),
        log_decay ? token_rows<float>(log_decay) : TokenRows<float>{}, static_cast<int>(first));
  });
  check_launch("mixer_cache.prefill");
}

}  // namespace

void cache_append(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay) {
  if (k.size(1) == 0) return;
  const Cache cache = cache_of(spec, shape, k.dtype());
  move_tokens<true>(cache, slot, k, v, log_decay, slot.pending);
  if (!spec.decay) return;
  sum_decay_kernel<<<blocks_for(shape.decay_heads, kThreads / 32), kThreads, 0, stream(k.device())>>>(
      cache, table_of(slot), static_cast<int>(slot.pending), static_cast<int>(slot.pending + k.size(1)));
  check_launch("mixer_cache.prefill");
}

void cache_gather(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot, const Tensor& k,
                  const Tensor& v, const Tensor& log_decay) {
  move_tokens<false>(cache_of(spec, shape, k.dtype()), slot, k, v, log_decay, 0);
}

void cache_sum_decay(const MixerSpec& spec, const MixerShape& shape, const CacheSlot& slot) {
  sum_decay_kernel<<<blocks_for(shape.decay_heads, kThreads / 32), kThreads, 0, stream(slot.table.device())>>>(
      cache_of(spec, shape, slot.pages[0].k.dtype()), table_of(slot), 0, static_cast<int>(slot.pending));
  check_launch("mixer_cache");
}

void cache_fold(const MixerSpec& spec, const MixerShape& shape, std::span<const CacheFold> folds) {
  const int row_tiles = divide_up(shape.state_rows, kFoldTile), column_tiles = divide_up(shape.v_dim, kFoldTile);
  while (!folds.empty()) {
    FoldList list;
    const size_t count = std::min<size_t>(folds.size(), FoldList::kMost);
    for (size_t i = 0; i < count; ++i)
      list.folds[i] = {table_of(*folds[i].slot), folds[i].state.data<float>(),
                       static_cast<int>(folds[i].slot->pending)};
    const int64_t blocks = static_cast<int64_t>(count) * shape.state_heads * row_tiles * column_tiles;
    const DType dtype = folds[0].slot->pages[0].k.dtype();
    with_activation_type(dtype, [&](auto zero) {
      using T = typename OnDevice<decltype(zero)>::Type;
      launch_early(true, fold_kernel<T>, blocks_for(blocks, 1), kFoldThreads, 0, stream(folds[0].state.device()),
                   cache_of(spec, shape, dtype), list, row_tiles, column_tiles);
    });
    folds = folds.subspan(count);
  }
}

void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state) {
  convert(spec, shape, state, from, true);
}

void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to) {
  convert(spec, shape, state, to, false);
}

}  // namespace furious::cuda
