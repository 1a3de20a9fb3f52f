// The parallel form in tiles, backward. With δ_i = g_i·o_i under the sum norm (else 0), r_i = 1/n_i (else 1), x = q·k:
//
//   dw_ij = (g_i·v_j − δ_i)·r_i      dq_i = Σ_j c_ij k_j      dk_j = Σ_i c_ij q_i      c_ij = ∂w_ij/∂x·dw_ij
//   dv_j = Σ_i w_ij·r_i·g_i          dA_t = Σ_j w_tj·dw_tj − Σ_i w_it·dw_it, without pairs whose mask is saturated
//
// One kernel owns queries and walks over keys for dq, one owns keys and walks over queries for dk and dv. Scores are
// made twice, and nothing is added up across blocks: the same bits on every run.
#include "ops/mixer/gpu/tiles.cuh"

namespace furious::cuda {
namespace tiles {
namespace {

// δ: a warp per token.
__global__ void delta_kernel(const __grid_constant__ Call m) {
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int t = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (t >= m.length) return;
  const HeadRows g(m.g, b, h), out(m.out, b, h);
  float sum = 0;
  if (lane_index() * 8 < m.v_dim) {
    float x[8], y[8];
    g.load(x, t, lane_index() * 8);
    out.load(y, t, lane_index() * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
  }
  sum = warp_sum(sum);
  if (lane_index() == 0) m.delta[(b * m.heads + h) * m.length + t] = sum;
}

// What the backward pass knows of a query, beside its row.
struct alignas(16) Query {
  LogDecay local;
  float delta, inverse, shift;
  int start;
};
__device__ Query query_of(const Call& m, int64_t head_row, const int* starts, double reference, int row) {
  Query query = {};
  query.local = log_decay(m.decay ? m.decay[head_row + row] - reference : 0.0);
  query.delta = m.sum_norm ? m.delta[head_row + row] : 0.0f;
  query.inverse = m.inverse_normalizer(m.sum_norm ? m.normalizer[head_row + row] : 1.0f);
  query.shift = m.maximum ? m.maximum[head_row + row] : 0.0f;
  query.start = starts ? starts[row] : 0;
  return query;
}

// c, w·r and w·dw of a pair, from q·k and g·v; `decay` is A_i − A_j.
struct PairGradient {
  float score, value, decay;
};
template <bool kExponential>
__device__ PairGradient pair_gradient(const Call& m, const Query& query, float qk, float gv, float decay) {
  const ScoreFunction::Weight weight = m.f.weight<kExponential>(qk, decay, query.shift);
  const float dw = (gv - query.delta) * query.inverse;
  return {weight.slope * dw, weight.w * query.inverse, decay < m.f.saturated ? weight.w * dw : 0.0f};
}

template <MixerPrecision kPrecision, int kDim>
struct Backward : Layout<kDim> {
  using Base = Layout<kDim>;
  using P = Product<kPrecision, kDim>;
  using Operand = typename P::Operand;
  static constexpr bool kThree = kPrecision == MixerPrecision::tf32x3;
  // With accumulators for both dk and dv fewer registers are left: fewer rows of a tile at a time, or of the warp.
  static constexpr int kKeyM = kThree ? 1 : Base::kM;
  static constexpr int kKeyWarpRows = 16 * kKeyM, kKeyRows = kWarps * kKeyWarpRows;
  static constexpr bool kFew = kThree ? kDim == 128 : kDim == 64 || kPrecision == MixerPrecision::bf16;
  static constexpr int kKeyGroup = kFew ? 16 : Base::kGroup;

  static constexpr int tile_bytes(int own_rows) { return 2 * (own_rows + Base::kTile) * kDim * Operand::kElementBytes; }
  static constexpr int kQueryBytes = tile_bytes(Base::kRows) + Base::kTile * static_cast<int>(sizeof(LogDecay));
  static constexpr int kKeyBytes = tile_bytes(kKeyRows) + Base::kTile * static_cast<int>(sizeof(Query));
};

template <MixerPrecision kPrecision, int kDim, bool kExponential>
__global__ void __launch_bounds__(kThreads, 2) query_kernel(const __grid_constant__ Call m) {
  using L = Backward<kPrecision, kDim>;
  using P = typename L::P;
  using Operand = typename L::Operand;
  constexpr int kM = L::kM, kN = L::kGroup / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  Operand queries, gradients, keys, values;
  queries.data = reinterpret_cast<decltype(queries.data)>(memory);
  gradients.data = queries.data + L::kRows * kDim;
  keys.data = gradients.data + L::kRows * kDim;
  values.data = keys.data + L::kTile * kDim;
  LogDecay* const locals = reinterpret_cast<LogDecay*>(values.data + L::kTile * kDim);

  const int64_t b = blockIdx.z, h = blockIdx.y, head_row = (b * m.heads + h) * m.length;
  const int row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * L::kRows;  // the longest work first
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index();
  const double* const a = m.decay ? m.decay + head_row : nullptr;
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const double reference = a ? a[row0] : 0.0;
  const HeadRows k(m.k, b, h), v(m.v, b, h);
  int first_tile = (starts ? starts[row0] : 0) / L::kTile;
  if (a && m.may_erase)
    first_tile += count_erased<kThreads>(row0 / L::kTile - first_tile, [&](int i) {
      return reference - a[(first_tile + i) * L::kTile + L::kTile - 1] < kErased;
    });
  const int last_tile = (min(row0 + L::kRows, m.length) - 1) / L::kTile;
  const int qk_steps = (m.qk_dim + 31) / 32, v_steps = (m.v_dim + 31) / 32;
  const bool all = m.qk_dim > 64;

  load_tile<L::kRows, kDim>(queries, HeadRows(m.q, b, h), row0, m.length, m.qk_dim);
  load_tile<L::kRows, kDim>(gradients, HeadRows(m.g, b, h), row0, m.length, m.v_dim);

  const int w0 = row0 + warp * L::kWarpRows;
  const int w_last = w0 + L::kWarpRows - 1;
  float dq[kM][kDim / 8][4] = {};
  ExactSum decay_sum[kM][2];
  Query own[kM][2];
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u)
      own[mt][u] = query_of(m, head_row, starts, reference, min(w0 + mt * 16 + u * 8 + lane / 4, m.length - 1));
  const int latest_start = starts ? starts[min(w_last, m.length - 1)] : 0;

  for (int tile = first_tile; tile <= last_tile; ++tile) {
    const int tile0 = tile * L::kTile;
    __syncthreads();
    load_tile<L::kTile, kDim>(keys, k, tile0, m.length, m.qk_dim);
    load_tile<L::kTile, kDim>(values, v, tile0, m.length, m.v_dim);
    if (threadIdx.x < L::kTile) {
      const int key = min(tile0 + static_cast<int>(threadIdx.x), m.length - 1);
      locals[threadIdx.x] = log_decay(a ? a[key] - reference : 0.0);
    }
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < L::kTile; first += L::kGroup) {
      const int key0 = tile0 + first;
      if (key0 > w_last) break;
      float s[kM][kN][4] = {}, gv[kM][kN][4] = {};
      P::scores(s, queries, w0 - row0, keys, first, qk_steps);
      P::scores(gv, gradients, w0 - row0, values, first, v_steps);
      const auto weigh = [&](auto masked) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const LogDecay local = locals[first + n * 8 + lane % 4 * 2 + c];
#pragma unroll
            for (int mt = 0; mt < kM; ++mt)
#pragma unroll
              for (int u = 0; u < 2; ++u) {
                const Query& query = own[mt][u];
                float& x = s[mt][n][2 * u + c];
                PairGradient d =
                    pair_gradient<kExponential>(m, query, x, gv[mt][n][2 * u + c], query.local.minus(local));
                if constexpr (decltype(masked)::value) {
                  const int row = w0 + mt * 16 + u * 8 + lane / 4, key = key0 + n * 8 + lane % 4 * 2 + c;
                  if (key > row || key < query.start) d = {};
                }
                x = d.score;
                decay_sum[mt][u].add(d.decay);
              }
          }
      };
      if (key0 + L::kGroup - 1 > w0 || latest_start > key0)
        weigh(std::true_type());
      else
        weigh(std::false_type());
      P::sums(dq, s, keys, first, all);
    }
  }

