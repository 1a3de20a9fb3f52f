// The mixer family on a GPU in f32 arithmetic, a warp per token: any dtype, dimension and spec. The other kernels are
// the fast ones; this is what they are checked against, and what serves the rest.
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/polynomial.h"

namespace furious::cuda {
namespace {

constexpr int kWarps = 4;

template <class T>
struct Simple {
  Heads<T> q, k, v, out, g, dq, dk, dv;
  const double* decay;
  const int *starts, *ends;
  const float* past;
  float *normalizer, *maximum;
  double *row_decay, *key_decay;
  int64_t length, heads;
  int64_t first;  // the first query; q, out, normalizer and maximum begin with it. 0 backward and with a past
  int qk_dim, v_dim;
  float scale;
  Score score;
  Polynomial polynomial;  // f, of all scores but the exponential
  bool sum_norm;

  // The exponent of the mask between a query and a key, which only one with signed decay can let grow so far.
  __device__ float exponent(double query, double key) const {
    return fminf(static_cast<float>(query - key), kLargestExponent);
  }
};

// A row of up to 32 · kPerLane numbers is spread over the lanes of a warp.
template <int kPerLane, class T>
__device__ void load(float (&x)[kPerLane], const T* row, int dim) {
  for (int i = 0; i < kPerLane; ++i) {
    const int c = i * 32 + threadIdx.x % 32;
    x[i] = c < dim ? to_float(row[c]) : 0.0f;
  }
}

template <int kPerLane, class T>
__device__ void store(T* row, const float (&x)[kPerLane], int dim, float factor) {
  for (int i = 0; i < kPerLane; ++i) {
    const int c = i * 32 + threadIdx.x % 32;
    if (c < dim) row[c] = from_float<T>(x[i] * factor);
  }
}

template <int kPerLane>
__device__ float dot(const float (&x)[kPerLane], const float (&y)[kPerLane]) {
  float sum = 0;
  for (int i = 0; i < kPerLane; ++i) sum += x[i] * y[i];
  return warp_sum(sum);
}

template <int kPerLane>
__device__ void add(float (&x)[kPerLane], float factor, const float (&y)[kPerLane]) {
  for (int i = 0; i < kPerLane; ++i) x[i] += factor * y[i];
}

// The token of this warp, of those from `first` on; false beyond the last.
struct Place {
  int64_t b, h, t;
};
__device__ bool place(Place& p, int64_t length, int64_t first = 0) {
  p = {blockIdx.z, blockIdx.y, first + static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32};
  return p.t < length;
}

template <int kPerLane, class T>
__global__ void forward_kernel(Simple<T> m) {
  Place p;
  if (!place(p, m.length, m.first)) return;
  const int64_t head_row = (p.b * m.heads + p.h) * m.length;
  const int64_t query = p.t - m.first, query_place = (p.b * m.heads + p.h) * (m.length - m.first) + query;
  float q[kPerLane], k[kPerLane], v[kPerLane], y[kPerLane] = {};
  load(q, m.q.row(p.b, query, p.h), m.qk_dim);
  float n = 0, largest = -INFINITY;
  if (m.past) {
    const float* past = m.past + (head_row + p.t) * past_columns(m.v_dim, m.sum_norm);
    load(y, past, m.v_dim);
    if (m.sum_norm) n = past[m.v_dim];
  }
  const double own = m.decay ? m.decay[head_row + p.t] : 0.0;
  for (int64_t j = m.starts ? m.starts[p.b * m.length + p.t] : 0; j <= p.t; ++j) {
    load(k, m.k.row(p.b, j, p.h), m.qk_dim);
    const float s = m.scale * dot(q, k);
    const float a = m.decay ? m.exponent(own, m.decay[head_row + j]) : 0.0f;
    float w;
    if (m.score == Score::exponential && m.sum_norm) {
      const float e = s + a;
      if (e > largest) {
        const float shrink = expf(largest - e);
        for (float& c : y) c *= shrink;
        n *= shrink;
        largest = e;
      }
      w = expf(e - largest);
    } else {
      w = (m.score == Score::exponential ? expf(fminf(s, kLargestExponent)) : m.polynomial(s)) * expf(a);
    }
    load(v, m.v.row(p.b, j, p.h), m.v_dim);
    add(y, w, v);
    n += w;
  }
  const float inverse = !m.sum_norm ? 1.0f : fabsf(n) < kSmallestNormalizer ? 0.0f : 1 / n;
  store(m.out.row(p.b, query, p.h), y, m.v_dim, inverse);
  if (threadIdx.x % 32 != 0) return;
  if (m.normalizer) m.normalizer[query_place] = n;
  if (m.maximum) m.maximum[query_place] = largest;
}

// What one pair of a query i and a key j gives: dS and w·dw (the part of dA), and the weight of g in dv.
struct Pair {
  float ds, wdw, p;
};
template <class T>
__device__ Pair pair(const Simple<T>& m, float s, float a, float dot_gv, float delta, float n, float largest) {
  const float inverse = !m.sum_norm ? 1.0f : fabsf(n) < kSmallestNormalizer ? 0.0f : 1 / n;
  const float dw = (dot_gv - delta) * inverse;
  const float d = a < kLargestExponent ? 1.0f : 0.0f;  // whether the weight moves with the decay
  if (m.score == Score::exponential) {
    if (m.sum_norm) {
      const float w = expf(s + a - largest);
      return {w * dw, d * w * dw, w * inverse};
    }
    const float w = expf(fminf(s, kLargestExponent)) * expf(a);
    return {s < kLargestExponent ? w * dw : 0.0f, d * w * dw, w};
  }
  const float factor = expf(a), w = m.polynomial(s) * factor;
  return {m.polynomial.slope(s) * factor * dw, d * w * dw, w * inverse};
}

template <int kPerLane, class T>
__global__ void query_gradient_kernel(Simple<T> m) {
  Place p;
  if (!place(p, m.length)) return;
  const int64_t head_row = (p.b * m.heads + p.h) * m.length;
  float q[kPerLane], g[kPerLane], x[kPerLane], dq[kPerLane] = {};
  load(g, m.g.row(p.b, p.t, p.h), m.v_dim);
  load(x, m.out.row(p.b, p.t, p.h), m.v_dim);
  const float delta = m.sum_norm ? dot(g, x) : 0.0f;
  load(q, m.q.row(p.b, p.t, p.h), m.qk_dim);
  const float n = m.sum_norm ? m.normalizer[head_row + p.t] : 1.0f;
  const float largest = m.maximum ? m.maximum[head_row + p.t] : 0.0f;
  const double own = m.decay ? m.decay[head_row + p.t] : 0.0;
  ExactSum row_decay;
  for (int64_t j = m.starts ? m.starts[p.b * m.length + p.t] : 0; j <= p.t; ++j) {
    load(x, m.v.row(p.b, j, p.h), m.v_dim);
    const float dot_gv = dot(g, x);
    load(x, m.k.row(p.b, j, p.h), m.qk_dim);
    const float a = m.decay ? m.exponent(own, m.decay[head_row + j]) : 0.0f;
    const Pair one = pair(m, m.scale * dot(q, x), a, dot_gv, delta, n, largest);
    add(dq, m.scale * one.ds, x);
    row_decay.add(one.wdw);
  }
  store(m.dq.row(p.b, p.t, p.h), dq, m.qk_dim, 1.0f);
  if (m.row_decay && threadIdx.x % 32 == 0) m.row_decay[head_row + p.t] = row_decay.value();
}

template <int kPerLane, class T>
__global__ void key_gradient_kernel(Simple<T> m) {
  Place p;
  if (!place(p, m.length)) return;
  const int64_t head_row = (p.b * m.heads + p.h) * m.length;
  float k[kPerLane], v[kPerLane], x[kPerLane], g[kPerLane], dk[kPerLane] = {}, dv[kPerLane] = {};
  load(k, m.k.row(p.b, p.t, p.h), m.qk_dim);
  load(v, m.v.row(p.b, p.t, p.h), m.v_dim);
  const double own = m.decay ? m.decay[head_row + p.t] : 0.0;
  const int64_t end = m.ends ? m.ends[p.b * m.length + p.t] : m.length;
  ExactSum key_decay;
  for (int64_t i = p.t; i < end; ++i) {
    load(g, m.g.row(p.b, i, p.h), m.v_dim);
    load(x, m.out.row(p.b, i, p.h), m.v_dim);
    const float delta = m.sum_norm ? dot(g, x) : 0.0f;
    load(x, m.q.row(p.b, i, p.h), m.qk_dim);
    const float a = m.decay ? m.exponent(m.decay[head_row + i], own) : 0.0f;
    const float n = m.sum_norm ? m.normalizer[head_row + i] : 1.0f;
    const float largest = m.maximum ? m.maximum[head_row + i] : 0.0f;
    const Pair one = pair(m, m.scale * dot(x, k), a, dot(g, v), delta, n, largest);
    add(dk, m.scale * one.ds, x);
    add(dv, one.p, g);
    key_decay.add(one.wdw);
  }
  store(m.dk.row(p.b, p.t, p.h), dk, m.qk_dim, 1.0f);
  store(m.dv.row(p.b, p.t, p.h), dv, m.v_dim, 1.0f);
  if (m.key_decay && threadIdx.x % 32 == 0) m.key_decay[head_row + p.t] = -key_decay.value();
}

template <class T>
auto simple_of(const MixerCall& call, const TokenTables& tables) {
  Simple<typename OnDevice<T>::Type> m = {};
  const MixerShape& shape = call.shape;
  m.q = heads_of<T>(call.inputs.q, shape.heads);
  m.k = heads_of<T>(call.inputs.k, shape.heads);
  m.v = heads_of<T>(call.inputs.v, shape.heads);
  m.out = heads_of<T>(call.result.out, shape.heads);
  m.decay = tables.decay ? tables.decay.data<double>() : nullptr;
  m.starts = tables.starts ? tables.starts.data<int32_t>() : nullptr;
  m.ends = tables.ends ? tables.ends.data<int32_t>() : nullptr;
  m.normalizer = floats(call.result.normalizer);
  m.maximum = floats(call.result.maximum);
  m.length = shape.length;
  m.heads = shape.heads;
  m.first = shape.first_query;
  m.qk_dim = static_cast<int>(shape.qk_dim);
  m.v_dim = static_cast<int>(shape.v_dim);
  m.scale = shape.scale;
  m.score = call.spec.score;
  m.polynomial = polynomial_of(call.spec);
  m.sum_norm = call.spec.norm == Norm::sum;
  return m;
}

// Calls f with the numbers per lane that hold a row of every input, as a constant.
template <class F>
void with_lanes(const MixerShape& shape, F&& f) {
  const int64_t dim = std::max(shape.qk_dim, shape.v_dim);
  if (dim <= 32) return f(std::integral_constant<int, 1>());
  if (dim <= 64) return f(std::integral_constant<int, 2>());
  if (dim <= 128) return f(std::integral_constant<int, 4>());
  f(std::integral_constant<int, kLargestDim / 32>());
}

dim3 grid_of(const MixerShape& shape) {
  return dim3(blocks_for(shape.queries(), kWarps), static_cast<unsigned>(shape.heads),
              static_cast<unsigned>(shape.batch));
}

}  // namespace

void simple_forward(const MixerCall& call, const TokenTables& tables, const Tensor& past) {
  with_activation_type(call.inputs.q.dtype(), [&](auto zero) {
    auto m = simple_of<decltype(zero)>(call, tables);
    m.past = floats(past);
    with_lanes(call.shape, [&](auto lanes) {
      forward_kernel<lanes()><<<grid_of(call.shape), 32 * kWarps, 0, stream(call.inputs.q.device())>>>(m);
    });
  });
  check_launch("mixer_forward");
}

void simple_backward(const MixerCall& call, const TokenTables& tables, const Tensor& out_gradient,
                     const HeadGradients& gradients) {
  with_activation_type(call.inputs.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    auto m = simple_of<T>(call, tables);
    m.g = heads_of<T>(out_gradient, call.shape.heads);
    m.dq = heads_of<T>(gradients.q, call.shape.heads);
    m.dk = heads_of<T>(gradients.k, call.shape.heads);
    m.dv = heads_of<T>(gradients.v, call.shape.heads);
    m.row_decay = doubles(gradients.row_decay);
    m.key_decay = doubles(gradients.key_decay);
    const cudaStream_t s = stream(call.inputs.q.device());
    with_lanes(call.shape, [&](auto lanes) {
      query_gradient_kernel<lanes()><<<grid_of(call.shape), 32 * kWarps, 0, s>>>(m);
      key_gradient_kernel<lanes()><<<grid_of(call.shape), 32 * kWarps, 0, s>>>(m);
    });
  });
  check_launch("mixer_backward");
}

}  // namespace furious::cuda
