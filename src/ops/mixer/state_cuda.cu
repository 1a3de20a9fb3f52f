// States on a GPU in f32: reading the one that came in, and writing the one that goes out. Products of small tiles in
// shared memory; φ is made for a tile at a time.
//
//   past_i = exp(A_i) φ(scale·q_i)ᵀ S          S' = exp(A_end) S + Σ_j exp(A_end − A_j) φ(k_j) [v_j, 1]ᵀ
#include "ops/mixer/cuda.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 16;    // of a block that reads
constexpr int kFeatures = 32;  // rows of a state in a tile
constexpr int kColumns = kLargestDim + 1;

struct Feature {
  int a, b;
  float factor;
};

// Row `r` of φ: the pair (a, b) with a ≤ b, in the order of symmetric_square.h; a alone for a linear score.
__device__ Feature feature(int r, int dim, bool squared) {
  if (!squared) return {r, -1, 1.0f};
  // The largest a with a·dim − a(a−1)/2 ≤ r.
  const double n = 2.0 * dim + 1;
  int a = static_cast<int>((n - sqrt(n * n - 8.0 * r)) / 2);
  const auto first = [&](int i) { return i * dim - i * (i - 1) / 2; };
  while (a > 0 && first(a) > r) --a;
  while (first(a + 1) <= r) ++a;
  const int b = a + r - first(a);
  return {a, b, a == b ? 1.0f : 1.41421356237f};
}

template <class T>
__device__ float value(const Feature& f, const T* x) {
  return f.b < 0 ? to_float(x[f.a]) : f.factor * to_float(x[f.a]) * to_float(x[f.b]);
}

template <class T>
struct States {
  const T *x, *v;  // q or k; v
  int64_t x_batch, x_token, x_head, v_batch, v_token, v_head;
  int x_group, v_group;
  const double* decay;
  const int* starts;
  const float* initial;
  float* out;
  int64_t length, heads;
  int dim, v_dim, rows, columns;
  float scale;
  bool squared;

  __device__ const T* x_row(int64_t b, int64_t t, int64_t h) const {
    return x + b * x_batch + t * x_token + h / x_group * x_head;
  }
};

template <class T>
__global__ void read_kernel(States<T> m) {
  __shared__ float phi[kTokens][kFeatures];
  __shared__ float state[kFeatures][kColumns];
  const int64_t b = blockIdx.z, h = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const float* from = m.initial + (b * m.heads + h) * m.rows * m.columns;
  constexpr int kOutputs = (kTokens * kColumns + kThreads - 1) / kThreads;
  float y[kOutputs] = {};
  for (int r0 = 0; r0 < m.rows; r0 += kFeatures) {
    for (int i = threadIdx.x; i < kTokens * kFeatures; i += kThreads) {
      const int64_t t = first + i / kFeatures;
      const int r = r0 + i % kFeatures;
      phi[i / kFeatures][i % kFeatures] =
          t < m.length && r < m.rows ? value(feature(r, m.dim, m.squared), m.x_row(b, t, h)) : 0.0f;
    }
    for (int i = threadIdx.x; i < kFeatures * m.columns; i += kThreads) {
      const int r = i / m.columns;
      state[r][i % m.columns] = r0 + r < m.rows ? from[static_cast<int64_t>(r0) * m.columns + i] : 0.0f;
    }
    __syncthreads();
    for (int o = 0; o < kOutputs; ++o) {
      const int i = o * kThreads + threadIdx.x;
      if (i >= kTokens * m.columns) break;
      for (int r = 0; r < kFeatures; ++r) y[o] += phi[i / m.columns][r] * state[r][i % m.columns];
    }
    __syncthreads();
  }
  const float scale = m.squared ? m.scale * m.scale : m.scale;
  for (int o = 0; o < kOutputs; ++o) {
    const int i = o * kThreads + threadIdx.x;
    if (i >= kTokens * m.columns) break;
    const int64_t t = first + i / m.columns;
    if (t >= m.length) break;
    const int64_t row = (b * m.heads + h) * m.length + t;
    const bool reached = !m.starts || m.starts[b * m.length + t] == 0;  // by the state: the row's first document
    const float decay = m.decay ? expf(static_cast<float>(m.decay[row])) : 1.0f;
    m.out[row * m.columns + i % m.columns] = reached ? scale * decay * y[o] : 0.0f;
  }
}

