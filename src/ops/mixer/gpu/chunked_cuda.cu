// The chunked form on a GPU for any dtype, dimension and score that has a state. Chunks are walked one after another;
// φ is made in memory for one chunk of some heads at a time, and the products with the state are those of matmul.h.
//
//   past_i = c_i φ(q_i)ᵀ S                 S  ← through · S  + Σ_j out_j φ(k_j) u_jᵀ         u_j = [v_j, 1]
//   dφ(q_i) = c_i S e_i                    dS ← through · dS + Σ_i c_i φ(q_i) e_iᵀ           e_i = [g_i, −δ_i]
//   dφ(k_j) = out_j dS u_j                 du_j = out_j dSᵀ φ(k_j)
//
// φ(q_i) is that of scale·q_i. c_i is in_i, and backward also 1/n_i. Every factor goes to φ rather than to its partner:
// g/n alone may overflow. As on the CPU no states are kept: one sweep forwards with S (for dq), one backwards with dS
// (for dk, dv).
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/mixer/gpu/chunk_states.h"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/mixer_cuda.h"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = 4;
constexpr int kLargestWidth = kLargestDim + 1;  // of x with the 1 of a series
constexpr int kPerLane = (kLargestWidth + 31) / 32;
constexpr int kTokens = 8;                             // that share the search for a feature's indices
constexpr int kFeatures = 1024;                        // of a block
constexpr int64_t kFeatureBytes = int64_t{256} << 20;  // of φ at a time, unless one head of a chunk takes more

__global__ void table_kernel(float* in, float* out, float* through, int* starts, int* ends, const double* decay,
                             const int* document_starts, const int* document_ends, int64_t length, int64_t chunk) {
  const int64_t b = blockIdx.z, h = blockIdx.y, heads = gridDim.y;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= length) return;
  const int64_t c = t / chunk, begin = c * chunk, end = min(begin + chunk, length);
  const int64_t start = document_starts ? document_starts[b * length + t] : 0;
  const int64_t stop = document_ends ? document_ends[b * length + t] : length;
  if (h == 0) {
    starts[b * length + t] = static_cast<int>(max(start, begin));
    ends[b * length + t] = static_cast<int>(min(stop, end));
  }
  if (!in) return;
  const int64_t row = (b * heads + h) * length;
  const double own = decay ? decay[row + t] : 0.0;
  const double before = decay && begin > 0 ? decay[row + begin - 1] : 0.0;
  const double last = decay ? decay[row + end - 1] : 0.0;
  // What comes in belongs to the document that reaches back behind the chunk: the first one's reaches to the state.
  const float from_start = start < begin || start == 0 ? decay_factor(own - before) : 0.0f;
  in[row + t] = from_start;
  out[row + t] = stop >= end ? decay_factor(last - own) : 0.0f;
  if (t == end - 1) through[(b * heads + h) * ((length + chunk - 1) / chunk) + c] = from_start;
}

// Tokens [begin, begin + tokens) of some heads: `first` is the first of them among all of the batch.
struct TokenRange {
  int64_t first, heads, length, begin, tokens;

  template <class T>
  __device__ T* row(const Heads<T>& x, int64_t r, int64_t i) const {
    return x.row((first + r) / heads, begin + i, (first + r) % heads);
  }
  __device__ int64_t token(int64_t r, int64_t i) const { return (first + r) * length + begin + i; }
};

// Queries or keys of a range, and the factors of their features.
template <class T>
struct Side {
  Heads<T> x;
  TokenRange range;
  const float *factors, *normalizer;
  float scale;  // of x
  FeatureMap map;
  int features;

  __device__ float factor(int64_t r, int64_t i) const {
    const float f = factors ? factors[range.token(r, i)] : 1.0f;
    if (!normalizer) return f;
    const float n = normalizer[range.token(r, i)];
    return fabsf(n) < kSmallestNormalizer ? 0.0f : f / n;
  }
};

