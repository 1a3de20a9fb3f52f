// Common to all CUDA code. All work of a device is launched on one stream, so memory of a released tensor can be reused
// by the next tensor immediately. Exceptions: a thread that captures a graph launches on a private stream
// (device_cuda.h), and asynchronous copies from and to the host use others (tensor/host_copy.h, tensor/feed.h).
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

// The device's stream, or this thread's CaptureStream; makes the device current.
cudaStream_t stream(Device device);

// Held during launches that must not be interleaved with those of other threads: the launches of a cuBLASLt product,
// which may be several kernels with one workspace, and therefore those of a graph that contains such products.
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

// The device type of a host element type.
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

}  // namespace furious::cuda