template <class T>
__global__ void write_kernel(States<T> m) {
  __shared__ float phi[kFeatures][kFeatures];  // token, row
  __shared__ float u[kFeatures][kColumns];     // token, column
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int r0 = static_cast<int>(blockIdx.x) * kFeatures;
  const int64_t head_row = (b * m.heads + h) * m.length;
  const int64_t start = m.starts ? m.starts[b * m.length + m.length - 1] : 0;
  const double last = m.decay ? m.decay[head_row + m.length - 1] : 0.0;
  constexpr int kOutputs = (kFeatures * kColumns + kThreads - 1) / kThreads;
  float sum[kOutputs] = {};
  for (int64_t first = start; first < m.length; first += kFeatures) {
    for (int i = threadIdx.x; i < kFeatures * kFeatures; i += kThreads) {
      const int64_t t = first + i / kFeatures;
      const int r = r0 + i % kFeatures;
      float x = 0;
      if (t < m.length && r < m.rows) {
        const float decay = m.decay ? expf(static_cast<float>(last - m.decay[head_row + t])) : 1.0f;
        x = decay * value(feature(r, m.dim, m.squared), m.x_row(b, t, h));
      }
      phi[i / kFeatures][i % kFeatures] = x;
    }
    for (int i = threadIdx.x; i < kFeatures * m.columns; i += kThreads) {
      const int64_t t = first + i / m.columns;
      const int c = i % m.columns;
      float x = 0;
      if (t < m.length)
        x = c == m.v_dim ? 1.0f : to_float(m.v[b * m.v_batch + t * m.v_token + h / m.v_group * m.v_head + c]);
      u[i / m.columns][c] = x;
    }
    __syncthreads();
    for (int o = 0; o < kOutputs; ++o) {
      const int i = o * kThreads + threadIdx.x;
      if (i >= kFeatures * m.columns) break;
      for (int t = 0; t < kFeatures; ++t) sum[o] += phi[t][i / m.columns] * u[t][i % m.columns];
    }
    __syncthreads();
  }
  for (int o = 0; o < kOutputs; ++o) {
    const int i = o * kThreads + threadIdx.x;
    if (i >= kFeatures * m.columns || r0 + i / m.columns >= m.rows) break;
    const int64_t at = ((b * m.heads + h) * m.rows + r0) * m.columns + i;
    float x = sum[o];
    if (m.initial && start == 0) x += (m.decay ? expf(static_cast<float>(last)) : 1.0f) * m.initial[at];
    m.out[at] = x;
  }
}

template <class T>
auto states_of(const MixerCall& call, const TokenTables& tables, const Tensor& x, const Tensor& out) {
  const MixerShape& shape = call.shape;
  const Tensor& v = call.inputs.v;
  States<typename OnDevice<T>::Type> m;
  m.x = pointer<T>(x);
  m.v = pointer<T>(v);
  m.x_batch = x.stride(0), m.x_token = x.stride(1), m.x_head = x.stride(2);
  m.v_batch = v.stride(0), m.v_token = v.stride(1), m.v_head = v.stride(2);
  m.x_group = static_cast<int>(shape.heads / x.size(2));
  m.v_group = static_cast<int>(shape.heads / v.size(2));
  m.decay = tables.decay ? tables.decay.data<double>() : nullptr;
  m.starts = tables.starts ? tables.starts.data<int32_t>() : nullptr;
  m.initial = call.inputs.initial_state ? call.inputs.initial_state.data<float>() : nullptr;
  m.out = out.data<float>();
  m.length = shape.length;
  m.heads = shape.heads;
  m.dim = static_cast<int>(shape.qk_dim);
  m.v_dim = static_cast<int>(shape.v_dim);
  m.rows = static_cast<int>(shape.state_rows);
  m.columns = static_cast<int>(shape.state_columns);
  m.scale = shape.scale;
  m.squared = call.spec.score == Score::squared;
  return m;
}

dim3 grid_of(const MixerShape& shape, unsigned blocks) {
  return dim3(blocks, static_cast<unsigned>(shape.heads), static_cast<unsigned>(shape.batch));
}

}  // namespace

Tensor state_read(const MixerCall& call, const TokenTables& tables) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const Tensor past = Tensor::empty({shape.batch, shape.heads, shape.length, shape.state_columns}, DType::f32, device);
  with_activation_type(call.inputs.q.dtype(), [&](auto zero) {
    const auto m = states_of<decltype(zero)>(call, tables, call.inputs.q, past);
    read_kernel<<<grid_of(shape, blocks_for(shape.length, kTokens)), kThreads, 0, stream(device)>>>(m);
  });
  check_launch("mixer: reading the state");
  return past;
}

void state_write(const MixerCall& call, const TokenTables& tables) {
  const MixerShape& shape = call.shape;
  with_activation_type(call.inputs.q.dtype(), [&](auto zero) {
    const auto m = states_of<decltype(zero)>(call, tables, call.inputs.k, call.result.final_state);
    const unsigned blocks = blocks_for(shape.state_rows, kFeatures);
    write_kernel<<<grid_of(shape, blocks), kThreads, 0, stream(call.inputs.q.device())>>>(m);
  });
  check_launch("mixer: writing the state");
}

}  // namespace furious::cuda
