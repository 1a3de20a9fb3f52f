// Kernels that walk rows: wide loads and stores, a loop over the elements of rows, and sums over columns.
#pragma once

#include <bit>

#include "tensor/cuda.cuh"

namespace furious::cuda {

// A tensor seen as rows, as Rows of ops/rows.h on the CPU: the innermost dimension is a row, however the rows are
// strided.
template <class T>
struct DeviceRows {
  T* data;
  int64_t count = 1, size = 0;
  int rank = 0;
  int64_t sizes[Shape::kMaxRank - 1] = {}, strides[Shape::kMaxRank - 1] = {};

  __device__ T* operator[](int64_t row) const {
    if (rank == 0) return data;
    // Divisions of 64 bits take several times as long.
    return count <= UINT32_MAX ? at(static_cast<uint32_t>(row)) : at(row);
  }

 private:
  template <class Index>
  __device__ T* at(Index row) const {
    int64_t offset = 0;
    // Unrolled, so that indices are constants: otherwise each thread keeps a copy of the arrays in local memory.
#pragma unroll
    for (int i = Shape::kMaxRank - 2; i > 0; --i) {
      if (i >= rank) continue;
      const auto size = static_cast<Index>(sizes[i]);
      offset += static_cast<int64_t>(row % size) * strides[i];
      row /= size;
    }
    return data + offset + static_cast<int64_t>(row) * strides[0];
  }
};

template <class T>
auto rows(const Tensor& tensor) {
  DeviceRows<typename OnDevice<T>::Type> r;
  r.data = pointer<T>(tensor);
  r.size = tensor.size(-1);
  for (int i = 0; i + 1 < tensor.rank(); ++i) {
    const int64_t size = tensor.size(i), stride = tensor.stride(i);
    r.count *= size;
    // Dimensions that follow each other evenly in memory become one.
    if (r.rank > 0 && (r.strides[r.rank - 1] == size * stride || r.sizes[r.rank - 1] == 1))
      r.sizes[r.rank - 1] *= size;
    else
      r.sizes[r.rank++] = size;
    r.strides[r.rank - 1] = stride;
  }
  return r;
}

// Elements of one 16-byte access: what a thread loads at a time where rows allow it.
template <class T>
inline constexpr int kLanes = 16 / sizeof(typename OnDevice<T>::Type);

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using Type = uint4;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<2> {
  using Type = uint16_t;
};
template <class T, int N>
inline constexpr int kWordBytes = N * sizeof(T) < 16 ? N * sizeof(T) : 16;

// N neighbours in accesses of up to 16 bytes; `aligned` says whether a pointer allows that.
template <int N, class T>
__device__ void load(float (&to)[N], const T* from) {
  using Access = typename Word<kWordBytes<T, N>>::Type;
  alignas(16) T raw[N];
#pragma unroll
  for (int i = 0; i < static_cast<int>(N * sizeof(T) / sizeof(Access)); ++i)
    reinterpret_cast<Access*>(raw)[i] = reinterpret_cast<const Access*>(from)[i];
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(raw[i]);
}

template <int N, class T>
__device__ void store(T* to, const float (&from)[N]) {
  using Access = typename Word<kWordBytes<T, N>>::Type;
  alignas(16) T raw[N];
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = from_float<T>(from[i]);
#pragma unroll
  for (int i = 0; i < static_cast<int>(N * sizeof(T) / sizeof(Access)); ++i)
    reinterpret_cast<Access*>(to)[i] = reinterpret_cast<const Access*>(raw)[i];
}

// The same as they lie in memory, loaded ahead and unpacked when they are needed.
template <class T, int N>
struct alignas(kWordBytes<T, N>) Pack {
  T raw[N];

  __device__ void fetch(const T* from) { *this = *reinterpret_cast<const Pack*>(from); }
  __device__ void unpack(float (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(raw[i]);
  }
};

template <int N, class T>
bool aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kWordBytes<T, N> == 0;
}
template <int N, class T>
bool aligned(const DeviceRows<T>& rows) {
  bool fits = aligned<N>(rows.data) && rows.size % N == 0;
  for (int i = 0; i < rows.rank; ++i) fits = fits && rows.strides[i] % N == 0;
  return fits;
}

// A [batch, length, ...] tensor by row of the batch and token.
template <class T>
struct Tokens {
  T* data;
  int64_t batch_stride, token_stride;

