#include "gpu/rows.cuh"
#include "ops/nn/activation.cuh"
#include "ops/nn/activation_kernels.h"

namespace furious::cuda {
namespace {

template <class T, Activation kActivation>
struct Forward {
  DeviceRows<T> y, x;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float v[N];
    load(v, x[row] + column);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = activate<kActivation>(v[i]);
    store(y[row] + column, v);
  }
};

template <class T, Activation kActivation>
struct Backward {
  DeviceRows<T> dx, dy, x;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float v[N], d[N];
    load(v, x[row] + column);
    load(d, dy[row] + column);
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] = activation_gradient<kActivation>(v[i], d[i]);
    store(dx[row] + column, d);
  }
};

}  // namespace

void activation_forward(const Tensor& y, const Tensor& x, Activation activation) {
  with_activation_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_activation(activation, [&](auto kind) {
      const Forward<typename OnDevice<T>::Type, kind> f{rows<T>(y), rows<T>(x)};
      map_rows<kLanes<T>>(x.device(), f.x.count, f.x.size, f, f.y, f.x);
    });
  });
}

void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation) {
  with_activation_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_activation(activation, [&](auto kind) {
      const Backward<typename OnDevice<T>::Type, kind> f{rows<T>(dx), rows<T>(dy), rows<T>(x)};
      map_rows<kLanes<T>>(x.device(), f.x.count, f.x.size, f, f.dx, f.dy, f.x);
    });
  });
}

}  // namespace furious::cuda
