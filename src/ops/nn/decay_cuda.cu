#include "gpu/rows.cuh"
#include "ops/nn/activation.cuh"
#include "ops/nn/decay_kernels.h"

namespace furious::cuda {
namespace {

template <class T>
using On = typename OnDevice<T>::Type;

template <int N>
__device__ void load_or_zero(float (&to)[N], const float* from, int column) {
  if (from) return load(to, from + column);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = 0;
}

template <class T, Activation kActivation>
struct HeadFunctionForward {
  DeviceRows<float> y;
  DeviceRows<T> x;
  const float* bias;
  float factor, limit, least;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float v[N], shift[N];
    load(v, x[row] + column);
    load_or_zero(shift, bias, column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = factor * activate<kActivation>(v[i] + shift[i]);
      if (v[i] < least) v[i] = least;
      if (v[i] > limit) v[i] = limit;
    }
    store(y[row] + column, v);
  }
};

template <class T, Activation kActivation>
struct HeadFunctionBackward {
  DeviceRows<T> dx;
  DeviceRows<float> dy;
  DeviceRows<T> x;
  const float* bias;
  float factor, limit, least;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float unused[N] = {};
    run(row, column, unused);
  }
  template <int N>
  __device__ void run(int64_t row, int column, float (&dbias)[N]) const {
    float v[N], d[N], shift[N];
    load(v, x[row] + column);
    load(d, dy[row] + column);
    load_or_zero(shift, bias, column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] += shift[i];
      d[i] = activation_gradient<kActivation>(v[i], factor * d[i]);
      const float y = factor * activate<kActivation>(v[i]);
      if (y > limit || y < least) d[i] = 0;
      dbias[i] += d[i];
    }
    store(dx[row] + column, d);
  }
};

template <class T>
struct OriginalForward {
  DeviceRows<float> a;
  DeviceRows<T> dt;
  const float* a_log;
  float factor;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float v[N], w[N];
    load(v, dt[row] + column);
    load(w, a_log + column);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= -factor * expf(w[i]);
    store(a[row] + column, v);
  }
};

template <class T>
struct OriginalBackward {
  DeviceRows<T> ddt;
  DeviceRows<float> da;
  DeviceRows<T> dt;
  const float* a_log;
  float factor;

  template <int N>
  __device__ void run(int64_t row, int column, float (&da_log)[N]) const {
    float v[N], d[N], w[N];
    load(v, dt[row] + column);
    load(d, da[row] + column);
    load(w, a_log + column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      d[i] *= -factor * expf(w[i]);
      da_log[i] += d[i] * v[i];
    }
    store(ddt[row] + column, d);
  }
};

template <class T>
struct DiscretizeForward {
  DeviceRows<T> y, v;
  const float* dt;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float value[N];
    load(value, v[row] + column);
    const float step = dt[row];
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] *= step;
    store(y[row] + column, value);
  }
};

// 2^group_bits neighbouring threads, up to 32, share a row.
template <class T, int N>
__global__ void discretize_backward_kernel(DeviceRows<T> dv, float* ddt, DeviceRows<T> dy, DeviceRows<T> v,
                                           const float* dt, int group_bits) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  const int64_t row = thread >> group_bits;
  const int group = 1 << group_bits, rank = static_cast<int>(thread) & (group - 1);
  float sum = 0;
  if (row < v.count) {
    const T* const gradient = dy[row];
    const T* const value = v[row];
    T* const to = dv[row];
    const float step = dt[row];
    for (int column = rank * N; column < v.size; column += group * N) {
      float d[N], x[N];
      load(d, gradient + column);
      load(x, value + column);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum += d[i] * x[i];
        d[i] *= step;
      }
      store(to + column, d);
    }
  }
  for (int offset = group / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
  if (rank == 0 && row < v.count) ddt[row] = sum;
}

template <class T>
struct ResidualForward {
  DeviceRows<T> y, o, v;
  const float* d;
  int64_t heads;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float from[N], value[N], factor[N];
    load(from, o[row] + column);
    load(value, v[row] + column);
    load(factor, d + row % heads * v.size + column);
#pragma unroll
    for (int i = 0; i < N; ++i) from[i] += factor[i] * value[i];
    store(y[row] + column, from);
  }
};

// A column is one dimension of one head; a row is a token.
template <class T>
struct ResidualBackward {
  DeviceRows<T> dv, dy, v;
  const float* d;
  int heads;