  __device__ T* at(int64_t batch, int64_t token) const { return data + batch * batch_stride + token * token_stride; }
};
template <class T>
auto tokens(const Tensor& tensor) {
  return Tokens<typename OnDevice<T>::Type>{pointer<T>(tensor), tensor.stride(0), tensor.stride(1)};
}
template <int N, class T>
bool aligned(const Tokens<T>& tokens) {
  return aligned<N>(tokens.data) && tokens.batch_stride % N == 0 && tokens.token_stride % N == 0;
}

// Calls f with N as a compile-time constant if everything in `memory` allows accesses of N neighbours, else with 1.
template <int N, class F, class... Memory>
void with_lanes(F&& f, const Memory&... memory) {
  if ((aligned<N>(memory) && ...))
    f(std::integral_constant<int, N>());
  else
    f(std::integral_constant<int, 1>());
}

inline constexpr int kRowThreads = 256;

template <int N, class F>
__global__ void map_rows_kernel(F f, int64_t first_row, uint32_t packs, uint32_t items) {
  const uint32_t item = blockIdx.x * kRowThreads + threadIdx.x;
  if (item < items) f.template run<N>(first_row + item / packs, static_cast<int>(item % packs) * N);
}

// f.run<N>(row, column) for every N neighbours of `count` rows of `size` elements; N is `Lanes` where `memory` allows.
// A launch counts in 32 bits, whose divisions are fast: more rows than that are several launches.
template <int Lanes, class F, class... Memory>
void map_rows(Device device, int64_t count, int64_t size, const F& f, const Memory&... memory) {
  if (count * size == 0) return;
  require(size <= INT32_MAX, "a CUDA kernel for rows of {} numbers: more than it can count; use shorter rows", size);
  with_lanes<Lanes>(
      [&](auto lanes) {
        constexpr int N = lanes;
        const int64_t packs = size / N, most_rows = INT32_MAX / packs;
        for (int64_t first = 0; first < count; first += most_rows) {
          const int64_t items = std::min(most_rows, count - first) * packs;
          map_rows_kernel<N><<<blocks_for(items, kRowThreads), kRowThreads, 0, stream(device)>>>(
              f, first, static_cast<uint32_t>(packs), static_cast<uint32_t>(items));
        }
      },
      memory...);
  check_launch("rows");
}

// out[column] = Σ_row partials[row · stride + column], in one order. The second stage of a sum over many rows.
void sum_rows(const Tensor& out, const float* partials, int64_t rows, int64_t stride);

template <int N, class F>
__global__ void sum_columns_kernel(F f, int64_t rows, int columns, float* partials) {
  __shared__ float shared[kRowThreads * N];
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * N;
  float sum[N] = {};
  if (column < columns) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += step)
      f.template run<N>(row, column, sum);
  }
  const unsigned place = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < N; ++i) shared[i * kRowThreads + place] = sum[i];
  __syncthreads();
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half)
#pragma unroll
      for (int i = 0; i < N; ++i)
        shared[i * kRowThreads + place] += shared[i * kRowThreads + place + half * blockDim.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < columns)
#pragma unroll
    for (int i = 0; i < N; ++i)
      partials[static_cast<int64_t>(blockIdx.x) * columns + column + i] = shared[i * kRowThreads + place];
}

// f.run<N>(row, column, sum) for every N neighbours of `rows` rows; what it adds to sum[N] ends in out [columns], if
// that is defined. The order depends on the sizes alone.
template <int Lanes, class F, class... Memory>
void sum_columns(Device device, const Tensor& out, int64_t rows, int64_t columns, const F& f, const Memory&... memory) {
  if (rows * columns == 0) {
    if (out) sum_rows(out, nullptr, 0, columns);
    return;
  }
  require(columns <= INT32_MAX, "a CUDA kernel for {} columns: more than it can count", columns);
  with_lanes<Lanes>(
      [&](auto lanes) {
        constexpr int N = lanes;
        const int64_t packs = columns / N;
        const auto width = std::bit_ceil(static_cast<unsigned>(std::min<int64_t>(packs, kRowThreads)));
        const dim3 block(width, kRowThreads / width);
        const unsigned across = blocks_for(packs, width);
        // Enough blocks to fill a GPU, but not too many for the second stage.
        const unsigned down = std::min(blocks_for(rows, 2 * block.y), std::max(1u, 1024 / across));
        const Tensor partials = Tensor::empty(Shape{down, columns}, DType::f32, device);
        sum_columns_kernel<N><<<dim3(down, across), block, 0, stream(device)>>>(f, rows, static_cast<int>(columns),
                                                                                partials.data<float>());
        check_launch("column sums");
        if (out) sum_rows(out, partials.data<float>(), down, columns);
      },
      memory...);
}

}  // namespace furious::cuda
