#include "gpu/rows.cuh"
#include "ops/elementwise_kernels.h"

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

// Eight elements as they are loaded and stored, 16 bytes at a time.
template <class T>
struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight {
  T x[8];
};

bool aligned(const Tensor& tensor) {
  return tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.raw()) % 16 == 0;
}

// Both contiguous and aligned.
template <class To, class From>
__global__ void copy_dense_kernel(To* __restrict__ out, const From* __restrict__ in, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i * 8 + 8 <= count) {
    const Eight<From> from = reinterpret_cast<const Eight<From>*>(in)[i];
    Eight<To> to;
#pragma unroll
    for (int e = 0; e < 8; ++e) to.x[e] = converted<To>(from.x[e]);
    reinterpret_cast<Eight<To>*>(out)[i] = to;
  } else {
    for (int64_t e = i * 8; e < count; ++e) out[e] = converted<To>(in[e]);
  }
}

template <class T>
__global__ void add_kernel(Elements<T> out, Elements<T> in, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(to_float(out[i]) + to_float(in[i]));
}

template <class T>
__global__ void add_dense_kernel(T* __restrict__ out, const T* __restrict__ in, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i * 8 + 8 <= count) {
    const Eight<T> from = reinterpret_cast<const Eight<T>*>(in)[i];
    Eight<T> sum = reinterpret_cast<const Eight<T>*>(out)[i];
#pragma unroll
    for (int e = 0; e < 8; ++e) sum.x[e] = from_float<T>(to_float(sum.x[e]) + to_float(from.x[e]));
    reinterpret_cast<Eight<T>*>(out)[i] = sum;
  } else {
    for (int64_t e = i * 8; e < count; ++e) out[e] = from_float<T>(to_float(out[e]) + to_float(in[e]));
  }
}

// Rows of strided views, such as parts of a fused projection and of its gradient.
template <class T>
struct AddRows {
  DeviceRows<T> out, in;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float sum[N], added[N];
    T* const to = out[row] + column;
    load(sum, to);
    load(added, in[row] + column);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += added[i];
    store(to, sum);
  }
};

template <class To, class From>
struct CopyRows {
  DeviceRows<To> out;
  DeviceRows<From> in;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    Pack<From, N> from;
    from.fetch(in[row] + column);
    Pack<To, N> to;
#pragma unroll
    for (int i = 0; i < N; ++i) to.raw[i] = converted<To>(from.raw[i]);
    *reinterpret_cast<Pack<To, N>*>(out[row] + column) = to;
  }
};

bool has_strided_rows(const Tensor& tensor) {
  return tensor.rank() > 1 && tensor.stride(-1) == 1 && !tensor.is_contiguous();
}

template <class To, class From>
void copy_as(const Tensor& out, const Tensor& in) {
  const int64_t count = out.elements();
  const cudaStream_t s = stream(out.device());
  constexpr bool kActivations = sizeof(To) <= 4 && sizeof(From) <= 4;
  if (aligned(out) && aligned(in)) {
    copy_dense_kernel<<<blocks_for(count, 8 * kThreads), kThreads, 0, s>>>(pointer<To>(out), pointer<From>(in), count);
  } else if (const bool strided = has_strided_rows(out) || has_strided_rows(in);
             kActivations && strided && out.stride(-1) == 1 && in.stride(-1) == 1) {
    if constexpr (kActivations) {
      const CopyRows<typename OnDevice<To>::Type, typename OnDevice<From>::Type> f{rows<To>(out), rows<From>(in)};
      map_rows<std::min(kLanes<To>, kLanes<From>)>(out.device(), f.out.count, f.out.size, f, f.out, f.in);
    }
  } else {
    copy_kernel<<<blocks_for(count, kThreads), kThreads, 0, s>>>(elements<To>(out), elements<From>(in), count);
  }
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
    if (aligned(out) && aligned(in)) {
      add_dense_kernel<<<blocks_for(count, 8 * kThreads), kThreads, 0, s>>>(pointer<T>(out), pointer<T>(in), count);
    } else if (has_strided_rows(out) || has_strided_rows(in)) {
      const AddRows<typename OnDevice<T>::Type> f{rows<T>(out), rows<T>(in)};
      map_rows<kLanes<T>>(out.device(), f.out.count, f.out.size, f, f.out, f.in);
    } else {
      add_kernel<<<blocks_for(count, kThreads), kThreads, 0, s>>>(elements<T>(out), elements<T>(in), count);
    }
  });
  check_launch("add_into");
}

}  // namespace furious::cuda
