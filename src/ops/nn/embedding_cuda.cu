#include <cub/device/device_radix_sort.cuh>

#include "gpu/rows.cuh"
#include "ops/nn/embedding_kernels.h"

namespace furious::cuda {
namespace {

template <class T>
struct Gather {
  T* y;
  const float* table;
  const int32_t* ids;
  int64_t dim;

  template <int N>
  __device__ void run(int64_t token, int column) const {
    float row[N];
    load(row, table + ids[token] * dim + column);
    store(y + token * dim + column, row);
  }
};

__global__ void number_kernel(int32_t* out, unsigned count) {
  const unsigned i = blockIdx.x * kRowThreads + threadIdx.x;  // may pass INT32_MAX in the last block
  if (i < count) out[i] = static_cast<int32_t>(i);
}

// Tokens sorted by id, in the order of the text within an id; a run is the stretch of one id.
struct Sorted {
  const int32_t* ids;
  const int32_t* tokens;
  int count;
};

constexpr int kChunk = 32;
constexpr int kAhead = 8;
constexpr int kWarps = 4;

template <int N>
__device__ void add_to_row(float* to, const float (&sum)[N], bool holds_sum) {
  float total[N] = {};
  if (holds_sum) load(total, to);
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] += sum[i];
  store(to, total);
}

// A warp takes kChunk sorted tokens and 32 N columns. A run that lies in its chunk goes straight to dtable. Of a run
// that came in from the chunk before, the sum goes to partials[chunk][0]; of one that starts here and goes on, to
// partials[chunk][1].
template <class T, int N>
__global__ void sum_chunks_kernel(float* dtable, float* partials, const T* dy, Sorted sorted, int dim, bool holds_sum) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  const int64_t first = chunk * kChunk;
  if (first >= sorted.count) return;
  const int column = static_cast<int>(blockIdx.y * 32) * N + lane * N;
  const int size = static_cast<int>(min(static_cast<int64_t>(kChunk), sorted.count - first));
  const int32_t my_id = lane < size ? sorted.ids[first + lane] : -1;
  const int32_t my_token = lane < size ? sorted.tokens[first + lane] : 0;
  const int32_t id_before = first > 0 ? sorted.ids[first - 1] : -1;
  const int32_t id_behind = first + size < sorted.count ? sorted.ids[first + size] : -1;
  const bool active = column < dim;
  bool came_in = __shfl_sync(0xFFFFFFFFu, my_id, 0) == id_before;
  float sum[N] = {};
  for (int group = 0; group < size; group += kAhead) {
    float next[kAhead][N];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t token = __shfl_sync(0xFFFFFFFFu, my_token, group + j);
      if (active && group + j < size) load(next[j], dy + token * dim + column);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int at = group + j;
      const int32_t id = __shfl_sync(0xFFFFFFFFu, my_id, at);
      const int32_t following = __shfl_sync(0xFFFFFFFFu, my_id, (at + 1) % kChunk);
      if (!active || at >= size) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += next[j][i];
      const bool goes_on = at + 1 == size && id == id_behind;
      if (at + 1 < size && id == following) continue;
      if (came_in)
        store(partials + 2 * chunk * dim + column, sum);
      else if (goes_on)
        store(partials + (2 * chunk + 1) * dim + column, sum);
      else
        add_to_row(dtable + static_cast<int64_t>(id) * dim + column, sum, holds_sum);
      came_in = false;
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = 0;
    }
  }
}

// A warp for each chunk in which a run starts that goes on: adds up the run's pieces, in order.
template <int N>
__global__ void join_chunks_kernel(float* dtable, const float* partials, Sorted sorted, int dim, bool holds_sum) {
  const int column = static_cast<int>(blockIdx.y * 32 + threadIdx.x) * N;
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  const int64_t behind = (chunk + 1) * kChunk;
  if (column >= dim || behind >= sorted.count) return;
  const int32_t id = sorted.ids[behind];
  const int64_t first = chunk * kChunk;
  if (sorted.ids[behind - 1] != id) return;
  if (first > 0 && sorted.ids[first - 1] == id) return;
  float sum[N];
  load(sum, partials + (2 * chunk + 1) * dim + column);
#pragma unroll 4
  for (int64_t next = chunk + 1; next * kChunk < sorted.count && sorted.ids[next * kChunk] == id; ++next) {
    float piece[N];
    load(piece, partials + 2 * next * dim + column);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += piece[i];
  }
  add_to_row(dtable + static_cast<int64_t>(id) * dim + column, sum, holds_sum);
}

}  // namespace

void embedding_forward(const Tensor& y, const Tensor& table, const Tensor& tokens) {
  with_activation_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Gather<typename OnDevice<T>::Type> f{pointer<T>(y), table.data<float>(), tokens.data<int32_t>(),
                                               table.size(1)};
    const auto rows_of_y = rows<T>(y);
    map_rows<kLanes<T>>(y.device(), tokens.elements(), f.dim, f, rows_of_y, f.table);
  });
}

void embedding_backward(const GradientTarget& dtable, const Tensor& dy, const Tensor& tokens) {
  const Device device = dy.device();
  const cudaStream_t s = stream(device);
  if (!dtable.holds_sum) memory::clear(device, dtable.tensor.raw(), dtable.tensor.bytes());
  if (dy.elements() == 0) return;
  require(tokens.elements() <= INT32_MAX, "embedding backward: {} tokens are more than CUDA can sort",
          tokens.elements());
  const int count = static_cast<int>(tokens.elements());
  const int dim = static_cast<int>(dtable.tensor.size(1));

  const Tensor numbers = Tensor::empty({3, count}, DType::i32, device);
  int32_t* const in_order = numbers.data<int32_t>();
  int32_t* const sorted_ids = in_order + count;
  int32_t* const sorted_tokens = sorted_ids + count;
  number_kernel<<<blocks_for(count, kRowThreads), kRowThreads, 0, s>>>(in_order, static_cast<unsigned>(count));
  const int bits = std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(dtable.tensor.size(0) - 1))));
  size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    check(cub::DeviceRadixSort::SortPairs(scratch, bytes, tokens.data<int32_t>(), sorted_ids, in_order, sorted_tokens,
                                          count, 0, bits, s),
          "embedding backward");
  };
  sort(nullptr);
  const Tensor scratch = Tensor::empty({static_cast<int64_t>(bytes / 4 + 1)}, DType::i32, device);
  sort(scratch.raw());

  const Sorted sorted{sorted_ids, sorted_tokens, count};
  const int64_t chunks = (count + int64_t{kChunk} - 1) / kChunk;
  const Tensor partials = Tensor::empty({chunks, 2, dim}, DType::f32, device);
  with_activation_type(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    float* const to = dtable.tensor.data<float>();
    const auto from = rows<T>(dy);
    with_lanes<kLanes<T>>(
        [&](auto lanes) {
          const dim3 grid(blocks_for(chunks, kWarps), blocks_for(dim, 32 * lanes)), block(32, kWarps);
          sum_chunks_kernel<typename OnDevice<T>::Type, lanes>
              <<<grid, block, 0, s>>>(to, partials.data<float>(), from.data, sorted, dim, dtable.holds_sum);
          join_chunks_kernel<lanes><<<grid, block, 0, s>>>(to, partials.data<float>(), sorted, dim, dtable.holds_sum);
        },
        from, to);
  });
  check_launch("embedding backward");
}

}  // namespace furious::cuda