  template <int N>
  __device__ void run(int64_t token, int column, float (&dd)[N]) const {
    const int dim = static_cast<int>(v.size);
    const int64_t row = token * heads + column / dim;
    const int at = column % dim;
    float gradient[N], value[N], factor[N];
    load(gradient, dy[row] + at);
    load(value, v[row] + at);
    load(factor, d + column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dd[i] += gradient[i] * value[i];
      gradient[i] *= factor[i];
    }
    store(dv[row] + at, gradient);
  }
};

}  // namespace

void head_function_forward(const Tensor& y, const Tensor& x, const Tensor& bias, const HeadFunction& function) {
  with_activation_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_activation(function.f, [&](auto kind) {
      const HeadFunctionForward<On<T>, kind> f{rows<float>(y),  rows<T>(x),     bias ? bias.data<float>() : nullptr,
                                               function.factor, function.limit, function.least};
      map_rows<kLanes<T>>(x.device(), f.x.count, f.x.size, f, f.y, f.x, f.bias);
    });
  });
}

void head_function_backward(const HeadFunctionGradients& out, const Tensor& dy, const Tensor& x, const Tensor& bias,
                            const HeadFunction& function) {
  with_activation_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_activation(function.f, [&](auto kind) {
      const HeadFunctionBackward<On<T>, kind> f{
          rows<T>(out.x),  rows<float>(dy), rows<T>(x),    bias ? bias.data<float>() : nullptr,
          function.factor, function.limit,  function.least};
      if (bias)
        sum_columns<kLanes<T>>(x.device(), out.bias, f.x.count, f.x.size, f, f.dx, f.dy, f.x, f.bias);
      else
        map_rows<kLanes<T>>(x.device(), f.x.count, f.x.size, f, f.dx, f.dy, f.x);
    });
  });
}

void original_decay_forward(const Tensor& a, const Tensor& dt, const Tensor& a_log, float factor) {
  with_activation_type(dt.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const OriginalForward<On<T>> f{rows<float>(a), rows<T>(dt), a_log.data<float>(), factor};
    map_rows<kLanes<T>>(dt.device(), f.dt.count, f.dt.size, f, f.a, f.dt, f.a_log);
  });
}

void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da, const Tensor& dt, const Tensor& a_log,
                             float factor) {
  with_activation_type(dt.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const OriginalBackward<On<T>> f{rows<T>(out.dt), rows<float>(da), rows<T>(dt), a_log.data<float>(), factor};
    sum_columns<kLanes<T>>(dt.device(), out.a_log, f.dt.count, f.dt.size, f, f.ddt, f.da, f.dt, f.a_log);
  });
}

void discretize_forward(const Tensor& y, const Tensor& v, const Tensor& dt) {
  with_activation_type(v.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const DiscretizeForward<On<T>> f{rows<T>(y), rows<T>(v), dt.data<float>()};
    map_rows<kLanes<T>>(v.device(), f.v.count, f.v.size, f, f.y, f.v);
  });
}

void discretize_backward(const DiscretizeGradients& out, const Tensor& dy_tensor, const Tensor& v_tensor,
                         const Tensor& dt) {
  if (v_tensor.elements() == 0) return;
  with_activation_type(v_tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto dv = rows<T>(out.v), dy = rows<T>(dy_tensor), v = rows<T>(v_tensor);
    with_lanes<kLanes<T>>(
        [&](auto lanes) {
          const auto group = std::bit_ceil(static_cast<unsigned>(std::min<int64_t>(32, (v.size + lanes - 1) / lanes)));
          discretize_backward_kernel<On<T>, lanes>
              <<<blocks_for(v.count * group, kRowThreads), kRowThreads, 0, stream(v_tensor.device())>>>(
                  dv, out.dt.data<float>(), dy, v, dt.data<float>(), std::countr_zero(group));
        },
        dv, dy, v);
  });
  check_launch("discretize backward");
}

void d_residual_forward(const Tensor& y, const Tensor& o, const Tensor& v, const Tensor& d) {
  with_activation_type(v.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const ResidualForward<On<T>> f{rows<T>(y), rows<T>(o), rows<T>(v), d.data<float>(), d.size(0)};
    map_rows<kLanes<T>>(v.device(), f.v.count, f.v.size, f, f.y, f.o, f.v, f.d);
  });
}

void d_residual_backward(const DResidualGradients& out, const Tensor& dy, const Tensor& v, const Tensor& d) {
  with_activation_type(v.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const ResidualBackward<On<T>> f{rows<T>(out.v), rows<T>(dy), rows<T>(v), d.data<float>(),
                                    static_cast<int>(d.size(0))};
    sum_columns<kLanes<T>>(v.device(), out.d, v.size(0) * v.size(1), d.elements(), f, f.dv, f.dy, f.v, f.d);
  });
}

}  // namespace furious::cuda
