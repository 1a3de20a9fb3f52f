#include "ops/mixer/recurrent.cuh"
#include "tensor/launch.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;

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
// columns of one head's state, a thread 4 × 4 of them. A fold of all layers is what every so many tokens wait for: the
// blocks of a head of 64 all fit on the multiprocessors at once, and a block asks for its state first and for all k and
// v of a page together.
constexpr int kFoldTile = 64, kFoldTokens = kPageTokens, kFoldBlocks = 4;

template <class T>
__global__ void __launch_bounds__(kThreads, kFoldBlocks)
    fold_kernel(Cache cache, float* states, int64_t state_numbers, int pending, int row_tiles, int column_tiles) {
  constexpr int kWarps = kThreads / 32, kOfWarp = kFoldTokens / kWarps;
  static_assert(kFoldTokens % kWarps == 0 && kFoldTile == 2 * 32);
  __shared__ float k[kFoldTokens * kLargestDim];
  __shared__ alignas(16) float phi[kFoldTokens][kFoldTile];
  __shared__ alignas(16) float v[kFoldTokens][kFoldTile];
  __shared__ float weights[kFoldTokens];
  start_next();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t sequence_head = blockIdx.x / (row_tiles * column_tiles);
  const int tile = static_cast<int>(blockIdx.x % (row_tiles * column_tiles));
  const int first_row = tile / column_tiles * kFoldTile, first_column = tile % column_tiles * kFoldTile;
  const int batch = static_cast<int>(sequence_head / cache.heads);
  const int head = static_cast<int>(sequence_head % cache.heads);
  const int own = thread % kFoldTile;  // the row of φ that this thread prepares
  const bool own_row = first_row + own < cache.state_rows;
  const Feature feature(cache.score, own_row ? first_row + own : 0, cache.qk_dim);
  const int row = thread / 16 * 4, column = thread % 16 * 4, ld = padded(cache.v_dim);
  float4* const state = reinterpret_cast<float4*>(states + sequence_head * state_numbers +
                                                  static_cast<int64_t>(first_row + row) * ld + first_column + column);
  float* const z =
      states + sequence_head * state_numbers + static_cast<int64_t>(cache.state_rows) * ld + first_row + own;
  const int rows = first_column + column < ld ? min(4, cache.state_rows - first_row - row) : 0;
  const bool has_normalizer = cache.sum && first_column == 0 && thread < kFoldTile && own_row;

  wait_for_previous();
  float4 old[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) old[r] = r < rows ? __ldcg(state + r * (ld / 4)) : float4{0, 0, 0, 0};
  const double end = cache.decay ? __ldcg(cache.total_of(sequence_head, pending - 1)) : 0;
  float sums[4][4] = {};
  float normalizer = 0;  // of row `own`, in the first 64 threads
#pragma unroll 1
  for (int t0 = 0; t0 < pending; t0 += kFoldTokens) {
    const Page page = cache.pages[t0 / kPageTokens];
    __syncthreads();
    // A warp has some of the tokens.
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const int t = warp + i * kWarps;
      const bool there = t0 + t < pending;
      float weight = there ? 1.0f : 0.0f;
      if (cache.decay && there) weight = decay_factor(end - __ldcg(page.total + cache.decay_at(sequence_head, t)));
      if (lane == 0) weights[t] = weight;
      const T* const from_k = cache.template k_row<T>(page, batch, head, t);
      const T* const from_v = cache.template v_row<T>(page, batch, head, t) + first_column;
      for (int c = lane; c < cache.qk_dim; c += 32) k[t * cache.qk_dim + c] = there ? to_float(__ldcg(from_k + c)) : 0;
#pragma unroll
      for (int c = lane; c < kFoldTile; c += 32)
        v[t][c] = there && first_column + c < cache.v_dim ? to_float(__ldcg(from_v + c)) * weight : 0;
    }
    __syncthreads();
    for (int t = thread / kFoldTile; t < kFoldTokens; t += kThreads / kFoldTile)
      phi[t][own] = own_row ? feature.of(k + t * cache.qk_dim) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kFoldTokens; ++t) {
      const float4 p = *reinterpret_cast<const float4*>(&phi[t][row]);
      const float4 x = *reinterpret_cast<const float4*>(&v[t][column]);
      const float rows_of[4] = {p.x, p.y, p.z, p.w}, columns[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[r][c] = fmaf(rows_of[r], columns[c], sums[r][c]);
    }
    if (has_normalizer)
      for (int t = 0; t < kFoldTokens; ++t) normalizer = fmaf(phi[t][thread], weights[t], normalizer);
  }

  const float left = cache.decay ? decay_factor(end) : 1.0f;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float4 x = old[r];
    x.x = fmaf(left, x.x, sums[r][0]);
    x.y = fmaf(left, x.y, sums[r][1]);
    x.z = fmaf(left, x.z, sums[r][2]);
    x.w = fmaf(left, x.w, sums[r][3]);
    if (r < rows) state[r * (ld / 4)] = x;
  }
  if (has_normalizer) *z = fmaf(left, __ldcg(z), normalizer);
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

// The next kernel starts when this one has ended: a step may read the state before it waits.
__global__ void list_pages_kernel(Page* table, PageList list, int count, int* counters, int pending, int tokens) {
  wait_for_previous();
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) table[i] = list.pages[i];
  if (i == 0) counters[kPending] = pending;
  if (i == 0) counters[kTokens] = tokens;
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
    launch_early(true, list_pages_kernel, 1, PageList::kMost, 0, stream(device),
                 static_cast<Page*>(window.table.raw()) + window.listed, list, static_cast<int>(some),
                 window.counters.data<int32_t>(), static_cast<int>(window.pending), static_cast<int>(window.tokens));
    window.listed += some;
  } while (window.listed < count);
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
    launch_early(true, fold_kernel<T>, blocks_for(blocks, 1), kThreads, 0, stream(state.device()),
                 cache_of(spec, shape, window), state.data<float>(), state.stride(1), static_cast<int>(window.pending),
                 row_tiles, column_tiles);
  });
}

void cache_load(const MixerSpec& spec, const MixerShape& shape, const Tensor& from, const Tensor& state) {
  convert(spec, shape, state, from, true);
}

void cache_store(const MixerSpec& spec, const MixerShape& shape, const Tensor& state, const Tensor& to) {
  convert(spec, shape, state, to, false);
}

}  // namespace furious::cuda
