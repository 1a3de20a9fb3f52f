// What every CUDA kernel of ours needs. Work of a device goes to one stream, in order: memory that a tensor has left
// may be given to the next one at once. A thread that captures a graph has a stream of its own meanwhile
// (device_cuda.h), and copies from and to the host have others (tensor/host_copy.h, tensor/feed.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "base/error.h"
#include "tensor/tensor.h"

namespace furious::cuda {

// The device's stream; makes the device current.
cudaStream_t stream(Device device);

// Held while several launches must follow each other on the device's stream with no other thread's launch between them:
// those of one cuBLASLt product, which share its workspace, and so those of a graph that contains such products.
std::mutex& launch_mutex(Device device);

inline void check(cudaError_t status, std::string_view what) {
  require(status == cudaSuccess, "{}: {}", what, cudaGetErrorString(status));
}
inline void check_launch(std::string_view what) {
  check(cudaGetLastError(), what);
}

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(std::max<int64_t>(1, (items + per_block - 1) / per_block));
}

// The type that device code uses for a dtype of ours.
template <class T>
struct OnDevice {
  using Type = T;
};
template <>
struct OnDevice<bfloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct OnDevice<float16> {
  using Type = __half;
};

template <class T>
typename OnDevice<T>::Type* pointer(const Tensor& tensor) {
  return reinterpret_cast<typename OnDevice<T>::Type*>(tensor.data<T>());
}

// Calls f with a value of the device type of an activation: f32 or bf16.
template <class F>
void with_activation_type(DType dtype, F&& f) {
  if (dtype == DType::bf16)
    f(bfloat16{});
  else
    f(float{});
}

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
__device__ inline double to_float(double x) {
  return x;
}

template <class T>
__device__ T from_float(float x) {
  return static_cast<T>(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// Sums over the 32 threads of a warp, and over a block of up to 1024 threads; every thread gets the sum. The order is
// always the same. `shared` holds 32 floats; the block must meet at a barrier before it uses them again.
__device__ inline float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
  return x;
}
__device__ inline float block_sum(float x, float* shared) {
  const unsigned warps = (blockDim.x + 31) / 32;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0.0f);
}

// A tensor seen as rows, as ops/rows.h has it on the CPU: the innermost dimension is a row, however the rows are
// strided.
template <class T>
struct Rows {
  T* data;
  int64_t count = 1, size = 0;
  int rank = 0;
  int64_t sizes[Shape::kMaxRank - 1] = {}, strides[Shape::kMaxRank - 1] = {};

  __device__ T* operator[](int64_t row) const {
    if (rank == 0) return data;
    int64_t offset = 0;
    // Unrolled, so that indices are constants: otherwise each thread keeps a copy of the arrays in local memory.
#pragma unroll
    for (int i = Shape::kMaxRank - 2; i > 0; --i) {
      if (i >= rank) continue;
      offset += row % sizes[i] * strides[i];
      row /= sizes[i];
    }
    return data + offset + row * strides[0];
  }
};

template <class T>
auto rows(const Tensor& tensor) {
  Rows<typename OnDevice<T>::Type> r;
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

}  // namespace furious::cuda
