// The parallel form in tiles, forward. A block owns some queries of one head and walks over tiles of keys.
#include "ops/mixer/gpu/tiles.cuh"

namespace furious::cuda {
namespace tiles {
namespace {

template <MixerPrecision kPrecision, int kDim>
struct Forward : Layout<kDim> {
  using Base = Layout<kDim>;
  using P = Product<kPrecision, kDim>;
  using Operand = typename P::Operand;
  // Tensor cores like long groups, but for the registers of tf32x3. Without them the code of one would be long for the
  // instruction cache.
  static constexpr bool kLong = kPrecision == MixerPrecision::bf16 || kPrecision == MixerPrecision::tf32;
  static constexpr int kGroup = kLong ? Base::kTile : Base::kGroup;
  static constexpr int kBytes = (Base::kRows + 2 * Base::kTile) * kDim * Operand::kElementBytes +
                                Base::kTile * static_cast<int>(sizeof(LogDecay));
};

// What the forward pass knows of a row of the lane, and its sums.
struct Row {
  LogDecay local;
  int start;
  float sum, largest;
};

// Scores become weights, or the logarithms of exponential ones. `locals` are those of the group's keys.
template <bool kExponential, int kM, int kN>
__device__ void weigh(float (&s)[kM][kN][4], const Call& m, const Row (&rows)[kM][2], const LogDecay* locals) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const LogDecay local = locals[n * 8 + lane_index() % 4 * 2 + c];
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          float& x = s[mt][n][2 * u + c];
          const float decay = rows[mt][u].local.minus(local);
          x = kExponential ? m.f.exponent(x, decay) : m.f.polynomial(x) * m.f.decay_factor(decay);
        }
    }
}

// Pairs that are none; the warp's rows begin at w0, the group's keys at key0.
template <bool kExponential, int kM, int kN>
__device__ void mask(float (&s)[kM][kN][4], const Row (&rows)[kM][2], int w0, int key0) {
  constexpr float kHidden = kExponential ? -INFINITY : 0.0f;
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = w0 + mt * 16 + e / 2 * 8 + lane_index() / 4, key = key0 + n * 8 + lane_index() % 4 * 2 + e % 2;
        if (key > row || key < rows[mt][e / 2].start) s[mt][n][e] = kHidden;
      }
}

// Exponentials of one row, under the sum norm relative to the largest exponent so far.
template <int kN, int kBlocks>
__device__ void exponentiate(float (&s)[kN][4], float (&acc)[kBlocks][4], Row& row, int u, bool sum_norm) {
  float base = 0;
  if (sum_norm) {
    float top = row.largest;
#pragma unroll
    for (int n = 0; n < kN; ++n) top = fmaxf(top, fmaxf(s[n][2 * u], s[n][2 * u + 1]));
    top = quad_max(top);
    base = top == -INFINITY ? 0.0f : top;
    const float shrink = fast_exp2((row.largest - base) * kLog2e);
    row.largest = top;
    row.sum *= shrink;
#pragma unroll
    for (int d = 0; d < kBlocks; ++d) {
      acc[d][2 * u] *= shrink;
      acc[d][2 * u + 1] *= shrink;
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 2 * u; e < 2 * u + 2; ++e) s[n][e] = fast_exp2((s[n][e] - base) * kLog2e);
}

// Writes row u of the lane, with what a state adds. By the four lanes that hold it.
template <class P, int kBlocks>
__device__ void finish(const Call& m, float (&acc)[kBlocks][4], const Row& own, int u, int row) {
  const int64_t b = blockIdx.z, h = blockIdx.y;
  float n = quad_sum(own.sum);
  if (row >= m.length) return;
  if (m.past) {
    const float* const past = m.past + ((b * m.heads + h) * m.length + row) * past_columns(m.v_dim, m.sum_norm);
    if (m.sum_norm) n += past[m.v_dim];
#pragma unroll
    for (int run = 0; run < 2 * kBlocks / P::kRun; ++run)
#pragma unroll
      for (int i = 0; i < P::kRun; ++i)
        if (P::column(run) < m.v_dim) P::element(acc, run, i, u) += past[P::column(run) + i];
  }
  store_row<P>(HeadRows(m.out, b, h), row - m.first, m.v_dim, acc, u, m.inverse_normalizer(n));
  if (lane_index() % 4 != 0) return;
  const int64_t place = (b * m.heads + h) * (m.length - m.first) + row - m.first;
  if (m.normalizer) m.normalizer[place] = n;
  if (m.maximum) m.maximum[place] = own.largest;
}

template <MixerPrecision kPrecision, int kDim, bool kExponential>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ Call m) {
  using L = Forward<kPrecision, kDim>;
  using P = typename L::P;
  using Operand = typename L::Operand;
  constexpr int kM = L::kM, kN = L::kGroup / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  Operand queries, keys, values;
  queries.data = reinterpret_cast<decltype(queries.data)>(memory);
  keys.data = queries.data + L::kRows * kDim;
  values.data = keys.data + L::kTile * kDim;
  LogDecay* const locals = reinterpret_cast<LogDecay*>(values.data + L::kTile * kDim);

  const int64_t b = blockIdx.z, h = blockIdx.y, head_row = (b * m.heads + h) * m.length;
  const int row0 = m.first + static_cast<int>(gridDim.x - 1 - blockIdx.x) * L::kRows;  // the longest work first
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
  const int steps = (m.qk_dim + 31) / 32;
  const bool all = m.v_dim > 64;

  load_tile<L::kRows, kDim>(queries, HeadRows(m.q, b, h), row0 - m.first, m.length - m.first, m.qk_dim);

  const int w0 = row0 + warp * L::kWarpRows;
  const int w_last = w0 + L::kWarpRows - 1;
  float acc[kM][kDim / 8][4] = {};
  Row rows[kM][2];
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = min(w0 + mt * 16 + u * 8 + lane / 4, m.length - 1);
      rows[mt][u] = {log_decay(a ? a[row] - reference : 0.0), starts ? starts[row] : 0, 0.0f, -INFINITY};
    }
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
      float s[kM][kN][4] = {};
      P::scores(s, queries, w0 - row0, keys, first, steps);
      weigh<kExponential>(s, m, rows, locals + first);
      if (key0 + L::kGroup - 1 > w0 || latest_start > key0) mask<kExponential>(s, rows, w0, key0);
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          if constexpr (kExponential) exponentiate(s[mt], acc[mt], rows[mt][u], u, m.sum_norm);
#pragma unroll
          for (int n = 0; n < kN; ++n) rows[mt][u].sum += s[mt][n][2 * u] + s[mt][n][2 * u + 1];
        }
      P::sums(acc, s, values, first, all);
    }
  }