// phi: [heads, tokens, features].
template <class T>
__global__ void feature_kernel(float* phi, Side<T> m) {
  __shared__ float x[kTokens][kLargestDim];
  __shared__ float factors[kTokens];
  const int64_t r = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int count = static_cast<int>(min(static_cast<int64_t>(kTokens), m.range.tokens - first));
  const int dim = m.map.dim;
  for (int i = threadIdx.x; i < count * dim; i += kThreads)
    x[i / dim][i % dim] = m.scale * to_float(m.range.row(m.x, r, first + i / dim)[i % dim]);
  if (threadIdx.x < count) factors[threadIdx.x] = m.factor(r, first + threadIdx.x);
  __syncthreads();
  float* const to = phi + (r * m.range.tokens + first) * m.features;
  const int last = min(m.features, static_cast<int>(blockIdx.z + 1) * kFeatures);
  for (int f = static_cast<int>(blockIdx.z) * kFeatures + threadIdx.x; f < last; f += kThreads) {
    const Feature feature = feature_of(m.map, f);
    for (int t = 0; t < count; ++t) to[static_cast<int64_t>(t) * m.features + f] = factors[t] * feature.of(x[t]);
  }
}

// The head and token of this warp; false beyond the last.
__device__ bool place(int64_t& r, int64_t& i, const TokenRange& range) {
  r = blockIdx.y;
  i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  return i < range.tokens;
}

// Adds to dx what dphi, the gradient of the features without their factor, gives; and x·dx/degree, times `sign`, to the
// gradient of the decay. A lane adds up what the features give to the last of their indices, where that is its own;
// what a run of features gives to the indices before, all lanes add up together.
template <int kDegree, class T>
__global__ void chain_kernel(Heads<T> dx, double* decay, float sign, const float* dphi, Side<T> m) {
  constexpr int kPrefix = kDegree - 1;
  __shared__ float shared[kWarps][kLargestWidth];
  int64_t r, i;
  if (!place(r, i, m.range)) return;
  const int lane = threadIdx.x % 32, dim = m.map.dim, width = m.map.width();
  float* const x = shared[threadIdx.x / 32];
  const T* const from = m.range.row(m.x, r, i);
  for (int c = lane; c < width; c += 32) x[c] = c < dim ? m.scale * to_float(from[c]) : 1.0f;
  __syncwarp();
  const float* d = dphi + (r * m.range.tokens + i) * m.features;
  float sum[kPerLane] = {};
  FeatureRuns<kDegree> run(m.map);
  do {
    const int lowest = run.lowest();
    const auto factors = run.factors();
    const float prefix = run.product(x);
    float own = 0;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      const int b = e * 32 + lane;
      if (b < lowest || b >= width) continue;
      const float value = (kPrefix > 0 && b == lowest ? factors.repeated : factors.each) * d[b - lowest];
      sum[e] = fmaf(prefix, value, sum[e]);
      own = fmaf(x[b], value, own);
    }
    d += width - lowest;
    if constexpr (kPrefix == 0) break;
    own = warp_sum(own);
#pragma unroll
    for (int n = 0; n < kPrefix; ++n) {
      const float given = own * run.product(x, n);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e)
        if (e * 32 + lane == run.prefix[n]) sum[e] += given;
    }
  } while (run.next());
  const float factor = m.factor(r, i);
  T* const to = m.range.row(dx, r, i);
  float product = 0;
#pragma unroll
  for (int e = 0; e < kPerLane; ++e) {
    const int c = e * 32 + lane;
    if (c >= width) continue;
    const float value = factor * sum[e];
    product = fmaf(x[c], value, product);
    if (c < dim) to[c] = from_float<T>(to_float(to[c]) + m.scale * value);
  }
  if (!decay) return;
  product = warp_sum(product);
  if (lane == 0) decay[m.range.token(r, i)] += sign * product / kDegree;
}

