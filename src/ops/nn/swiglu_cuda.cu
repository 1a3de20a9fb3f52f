#include "gpu/rows.cuh"
#include "ops/nn/activation.cuh"
#include "ops/nn/swiglu_kernels.h"

namespace furious::cuda {
namespace {

template <class T>
struct Forward {
  DeviceRows<T> y, gate, up;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float g[N], u[N];
    load(g, gate[row] + column);
    load(u, up[row] + column);
#pragma unroll
    for (int i = 0; i < N; ++i) u[i] *= silu(g[i]);
    store(y[row] + column, u);
  }
};

template <class T>
struct Backward {
  DeviceRows<T> dgate, dup, dy, gate, up;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float d[N], g[N], u[N];
    load(d, dy[row] + column);
    load(g, gate[row] + column);
    load(u, up[row] + column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid(g[i]);
      u[i] = d[i] * u[i] * (s * (1.0f + g[i] * (1.0f - s)));
      d[i] = d[i] * (g[i] * s);
    }
    store(dgate[row] + column, u);
    store(dup[row] + column, d);
  }
};

}  // namespace

void swiglu_forward(const Tensor& y, const Tensor& gate, const Tensor& up) {
  with_activation_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Forward<typename OnDevice<T>::Type> f{rows<T>(y), rows<T>(gate), rows<T>(up)};
    map_rows<kLanes<T>>(y.device(), f.y.count, f.y.size, f, f.y, f.gate, f.up);
  });
}

void swiglu_backward(const SwigluGradients& out, const Tensor& dy, const Tensor& gate, const Tensor& up) {
  with_activation_type(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Backward<typename OnDevice<T>::Type> f{rows<T>(out.gate), rows<T>(out.up), rows<T>(dy), rows<T>(gate),
                                                 rows<T>(up)};
    map_rows<kLanes<T>>(dy.device(), f.dy.count, f.dy.size, f, f.dgate, f.dup, f.dy, f.gate, f.up);
  });
}

}  // namespace furious::cuda
