// dq of the parallel form in tiles: a block owns some queries of one head and walks over tiles of keys.
#include "ops/mixer/gpu/tiles_backward.cuh"

namespace furious::cuda::tiles {
namespace {

template <MixerPrecision kPrecision, int kDim, ScoreKind kKind>
__global__ void __launch_bounds__(kThreads, 2) query_kernel(const __grid_constant__ Call m) {
  using L = Backward<kPrecision, kDim>;
  using P = typename L::P;
  using Operand = typename L::Operand;
  constexpr int kM = L::kM, kN = L::kGroup / 8;
  constexpr bool kExponential = kKind == ScoreKind::exponential;
  extern __shared__ __align__(128) unsigned char memory[];
  Operand queries, gradients, keys, values;
  queries.data = reinterpret_cast<decltype(queries.data)>(memory);
  gradients.data = queries.data + L::kRows * kDim;
  keys.data = gradients.data + L::kRows * kDim;
  values.data = keys.data + L::kTile * kDim;
  auto& decays = *reinterpret_cast<TokenDecays<L::kTile>*>(values.data + L::kTile * kDim);

  const int64_t b = blockIdx.z, h = blockIdx.y, head_row = (b * m.heads + h) * m.length;
  const int row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * L::kRows;  // the longest work first
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index();
  const KeyWalk<L> walk(m, row0);
  const int qk_steps = (m.qk_dim + 31) / 32, v_steps = (m.v_dim + 31) / 32;
  const int panels = (m.qk_dim + 63) / 64;

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
      own[mt][u] =
          query_of(m, head_row, walk.starts, walk.reference, min(w0 + mt * 16 + u * 8 + lane / 4, m.length - 1));
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
          const float factor = own[mt][u].local.factor(1) * own[mt][u].inverse;
          scale_row(dq[mt], u, factor * m.f.slope_constant<kKind>());
          decay_sum[mt][u].scale(factor);
        }
    }
    __syncthreads();
    walk.template load<kKind, kDim>(keys, values, decays, m, tile0, far);
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < L::kTile; first += L::kGroup) {
      const int key0 = tile0 + first;
      if (key0 > w_last) break;
      float s[kM][kN][4] = {}, gv[kM][kN][4] = {};
      P::scores(s, queries, w0 - row0, keys, first, qk_steps);
      P::scores(gv, gradients, w0 - row0, values, first, v_steps);
      float sums[kM][2] = {};  // of few pairs, so that rounding of their sum is no more than that of a pair
      const auto weigh = [&]<bool kFar, bool kMasked>() {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = n * 8 + lane % 4 * 2 + c;
            const float factor = kFar ? decays.factor[first + column] : 0.0f;
            const LogDecay local = kFar ? LogDecay{} : decays.local[first + column];
#pragma unroll
            for (int mt = 0; mt < kM; ++mt)
#pragma unroll
              for (int u = 0; u < 2; ++u) {
                const Query& query = own[mt][u];
                float& x = s[mt][n][2 * u + c];
                const float y = gv[mt][n][2 * u + c];
                PairGradient d = {};
                if constexpr (kFar)
                  d = far_gradient<kKind>(m, query.delta, factor, x, y);
                else
                  d = pair_gradient<kKind>(m, query, x, y, query.local.minus(local));
                if constexpr (kMasked) {
                  const int row = w0 + mt * 16 + u * 8 + lane / 4, key = key0 + column;
                  if (key > row || key < query.start) d = {};
                }
                x = d.score;
                if constexpr (kFar)
                  sums[mt][u] += d.decay;
                else
                  decay_sum[mt][u].add(d.decay);
              }
          }
      };
      run_variant<kKind>(far, key0 + L::kGroup - 1 > w0 || latest_start > key0, weigh);
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int u = 0; u < 2; ++u) decay_sum[mt][u].add(sums[mt][u]);
      P::sums(dq, s, keys, first, panels);
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

}  // namespace

void query_gradients(const MixerCall& call, const Call& m) {
  with_constants(call, [&](auto precision, auto dim, auto kind) {
    using L = Backward<precision(), dim()>;
    launch(query_kernel<precision(), dim(), kind()>, call, m, L::kRows, L::kQueryBytes);
  });
}

}  // namespace furious::cuda::tiles