// u: [heads, tokens, columns], the values and, for `normalizer`, 1; or with `out` the gradients g, and −g·o; zeros.
template <class T>
__global__ void column_kernel(float* u, Heads<T> x, Heads<T> out, TokenRange range, int dim, int columns,
                              bool normalizer) {
  int64_t r, i;
  if (!place(r, i, range)) return;
  const T* const from = range.row(x, r, i);
  float* const to = u + (r * range.tokens + i) * columns;
  float delta = 0;
  for (int c = threadIdx.x % 32; c < dim; c += 32) {
    const float value = to_float(from[c]);
    to[c] = value;
    if (out.data && normalizer) delta += value * to_float(range.row(out, r, i)[c]);
  }
  delta = warp_sum(delta);
  for (int c = dim + threadIdx.x % 32; c < columns; c += 32)
    to[c] = c > dim || !normalizer ? 0.0f : out.data ? -delta : 1.0f;
}

// dv += the values' columns of du.
template <class T>
__global__ void value_gradient_kernel(Heads<T> dv, const float* du, TokenRange range, int dim, int columns) {
  int64_t r, i;
  if (!place(r, i, range)) return;
  T* const to = range.row(dv, r, i);
  const float* const from = du + (r * range.tokens + i) * columns;
  for (int c = threadIdx.x % 32; c < dim; c += 32) to[c] = from_float<T>(to_float(to[c]) + from[c]);
}

// state *= through, head by head; `through` is that of the chunk, for the first of the heads.
__global__ void through_kernel(float* state, const float* through, int64_t chunks, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) state[blockIdx.y * size + i] *= through[blockIdx.y * chunks];
}

// The last dA of a row += Σ state · gradient: all of the final state is decayed by all of A.
__global__ void state_decay_kernel(double* decay, const float* state, const float* gradient, int64_t size,
                                   int64_t length) {
  __shared__ double sums[kThreads];
  const int64_t r = blockIdx.x;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads)
    sum += static_cast<double>(state[r * size + i]) * static_cast<double>(gradient[r * size + i]);
  sums[threadIdx.x] = sum;
  for (int n = kThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
  }
  if (threadIdx.x == 0) decay[(r + 1) * length - 1] += sums[0];
}

// Queries or keys, with what their features are multiplied by.
struct Factored {
  Tensor x, factors, normalizer;
  float scale;
};

// Some heads of the batch, chunk by chunk.
class ChunkWalk {
 public:
  ChunkWalk(const MixerCall& call, const ChunkTables& tables, int64_t first, int64_t heads)
      : call_(call),
        shape_(call.shape),
        tables_(tables),
        first_(first),
        heads_(heads),
        columns_(past_columns(shape_.v_dim, sum_norm())) {}

  int64_t begin(int64_t chunk) const { return chunk * tables_.chunk; }
  int64_t tokens(int64_t chunk) const { return std::min(tables_.chunk, shape_.length - begin(chunk)); }

  // The part of a tensor [batch, heads, …] that belongs to these heads: [heads, …].
  Tensor part(const Tensor& x) const {
    return x.view({shape_.batch * shape_.heads, x.size(2), x.size(3)}).slice(0, first_, heads_);
  }

  Factored queries(const Tensor& normalizer = {}) const {
    return {call_.inputs.q, tables_.in, normalizer, shape_.scale};
  }
  Factored keys() const { return {call_.inputs.k, tables_.out, {}, 1.0f}; }

  void multiply(const Tensor& out, const Tensor& a, const Tensor& b, MatmulOptions options = {}) const {
    const MixerPrecision precision = product_precision(call_);
    // TF32 has more bits than inputs of bf16. Three products in TF32 are slower than one in f32 here: they would read φ
    // three times.
    const bool exact = precision == MixerPrecision::f32 || precision == MixerPrecision::tf32x3;
    options.precision = exact && call_.inputs.q.dtype() != DType::bf16 ? MatmulPrecision::f32 : MatmulPrecision::tf32;
    furious::matmul(out, a, b, options);
  }