  const HeadRows to(m.dq, b, h);
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = w0 + mt * 16 + u * 8 + lane / 4;
      const double sum = quad_sum(decay_sum[mt][u].value());
      if (row >= m.length) continue;
      store_row<P>(to, row, m.qk_dim, dq[mt], u, 1.0f);
      if (m.row_decay && lane % 4 == 0) m.row_decay[head_row + row] = sum;
    }
}

template <MixerPrecision kPrecision, int kDim, bool kExponential>
__global__ void __launch_bounds__(kThreads, 2) key_kernel(const __grid_constant__ Call m) {
  using L = Backward<kPrecision, kDim>;
  using P = typename L::P;
  using Operand = typename L::Operand;
  constexpr int kM = L::kKeyM, kN = L::kKeyGroup / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  Operand keys, values, queries, gradients;
  keys.data = reinterpret_cast<decltype(keys.data)>(memory);
  values.data = keys.data + L::kKeyRows * kDim;
  queries.data = values.data + L::kKeyRows * kDim;
  gradients.data = queries.data + L::kTile * kDim;
  Query* const columns = reinterpret_cast<Query*>(gradients.data + L::kTile * kDim);

  const int64_t b = blockIdx.z, h = blockIdx.y, head_row = (b * m.heads + h) * m.length;
  const int key0 = static_cast<int>(blockIdx.x) * L::kKeyRows;  // the first keys have the most queries
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index();
  const double* const a = m.decay ? m.decay + head_row : nullptr;
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const int last_key = min(key0 + L::kKeyRows, m.length) - 1;
  const double reference = a ? a[last_key] : 0.0;
  const HeadRows q(m.q, b, h), g(m.g, b, h);
  const int first_tile = key0 / L::kTile;
  int last_tile = (m.ends ? m.ends[b * m.length + last_key] - 1 : m.length - 1) / L::kTile;
  if (a && m.may_erase)
    last_tile -= count_erased<kThreads>(last_tile - last_key / L::kTile,
                                        [&](int i) { return a[(last_tile - i) * L::kTile] - reference < kErased; });
  const int qk_steps = (m.qk_dim + 31) / 32, v_steps = (m.v_dim + 31) / 32;
  const bool all_qk = m.qk_dim > 64, all_v = m.v_dim > 64;

  load_tile<L::kKeyRows, kDim>(keys, HeadRows(m.k, b, h), key0, m.length, m.qk_dim);
  load_tile<L::kKeyRows, kDim>(values, HeadRows(m.v, b, h), key0, m.length, m.v_dim);

  const int w0 = key0 + warp * L::kKeyWarpRows;
  const int w_last = w0 + L::kKeyWarpRows - 1;
  float dk[kM][kDim / 8][4] = {}, dv[kM][kDim / 8][4] = {};
  ExactSum decay_sum[kM][2];
  LogDecay own[kM][2];
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u)
      own[mt][u] = log_decay(a ? a[min(w0 + mt * 16 + u * 8 + lane / 4, m.length - 1)] - reference : 0.0);

  for (int tile = first_tile; tile <= last_tile; ++tile) {
    const int tile0 = tile * L::kTile;
    __syncthreads();
    load_tile<L::kTile, kDim>(queries, q, tile0, m.length, m.qk_dim);
    load_tile<L::kTile, kDim>(gradients, g, tile0, m.length, m.v_dim);
    if (threadIdx.x < L::kTile) {
      const int row = tile0 + static_cast<int>(threadIdx.x);
      Query query = {};
      query.start = m.length;  // after the last query: sees no key
      if (row < m.length) query = query_of(m, head_row, starts, reference, row);
      columns[threadIdx.x] = query;
    }
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < L::kTile; first += L::kKeyGroup) {
      const int row0 = tile0 + first;
      if (row0 + L::kKeyGroup - 1 < w0) continue;
      float s[kM][kN][4] = {}, gv[kM][kN][4] = {};
      P::scores(s, keys, w0 - key0, queries, first, qk_steps);
      P::scores(gv, values, w0 - key0, gradients, first, v_steps);
      const auto weigh = [&](auto masked) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = n * 8 + lane % 4 * 2 + c;
            const Query query = columns[first + column];
#pragma unroll
            for (int mt = 0; mt < kM; ++mt)
#pragma unroll
              for (int u = 0; u < 2; ++u) {
                float &x = s[mt][n][2 * u + c], &y = gv[mt][n][2 * u + c];
                PairGradient d = pair_gradient<kExponential>(m, query, x, y, query.local.minus(own[mt][u]));
                if constexpr (decltype(masked)::value) {
                  const int key = w0 + mt * 16 + u * 8 + lane / 4;
                  if (key > row0 + column || key < query.start) d = {};
                }
                x = d.score;
                y = d.value;
                decay_sum[mt][u].add(d.decay);
              }
          }
      };
      // The start of the last query is the latest.
      if (row0 < w_last || columns[first + L::kKeyGroup - 1].start > w0)
        weigh(std::true_type());
      else
        weigh(std::false_type());
      P::sums(dk, s, queries, first, all_qk);
      P::sums(dv, gv, gradients, first, all_v);
    }
  }

  const HeadRows to_k(m.dk, b, h), to_v(m.dv, b, h);
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int key = w0 + mt * 16 + u * 8 + lane / 4;
      const double sum = quad_sum(decay_sum[mt][u].value());
      if (key >= m.length) continue;
      store_row<P>(to_k, key, m.qk_dim, dk[mt], u, 1.0f);
      store_row<P>(to_v, key, m.v_dim, dv[mt], u, 1.0f);
      if (m.key_decay && lane % 4 == 0) m.key_decay[head_row + key] = -sum;
    }
}

}  // namespace
}  // namespace tiles

