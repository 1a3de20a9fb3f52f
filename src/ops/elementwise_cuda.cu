#include "ops/elementwise.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int64_t kThreads = 256;

// A tensor of any strides, element by element.
template <class T>
struct Elements {
  T* data;
  int rank;
  int64_t sizes[Shape::kMaxRank], strides[Shape::kMaxRank];

  __device__ T& operator[](int64_t index) const {
    int64_t offset = 0;
    for (int i = rank - 1; i >= 0; --i) {
      offset += index % sizes[i] * strides[i];
      index /= sizes[i];
    }
    return data[offset];
  }
};

template <class T>
auto elements(const Tensor& tensor) {
  Elements<typename OnDevice<T>::Type> e{pointer<T>(tensor), tensor.is_contiguous() ? 1 : tensor.rank(), {}, {}};
  if (tensor.is_contiguous()) {
    e.sizes[0] = tensor.elements();
    e.strides[0] = 1;
  }
  for (int i = 0; i < tensor.rank() && !tensor.is_contiguous(); ++i) {
    e.sizes[i] = tensor.size(i);
    e.strides[i] = tensor.stride(i);
  }
  return e;
}

template <class T>
__global__ void fill_kernel(Elements<T> out, int64_t count, float value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(value);
}

template <class To, class From>
__device__ To converted(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else
    return from_float<To>(static_cast<float>(to_float(x)));
}

template <class To, class From>
__global__ void copy_kernel(Elements<To> out, Elements<From> in, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = converted<To>(in[i]);
}

// Both contiguous: eight at a time, so that loads and stores are wide.
template <class To, class From>
__global__ void copy_dense_kernel(To* out, const From* in, int64_t count) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (first + 8 <= count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[first + i] = converted<To>(in[first + i]);
  } else {
    for (int64_t i = first; i < count; ++i) out[i] = converted<To>(in[i]);
  }
}

template <class T>
__global__ void add_kernel(Elements<T> out, Elements<T> in, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(to_float(out[i]) + to_float(in[i]));
}

template <class T>
__global__ void add_dense_kernel(T* __restrict__ out, const T* __restrict__ in, int64_t count) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (first + 8 <= count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[first + i] = from_float<T>(to_float(out[first + i]) + to_float(in[first + i]));
  } else {
    for (int64_t i = first; i < count; ++i) out[i] = from_float<T>(to_float(out[i]) + to_float(in[i]));
  }
}

template <class To, class From>
void copy_as(const Tensor& out, const Tensor& in) {
  const int64_t count = out.elements();
  const cudaStream_t s = stream(out.device());
  if (out.is_contiguous() && in.is_contiguous())
    copy_dense_kernel<<<blocks_for(count, 8 * kThreads), kThreads, 0, s>>>(pointer<To>(out), pointer<From>(in), count);
  else
    copy_kernel<<<blocks_for(count, kThreads), kThreads, 0, s>>>(elements<To>(out), elements<From>(in), count);
  check_launch("copy");
}

}  // namespace

void fill(const Tensor& out, float value) {
  if (out.elements() == 0) return;
  with_float_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    fill_kernel<<<blocks_for(out.elements(), kThreads), kThreads, 0, stream(out.device())>>>(elements<T>(out),
                                                                                          out.elements(), value);
  });
  check_launch("fill");
}

void copy(const Tensor& out, const Tensor& in) {
  if (out.elements() == 0) return;
  if (out.dtype() == DType::i32) return copy_as<int32_t, int32_t>(out, in);
  with_float_type(out.dtype(), [&](auto to) {
    with_float_type(in.dtype(), [&](auto from) { copy_as<decltype(to), decltype(from)>(out, in); });
  });
}

void add_into(const Tensor& out, const Tensor& in) {
  if (out.elements() == 0) return;
  const int64_t count = out.elements();
  const cudaStream_t s = stream(out.device());
  with_activation_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (out.is_contiguous() && in.is_contiguous())
      add_dense_kernel<<<blocks_for(count, 8 * kThreads), kThreads, 0, s>>>(pointer<T>(out), pointer<T>(in), count);
    else
      add_kernel<<<blocks_for(count, kThreads), kThreads, 0, s>>>(elements<T>(out), elements<T>(in), count);
  });
  check_launch("add_into");
}

}  // namespace furious::cuda
