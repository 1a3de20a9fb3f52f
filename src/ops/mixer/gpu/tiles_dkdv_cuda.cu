// dk and dv of the parallel form in tiles: a block owns some keys of one head and walks over tiles of queries.
#include "ops/mixer/gpu/tiles_backward.cuh"

namespace furious::cuda::tiles {
namespace {

// kOf: what it computes, the gradients of keys, of values, or of both.
enum class KeyPass : uint8_t { keys, values, both };
template <MixerPrecision kPrecision, int kDim, ScoreKind kKind, KeyPass kOf>
__global__ void __launch_bounds__(kThreads, 2) key_kernel(const __grid_constant__ Call m) {
  using L = Backward<kPrecision, kDim>;
  using P = typename L::P;
  using Operand = typename L::Operand;
  constexpr int kM = L::kKeyM, kN = L::kKeyGroup / 8;
  constexpr bool kKeys = kOf != KeyPass::values, kValues = kOf != KeyPass::keys;
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
  const int qk_panels = (m.qk_dim + 63) / 64, v_panels = (m.v_dim + 63) / 64;

  load_tile<L::kKeyRows, kDim>(keys, HeadRows(m.k, b, h), key0, m.length, m.qk_dim);
  if (kKeys) load_tile<L::kKeyRows, kDim>(values, HeadRows(m.v, b, h), key0, m.length, m.v_dim);

  const int w0 = key0 + warp * L::kKeyWarpRows;
  const int w_last = w0 + L::kKeyWarpRows - 1;
  float dk[kKeys ? kM : 1][kDim / 8][4] = {}, dv[kValues ? kM : 1][kDim / 8][4] = {};
  ExactSum decay_sum[kM][2];
  LogDecay own[kM][2];
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u)
      own[mt][u] = log_decay(a ? a[min(w0 + mt * 16 + u * 8 + lane / 4, m.length - 1)] - reference : 0.0);
  bool far = kKind != ScoreKind::exponential && m.may_erase;

  for (int tile = last_tile; tile >= first_tile; --tile) {
    const int tile0 = tile * L::kTile;
    if (far && tile0 <= last_key) {
      far = false;
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const float factor = own[mt][u].factor(-1);
          if constexpr (kKeys) scale_row(dk[mt], u, factor * m.f.slope_constant<kKind>());
          if constexpr (kValues) scale_row(dv[mt], u, factor);
          if constexpr (kKeys) decay_sum[mt][u].scale(factor);
        }
    }
    __syncthreads();
    load_tile<L::kTile, kDim>(queries, q, tile0, m.length, m.qk_dim);
    load_tile<L::kTile, kDim>(gradients, g, tile0, m.length, m.v_dim);
    if (threadIdx.x < L::kTile) {
      const int row = tile0 + static_cast<int>(threadIdx.x);
      Query query = {};
      query.start = m.length;  // after the last query: sees no key
      if (row < m.length) query = query_of(m, head_row, starts, reference, row);
      if (far) query.inverse *= query.local.factor(1) * m.f.token_constant<kKind>();
      columns[threadIdx.x] = query;
    }
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < L::kTile; first += L::kKeyGroup) {
      const int row0 = tile0 + first;
      if (row0 + L::kKeyGroup - 1 < w0) continue;
      float s[kM][kN][4] = {}, gv[kM][kN][4] = {};
      P::scores(s, keys, w0 - key0, queries, first, qk_steps);
      if constexpr (kKeys) P::scores(gv, values, w0 - key0, gradients, first, v_steps);
      float sums[kM][2] = {};
      const auto weigh = [&]<bool kFar, bool kMasked>() {
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
                PairGradient d = {};
                if constexpr (kFar)
                  d = far_gradient<kKind>(m, query.delta, query.inverse, x, y);
                else
                  d = pair_gradient<kKind>(m, query, x, y, query.local.minus(own[mt][u]));
                if constexpr (kMasked) {
                  const int key = w0 + mt * 16 + u * 8 + lane / 4;
                  if (key > row0 + column || key < query.start) d = {};
                }
                x = d.score;
                y = d.value;
                if constexpr (kFar && kKeys)
                  sums[mt][u] += d.decay;
                else if constexpr (kKeys)
                  decay_sum[mt][u].add(d.decay);
              }
          }
      };
      // The start of the last query is the latest.
      run_variant<kKind>(far, row0 < w_last || columns[first + L::kKeyGroup - 1].start > w0, weigh);
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int u = 0; kKeys && u < 2; ++u) decay_sum[mt][u].add(sums[mt][u]);
      if constexpr (kKeys) P::sums(dk, s, queries, first, qk_panels);
      if constexpr (kValues) P::sums(dv, gv, gradients, first, v_panels);
    }
  }

  const HeadRows to_k(m.dk, b, h), to_v(m.dv, b, h);
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int key = w0 + mt * 16 + u * 8 + lane / 4;
      const double sum = kKeys ? quad_sum(decay_sum[mt][u].value()) : 0.0;
      if (key >= m.length) continue;
      if constexpr (kKeys) store_row<P>(to_k, key, m.qk_dim, dk[mt], u, 1.0f);
      if constexpr (kValues) store_row<P>(to_v, key, m.v_dim, dv[mt], u, 1.0f);
      if (kKeys && m.key_decay && lane % 4 == 0) m.key_decay[head_row + key] = -sum;
    }
}

}  // namespace

void key_gradients(const MixerCall& call, const Call& m) {
  with_constants(call, [&](auto precision, auto dim, auto kind) {
    using L = Backward<precision(), dim()>;
    const auto run = [&]<KeyPass kOf>() {
      launch(key_kernel<precision(), dim(), kind(), kOf>, call, m, L::kKeyRows, L::kKeyBytes);
    };
    if constexpr (L::kKeysAndValues) {
      run.template operator()<KeyPass::both>();
    } else {
      run.template operator()<KeyPass::keys>();
      run.template operator()<KeyPass::values>();
    }
  });
}

}  // namespace furious::cuda::tiles