  // φ times its factors: [heads, tokens, features].
  Tensor features(int64_t chunk, const Factored& from) const {
    const Tensor phi = empty(chunk, shape_.state_rows);
    const dim3 grid(blocks_for(tokens(chunk), kTokens), static_cast<unsigned>(heads_),
                    blocks_for(shape_.state_rows, kFeatures));
    with_activation_type(from.x.dtype(), [&](auto zero) {
      feature_kernel<<<grid, kThreads, 0, here()>>>(phi.data<float>(), side<decltype(zero)>(chunk, from));
    });
    check_launch("mixer: features of a chunk");
    return phi;
  }

  // [heads, tokens, columns]: u of values, or e of gradients with `out`.
  Tensor columns(int64_t chunk, const Tensor& x, const Tensor& out = {}) const {
    const Tensor u = empty(chunk, columns_);
    with_activation_type(x.dtype(), [&](auto zero) {
      using T = decltype(zero);
      Heads<typename OnDevice<T>::Type> o = {};
      if (out) o = heads_of<T>(out, shape_.heads);
      column_kernel<<<warps(chunk), 32 * kWarps, 0, here()>>>(u.data<float>(), heads_of<T>(x, shape_.heads), o,
                                                              range(chunk), static_cast<int>(shape_.v_dim), columns_,
                                                              sum_norm());
    });
    check_launch("mixer: values of a chunk");
    return u;
  }

  // state = through · state + φᵀu. What was in a fresh state does not count.
  void carry(const Tensor& state, bool fresh, int64_t chunk, const Tensor& phi, const Tensor& u) const {
    if (!fresh && tables_.through) {
      const int64_t size = state.size(1) * state.size(2);
      const dim3 grid(blocks_for(size, kThreads), static_cast<unsigned>(heads_));
      through_kernel<<<grid, kThreads, 0, here()>>>(
          state.data<float>(), tables_.through.data<float>() + first_ * tables_.chunks + chunk, tables_.chunks, size);
      check_launch("mixer: decay of a state");
    }
    multiply(state, phi, u, {.transpose_a = true, .accumulate = !fresh});
  }

  // dx += what dφ = state·u gives through the features of x; ±x·dx/degree to the gradient of the decay.
  void chain(int64_t chunk, const Factored& of, const Tensor& state, const Tensor& u, const Tensor& dx,
             const Tensor& decay, float sign) const {
    const Tensor dphi = empty(chunk, shape_.state_rows);
    multiply(dphi, u, state, {.transpose_b = true});
    with_activation_type(dx.dtype(), [&](auto zero) {
      using T = decltype(zero);
      with_degree(shape_.features, [&]<int kDegree>() {
        chain_kernel<kDegree><<<warps(chunk), 32 * kWarps, 0, here()>>>(heads_of<T>(dx, shape_.heads), doubles(decay),
                                                                        sign, dphi.data<float>(), side<T>(chunk, of));
      });
    });
    check_launch("mixer: gradient of a chunk's features");
  }

  void value_gradient(int64_t chunk, const Tensor& phi, const Tensor& state, const Tensor& dv) const {
    const Tensor du = empty(chunk, columns_);
    multiply(du, phi, state);
    with_activation_type(dv.dtype(), [&](auto zero) {
      value_gradient_kernel<<<warps(chunk), 32 * kWarps, 0, here()>>>(heads_of<decltype(zero)>(dv, shape_.heads),
                                                                      du.data<float>(), range(chunk),
                                                                      static_cast<int>(shape_.v_dim), columns_);
    });
    check_launch("mixer: gradient of a chunk's values");
  }