void tiles_backward(const MixerCall& call, const TokenTables& tables, const Tensor& out_gradient,
                    const HeadGradients& gradients) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const cudaStream_t s = stream(device);
  tiles::Call m = tiles::call_of(call, tables);
  m.g = tiles::token_rows(out_gradient, shape.heads);
  m.dq = tiles::token_rows(gradients.q, shape.heads);
  m.dk = tiles::token_rows(gradients.k, shape.heads);
  m.dv = tiles::token_rows(gradients.v, shape.heads);
  m.row_decay = doubles(gradients.row_decay);
  m.key_decay = doubles(gradients.key_decay);
  Tensor delta;
  if (m.sum_norm) {
    delta = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f32, device);
    m.delta = delta.data<float>();
    tiles::delta_kernel<<<tiles::grid_of(shape, tiles::kWarps), tiles::kThreads, 0, s>>>(m);
    check_launch("mixer_backward");
  }
  tiles::with_constants(call, [&](auto precision, auto dim, auto exponential) {
    using L = tiles::Backward<precision(), dim()>;
    const auto query = tiles::query_kernel<precision(), dim(), exponential()>;
    const auto key = tiles::key_kernel<precision(), dim(), exponential()>;
    allow_shared_memory(query, L::kQueryBytes);
    allow_shared_memory(key, L::kKeyBytes);
    query<<<tiles::grid_of(shape, L::kRows), tiles::kThreads, L::kQueryBytes, s>>>(m);
    check_launch("mixer_backward");
    key<<<tiles::grid_of(shape, L::kKeyRows), tiles::kThreads, L::kKeyBytes, s>>>(m);
    check_launch("mixer_backward");
  });
}

}  // namespace furious::cuda