#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) finish<P>(m, acc[mt], rows[mt][u], u, w0 + mt * 16 + u * 8 + lane / 4);
}

}  // namespace

Call call_of(const MixerCall& call, const TokenTables& tables) {
  Call m = {};
  const MixerShape& shape = call.shape;
  m.q = token_rows(call.inputs.q, shape.heads);
  m.k = token_rows(call.inputs.k, shape.heads);
  m.v = token_rows(call.inputs.v, shape.heads);
  m.out = token_rows(call.result.out, shape.heads);
  m.decay = tables.decay ? tables.decay.data<double>() : nullptr;
  m.starts = tables.starts ? tables.starts.data<int32_t>() : nullptr;
  m.ends = tables.ends ? tables.ends.data<int32_t>() : nullptr;
  m.normalizer = floats(call.result.normalizer);
  m.maximum = floats(call.result.maximum);
  m.heads = shape.heads;
  m.length = static_cast<int>(shape.length);
  m.first = static_cast<int>(shape.first_query);
  m.qk_dim = static_cast<int>(shape.qk_dim);
  m.v_dim = static_cast<int>(shape.v_dim);
  m.sum_norm = call.spec.norm == Norm::sum;
  m.may_erase = !call.spec.signed_decay;
  m.f = score_function(call.spec, shape.scale);
  return m;
}

}  // namespace tiles

MixerPrecision product_precision(const MixerCall& call) {
  if (call.precision != MixerPrecision::automatic) return call.precision;
  return call.inputs.q.dtype() == DType::bf16 ? MixerPrecision::bf16 : MixerPrecision::tf32x3;
}

bool tiles_support(const MixerCall& call) {
  const auto fits = [](int64_t dim) { return dim % 8 == 0 && dim <= kLargestTileDim; };
  return forced_kernel() != "simple" && fits(call.shape.qk_dim) && fits(call.shape.v_dim) &&
         call.shape.length <= (int64_t{1} << 30);
}

void tiles_forward(const MixerCall& call, const TokenTables& tables, const Tensor& past) {
  tiles::Call m = tiles::call_of(call, tables);
  m.past = floats(past);
  tiles::with_constants(call, [&](auto precision, auto dim, auto exponential) {
    using L = tiles::Forward<precision(), dim()>;
    const auto kernel = tiles::forward_kernel<precision(), dim(), exponential()>;
    allow_shared_memory(kernel, L::kBytes);
    kernel<<<tiles::grid_of(call.shape, L::kRows), tiles::kThreads, L::kBytes, stream(call.inputs.q.device())>>>(m);
  });
  check_launch("mixer_forward");
}

}  // namespace furious::cuda