 private:
  cudaStream_t here() const { return stream(call_.inputs.q.device()); }
  bool sum_norm() const { return call_.spec.norm == Norm::sum; }
  Tensor empty(int64_t chunk, int64_t width) const {
    return Tensor::empty({heads_, tokens(chunk), width}, DType::f32, call_.inputs.q.device());
  }
  TokenRange range(int64_t chunk) const { return {first_, shape_.heads, shape_.length, begin(chunk), tokens(chunk)}; }
  dim3 warps(int64_t chunk) const { return dim3(blocks_for(tokens(chunk), kWarps), static_cast<unsigned>(heads_)); }

  template <class T>
  auto side(int64_t chunk, const Factored& of) const {
    return Side<typename OnDevice<T>::Type>{heads_of<T>(of.x, shape_.heads),
                                            range(chunk),
                                            floats(of.factors),
                                            floats(of.normalizer),
                                            of.scale,
                                            shape_.features,
                                            static_cast<int>(shape_.state_rows)};
  }

  const MixerCall& call_;
  const MixerShape& shape_;
  const ChunkTables& tables_;
  const int64_t first_, heads_;
  const int columns_;
};

// As many heads at a time as keep φ small.
template <class Body>
void for_each_walk(const MixerCall& call, const ChunkTables& tables, Body&& body) {
  const int64_t all = call.shape.batch * call.shape.heads;
  const int64_t bytes = tables.chunk * call.shape.state_rows * 4;
  const int64_t step = std::clamp<int64_t>(kFeatureBytes / bytes, 1, 32768);
  for (int64_t first = 0; first < all; first += step) body(ChunkWalk(call, tables, first, std::min(step, all - first)));
}

// A state with past_columns(): `from`, or else not written.
Tensor wide_state(const MixerCall& call, const Tensor& from) {
  const MixerShape& shape = call.shape;
  const int64_t columns = past_columns(shape.v_dim, call.spec.norm == Norm::sum);
  const Tensor state =
      Tensor::empty({shape.batch, shape.heads, shape.state_rows, columns}, DType::f32, call.inputs.q.device());
  if (!from) return state;
  if (columns > shape.state_columns) furious::fill(state, 0);
  furious::copy(state.slice(3, 0, shape.state_columns), from);
  return state;
}
// Columns of such a state, or of a past, that have a meaning.
Tensor narrow(const MixerCall& call, const Tensor& wide) {
  return wide.slice(3, 0, call.shape.state_columns);
}

// chunked_backward() by way of features in memory, but for the decay of the final state.
void features_backward(const MixerCall& call, const ChunkTables& tables, const Tensor& out_gradient,
                       const Tensor& final_state_gradient, const HeadGradients& gradients,
                       const Tensor& initial_state_gradient) {
  const Tensor& initial = call.inputs.initial_state;
  if (initial || tables.chunks > 1) {
    const Tensor state = wide_state(call, initial);
    for_each_walk(call, tables, [&](const ChunkWalk& walk) {
      const Tensor own = walk.part(state);
      for (int64_t c = 0; c < tables.chunks; ++c) {
        const bool fresh = c == 0 && !initial;
        if (!fresh)
          walk.chain(c, walk.queries(call.result.normalizer), own, walk.columns(c, out_gradient, call.result.out),
                     gradients.q, gradients.row_decay, 1.0f);
        if (c + 1 < tables.chunks)
          walk.carry(own, fresh, c, walk.features(c, walk.keys()), walk.columns(c, call.inputs.v));
      }
    });
  }
  const Tensor gradient = wide_state(call, final_state_gradient);
  for_each_walk(call, tables, [&](const ChunkWalk& walk) {
    const Tensor own = walk.part(gradient);
    bool fresh = !final_state_gradient;
    for (int64_t c = tables.chunks - 1; c >= 0; --c) {
      if (!fresh) {
        walk.chain(c, walk.keys(), own, walk.columns(c, call.inputs.v), gradients.k, gradients.key_decay, -1.0f);
        walk.value_gradient(c, walk.features(c, walk.keys()), own, gradients.v);
      }
      if (c == 0 && !initial) break;
      walk.carry(own, fresh, c, walk.features(c, walk.queries(call.result.normalizer)),
                 walk.columns(c, out_gradient, call.result.out));
      fresh = false;
    }
  });
  if (initial) furious::copy(initial_state_gradient, narrow(call, gradient));
}

}  // namespace

