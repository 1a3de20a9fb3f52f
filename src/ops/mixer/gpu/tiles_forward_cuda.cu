// The parallel form in tiles, forward. A block owns some queries of one head and walks over tiles of keys.
#include "gpu/device.h"
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
  static_assert(kBytes <= Base::kMostBytes);
};

// What the forward pass knows of a row of the lane, and its sums.
struct Row {
  LogDecay local;
  int start;
  float sum, largest;
};

// Scores become weights, or the logarithms of exponential ones. `locals` are those of the group's keys.
template <ScoreKind kKind, int kM, int kN>
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
          if constexpr (kKind == ScoreKind::exponential)
            x = m.f.exponent(x, decay);
          else
            x = m.f.weight<kKind>(x, decay, 0).w;
        }
    }
}

// The same in a far tile, without the factors of rows; `factors` are those of the group's keys.
template <ScoreKind kKind, int kM, int kN>
__device__ void weigh_far(float (&s)[kM][kN][4], const Call& m, const float* factors) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + n * 8 + lane_index() % 4 * 2);
#pragma unroll
    for (int mt = 0; mt < kM; ++mt)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[mt][n][e] = m.f.plain_weight<kKind>(s[mt][n][e], e % 2 == 0 ? factor.x : factor.y).w;
  }
}

// Pairs that are none; the warp's rows begin at w0, the group's keys at key0.
template <ScoreKind kKind, int kM, int kN>
__device__ void mask(float (&s)[kM][kN][4], const Row (&rows)[kM][2], int w0, int key0) {
  constexpr float kHidden = kKind == ScoreKind::exponential ? -INFINITY : 0.0f;
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
    scale_row(acc, u, shrink);
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

template <MixerPrecision kPrecision, int kDim, ScoreKind kKind>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ Call m) {
  using L = Forward<kPrecision, kDim>;
  using P = typename L::P;
  using Operand = typename L::Operand;
  constexpr int kM = L::kM, kN = L::kGroup / 8;
  constexpr bool kExponential = kKind == ScoreKind::exponential;
  extern __shared__ __align__(128) unsigned char memory[];
  Operand queries, keys, values;
  queries.data = reinterpret_cast<decltype(queries.data)>(memory);
  keys.data = queries.data + L::kRows * kDim;
  values.data = keys.data + L::kTile * kDim;
  auto& decays = *reinterpret_cast<TokenDecays<L::kTile>*>(values.data + L::kTile * kDim);

  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int row0 = m.first + static_cast<int>(gridDim.x - 1 - blockIdx.x) * L::kRows;  // the longest work first
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index();
  const KeyWalk<L> walk(m, row0);
  const int steps = (m.qk_dim + 31) / 32;
  const int panels = (m.v_dim + 63) / 64;

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
      rows[mt][u] = {walk.local(row), walk.starts ? walk.starts[row] : 0, 0.0f, -INFINITY};
    }
  const int latest_start = walk.starts ? walk.starts[min(w_last, m.length - 1)] : 0;
  bool far = !kExponential && m.may_erase;

  for (int tile = walk.first_tile; tile <= walk.last_tile; ++tile) {
    const int tile0 = tile * L::kTile;
    if (far && tile0 + L::kTile > row0) {
      far = false;
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const float factor = rows[mt][u].local.factor(1);
          rows[mt][u].sum *= factor;
          scale_row(acc[mt], u, factor);
        }
    }
    __syncthreads();
    walk.template load<kKind, kDim>(keys, values, decays, m, tile0, far);
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < L::kTile; first += L::kGroup) {
      const int key0 = tile0 + first;
      if (key0 > w_last) break;
      float s[kM][kN][4] = {};
      P::scores(s, queries, w0 - row0, keys, first, steps);
      if (!kExponential && far)
        weigh_far<kKind>(s, m, decays.factor + first);
      else
        weigh<kKind>(s, m, rows, decays.local + first);
      if (key0 + L::kGroup - 1 > w0 || latest_start > key0) mask<kKind>(s, rows, w0, key0);
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          if constexpr (kExponential) exponentiate(s[mt], acc[mt], rows[mt][u], u, m.sum_norm);
#pragma unroll
          for (int n = 0; n < kN; ++n) rows[mt][u].sum += s[mt][n][2 * u] + s[mt][n][2 * u + 1];
        }
      P::sums(acc, s, values, first, panels);
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

int64_t largest_tile_dim(Device device) {
  (void)stream(device);  // makes it current
  return most_shared_memory() >= tiles::Layout<256>::kMostBytes ? 256 : 128;
}

bool has_tiles(const MixerShape& shape, Device device) {
  return std::max(shape.qk_dim, shape.v_dim) <= largest_tile_dim(device) && shape.length <= (int64_t{1} << 30);
}

bool tiles_support(const MixerCall& call) {
  return forced_kernel() != "simple" && has_tiles(call.shape, call.inputs.q.device());
}

void tiles_forward(const MixerCall& call, const TokenTables& tables, const Tensor& past) {
  tiles::Call m = tiles::call_of(call, tables);
  m.past = floats(past);
  tiles::with_constants(call, [&](auto precision, auto dim, auto kind) {
    using L = tiles::Forward<precision(), dim()>;
    const auto kernel = tiles::forward_kernel<precision(), dim(), kind()>;
    allow_shared_memory(kernel, L::kBytes);
    kernel<<<tiles::grid_of(call.shape, L::kRows), tiles::kThreads, L::kBytes, stream(call.inputs.q.device())>>>(m);
  });
  check_launch("mixer_forward");
}

}  // namespace furious::cuda