ChunkTables chunk_tables(const MixerCall& call, const TokenTables& tokens) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  ChunkTables tables;
  tables.chunk = std::min(call.chunk, shape.length);
  tables.chunks = (shape.length + tables.chunk - 1) / tables.chunk;
  tables.within = {tokens.decay, Tensor::empty({shape.batch, shape.length}, DType::i32, device),
                   Tensor::empty({shape.batch, shape.length}, DType::i32, device)};
  if (tokens.decay || tokens.starts) {
    tables.in = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f32, device);
    tables.out = Tensor::empty_like(tables.in);
    tables.through = Tensor::empty({shape.batch, shape.heads, tables.chunks}, DType::f32, device);
  }
  const dim3 grid(blocks_for(shape.length, kThreads), static_cast<unsigned>(shape.heads),
                  static_cast<unsigned>(shape.batch));
  table_kernel<<<grid, kThreads, 0, stream(device)>>>(
      floats(tables.in), floats(tables.out), floats(tables.through), tables.within.starts.data<int32_t>(),
      tables.within.ends.data<int32_t>(), tokens.decay ? tokens.decay.data<double>() : nullptr,
      tokens.starts ? tokens.starts.data<int32_t>() : nullptr, tokens.ends ? tokens.ends.data<int32_t>() : nullptr,
      shape.length, tables.chunk);
  check_launch("mixer: decays of chunks");
  return tables;
}

Tensor chunked_past(const MixerCall& call, const ChunkTables& tables) {
  const MixerShape& shape = call.shape;
  const Tensor& initial = call.inputs.initial_state;
  const Tensor& final_state = call.result.final_state;
  const Tensor state = wide_state(call, initial);
  Tensor past;
  if (initial || tables.chunks > 1)
    past = Tensor::empty({shape.batch, shape.heads, shape.length, state.size(3)}, DType::f32, call.inputs.q.device());
  if (past && !initial) furious::fill(past.slice(2, 0, tables.chunk), 0);
  for_each_walk(call, tables, [&](const ChunkWalk& walk) {
    const Tensor own = walk.part(state);
    for (int64_t c = 0; c < tables.chunks; ++c) {
      const bool fresh = c == 0 && !initial;
      if (!fresh)
        walk.multiply(walk.part(past).slice(1, walk.begin(c), walk.tokens(c)), walk.features(c, walk.queries()), own);
      if (c + 1 < tables.chunks || final_state)
        walk.carry(own, fresh, c, walk.features(c, walk.keys()), walk.columns(c, call.inputs.v));
    }
  });
  if (final_state) furious::copy(final_state, narrow(call, state));
  return past;
}

void chunked_backward(const MixerCall& call, const ChunkTables& tables, const Tensor& out_gradient,
                      const Tensor& final_state_gradient, const HeadGradients& gradients,
                      const Tensor& initial_state_gradient) {
  const MixerShape& shape = call.shape;
  const auto through_states = chunk_states_support(call) ? chunk_states_backward : features_backward;
  through_states(call, tables, out_gradient, final_state_gradient, gradients, initial_state_gradient);
  if (!final_state_gradient || !call.spec.decay) return;
  state_decay_kernel<<<static_cast<unsigned>(shape.batch * shape.heads), kThreads, 0, stream(out_gradient.device())>>>(
      gradients.key_decay.data<double>(), call.result.final_state.data<float>(), final_state_gradient.data<float>(),
      shape.state_rows * shape.state_columns, shape.length);
  check_launch("mixer: gradient of the final state's decay");
}

}  // namespace furious::cuda
