// The parallel form on tensor cores, backward. With g' = g/n and δ' = δ/n (exponential: g and δ, and p holds 1/n):
//
//   dq_i = Σ_j c_ij k_j      dk_j = Σ_i c_ij q_i      dv_j = Σ_i w_ij g'_i      c_ij = f'(S_ij)·scale·decay·(g'_i·v_j −
//   δ'_i)
//
// Two kernels: one owns queries and walks over keys for dq, one owns keys and walks over queries for dk and dv. Scores
// are made twice, and nothing is added up across blocks: the same bits on every run.
#include "ops/mixer/gpu/parallel-inl.cuh"

namespace furious::cuda {
namespace {

constexpr int kPrepareThreads = 256;

// g', δ' and the logarithm of the normalizer: 8 columns per lane, as many lanes as a token and head have eighths.
template <int kDim, bool kExponential>
__global__ void prepare_kernel(const Parallel m, bf16* scaled, Heads<bf16> g, bool wide) {
  constexpr int kLanes = kDim / 8;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * (kPrepareThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool valid = t < m.length;  // all lanes of a warp take part in the sum
  const int64_t row = (b * m.heads + h) * m.length + t;
  union Eight {
    uint4 all;
    bf16 each[8];
  } x = {}, o = {};
  float sum = 0;
  if (valid) {
    const bf16* const from = g.row(b, t, h) + lane * 8;
    const bf16* const out = m.out.row(b, t, h) + lane * 8;
    if (wide) {
      x.all = *reinterpret_cast<const uint4*>(from);
      if (m.sum_norm) o.all = *reinterpret_cast<const uint4*>(out);
    } else {
      for (int i = 0; i < 8; ++i) x.each[i] = from[i];
      for (int i = 0; m.sum_norm && i < 8; ++i) o.each[i] = out[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_float(x.each[i]) * to_float(o.each[i]);
  }
  sum = warp_sum<kLanes>(sum);
  if (!valid) return;
  const float n = m.sum_norm ? m.normalizer[row] : 1.0f;
  const float inverse = kExponential || !m.sum_norm ? 1.0f : fabsf(n) < kSmallestNormalizer ? 0.0f : 1 / n;
#pragma unroll
  for (int i = 0; i < 8; ++i) x.each[i] = from_float<bf16>(to_float(x.each[i]) * inverse);
  *reinterpret_cast<uint4*>(scaled + ((b * m.length + t) * m.heads + h) * kDim + lane * 8) = x.all;
  if (lane != 0) return;
  m.delta[row] = sum * inverse;
  if (kExponential) m.log_sum[row] = m.maximum[row] * kLog2e + log2f(n);
}

// c_ij and w_ij from q·k, with `d` the decay and scale of the pair (for exponentials the rest of the exponent).
template <Score kScore>
__device__ float weight(float s, float d, float scale) {
  if (kScore == Score::exponential) return fast_exp2(fmaf(s, scale, d));
  return kScore == Score::squared ? s * s * d : s * d;
}
template <Score kScore>
__device__ float coefficient(float s, float d, float w, float dw, float plain_scale) {
  if (kScore == Score::exponential) return w * dw * plain_scale;
  return kScore == Score::squared ? 2 * s * d * dw : d * dw;
}

constexpr int kGroup = 32;  // keys or queries that scores are held for at a time

template <int kDim>
struct QueryLayout {
  static constexpr int kWarps = 4, kThreads = 128;
  static constexpr int kMTiles = kDim == 64 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kMTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kStage = 2 * kTile * kDim;
  static constexpr int kBytes = (2 * kRows * kDim + 2 * kStage) * 2 + 2 * (2 * kTile + 1) * 4;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(128, kDim == 64 ? 2 : 1) query_kernel(const Parallel m) {
  using L = QueryLayout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kM = L::kMTiles, kN = kGroup / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  const Tile<kDim> queries{reinterpret_cast<bf16*>(memory)};
  const Tile<kDim> gradients{queries.data + L::kRows * kDim};
  bf16* const stages = gradients.data + L::kRows * kDim;
  float* const columns = reinterpret_cast<float*>(stages + 2 * L::kStage);
  float* const locals = columns + 2 * kTile;
  float* const steps = locals + 2 * kTile;

  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * L::kRows;
  const int length = static_cast<int>(m.length);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const double* const a = m.decay_of(b, h);
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const double reference = a ? a[row0] : 0.0;
  const float scale = score_scale<kScore>(m.scale);
  const int last_row = min(row0 + L::kRows, length) - 1;
  int first_tile = (starts ? starts[row0] : 0) / kTile;
  if (a)
    first_tile += count_erased<L::kThreads>(row0 / kTile - first_tile, [&](int i) {
      return static_cast<float>(reference - a[(first_tile + i) * kTile + kTile - 1]) < static_cast<float>(kErased);
    });
  const int last_tile = last_row / kTile;

  const auto keys_of = [&](int stage) { return Tile<kDim>{stages + stage * L::kStage}; };
  const auto values_of = [&](int stage) { return Tile<kDim>{stages + stage * L::kStage + kTile * kDim}; };
  const auto load = [&](int tile, int stage) {
    const int64_t key0 = static_cast<int64_t>(tile) * kTile;
    keys_of(stage).template load<L::kThreads>(m.k.row(b, key0, h), m.k.token, kTile, length - key0);
    values_of(stage).template load<L::kThreads>(m.v.row(b, key0, h), m.v.token, kTile, length - key0);
    commit_copies();
    const int i = static_cast<int>(threadIdx.x);
    if (i < kTile) {
      float column = kExponential ? 0.0f : scale, local = 0;
      if (a) {
        const double own = a[min(key0 + i, m.length - 1)];
        local = static_cast<float>(own - reference);
        if (kExponential)
          column = -local * kLog2e;
        else
          column = scale * __expf(static_cast<float>(a[min(key0 + kTile - 1, m.length - 1)] - own));
      }
      columns[stage * kTile + i] = column;
      locals[stage * kTile + i] = local;
    } else if (i == kTile && a && !kExponential) {
      const double last = a[min(key0 + kTile - 1, m.length - 1)];
      steps[stage] = tile > first_tile ? __expf(static_cast<float>(last - a[key0 - 1])) : 1.0f;
    }
  };

  queries.template load<L::kThreads>(m.q.row(b, row0, h), m.q.token, L::kRows, length - row0);
  gradients.template load<L::kThreads>(m.g.row(b, row0, h), m.g.token, L::kRows, length - row0);
  load(first_tile, 0);

  const int w0 = row0 + warp * L::kWarpRows;
  const int w_last = w0 + L::kWarpRows - 1;
  const int64_t head_row = (b * m.heads + h) * m.length;
  float acc[kM][kDim / 8][4] = {};
  float delta[kM][2], own[kM][2];  // own: A_i less the reference; for exponentials the part of the exponent of the row
  int start[kM][2];
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = min(w0 + mt * 16 + u * 8 + lane / 4, length - 1);
      own[mt][u] = a ? static_cast<float>(a[row] - reference) : 0.0f;
      if (kExponential) own[mt][u] = own[mt][u] * kLog2e - m.log_sum[head_row + row];
      delta[mt][u] = m.delta[head_row + row];
      start[mt][u] = starts ? starts[row] : 0;
    }
  const int latest_start = starts ? starts[min(w_last, length - 1)] : 0;
  bool true_sums = false;
  float previous = 0;

  for (int tile = first_tile; tile <= last_tile; ++tile) {
    const int stage = (tile - first_tile) & 1;
    wait_for_copies<0>();
    __syncthreads();
    if (tile < last_tile) load(tile + 1, stage ^ 1);
    const int key0 = tile * kTile;
    if (key0 > w_last) continue;
    const bool diagonal = key0 + kTile - 1 > w0;
    const bool masked = diagonal || latest_start > key0;
    const float* const column = columns + stage * kTile;
    const float* const local = locals + stage * kTile;
    const Tile<kDim> keys = keys_of(stage), values = values_of(stage);

    if (!kExponential) {
      if (diagonal && !true_sums) {
        true_sums = true;
        if (a && tile > first_tile)
#pragma unroll
          for (int mt = 0; mt < kM; ++mt)
            scale_rows(acc[mt], __expf(own[mt][0] - previous), __expf(own[mt][1] - previous));
      } else if (!diagonal && a) {
        const float factor = steps[stage];
#pragma unroll
        for (int mt = 0; mt < kM; ++mt) scale_rows(acc[mt], factor, factor);
      }
      previous = local[kTile - 1];
    }

#pragma unroll
    for (int first = 0; first < kTile; first += kGroup) {
      float s[kM][kN][4] = {}, dp[kM][kN][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t q[kM][4], g[kM][4];
#pragma unroll
        for (int mt = 0; mt < kM; ++mt) {
          queries.a_fragment(q[mt], w0 - row0 + mt * 16, step);
          gradients.a_fragment(g[mt], w0 - row0 + mt * 16, step);
        }
#pragma unroll
        for (int nn = 0; nn < kN; nn += 2) {
          uint32_t f[4];
          keys.b_fragment(f, first + nn * 8, step);
#pragma unroll
          for (int mt = 0; mt < kM; ++mt) {
            mma(s[mt][nn], q[mt], f[0], f[1]);
            mma(s[mt][nn + 1], q[mt], f[2], f[3]);
          }
          values.b_fragment(f, first + nn * 8, step);
#pragma unroll
          for (int mt = 0; mt < kM; ++mt) {
            mma(dp[mt][nn], g[mt], f[0], f[1]);
            mma(dp[mt][nn + 1], g[mt], f[2], f[3]);
          }
        }
      }
      const auto weigh = [&](auto is_masked) {
        constexpr bool kMasked = decltype(is_masked)::value;
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const int c = first + nn * 8 + lane % 4 * 2;
          const float2 factors = *reinterpret_cast<const float2*>(column + c);
          const float2 places = kMasked ? *reinterpret_cast<const float2*>(local + c) : float2{};
#pragma unroll
          for (int mt = 0; mt < kM; ++mt)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int u = e / 2;
              float& x = s[mt][nn][e];
              float d = e % 2 == 0 ? factors.x : factors.y;
              if (kExponential) d += own[mt][u];
              if (kMasked && !kExponential && diagonal && a)
                d = scale * __expf(fminf(own[mt][u] - (e % 2 == 0 ? places.x : places.y), 0.0f));
              const float w = kExponential ? weight<kScore>(x, d, scale) : 0.0f;
              x = coefficient<kScore>(x, d, w, dp[mt][nn][e] - delta[mt][u], m.scale);
              if constexpr (kMasked) {
                const int row = w0 + mt * 16 + u * 8 + lane / 4, key = key0 + c + e % 2;
                if (key > row || key < start[mt][u]) x = 0.0f;
              }
            }
        }
      };
      masked ? weigh(std::true_type()) : weigh(std::false_type());
#pragma unroll
      for (int kk = 0; kk < kGroup / 16; ++kk) {
        uint32_t p[kM][4];
#pragma unroll
        for (int mt = 0; mt < kM; ++mt) {
          p[mt][0] = pack(s[mt][2 * kk][0], s[mt][2 * kk][1]);
          p[mt][1] = pack(s[mt][2 * kk][2], s[mt][2 * kk][3]);
          p[mt][2] = pack(s[mt][2 * kk + 1][0], s[mt][2 * kk + 1][1]);
          p[mt][3] = pack(s[mt][2 * kk + 1][2], s[mt][2 * kk + 1][3]);
        }
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t f[4];
          keys.b_fragment_transposed(f, first + kk * 16, d);
#pragma unroll
          for (int mt = 0; mt < kM; ++mt) {
            mma(acc[mt][2 * d], p[mt], f[0], f[1]);
            mma(acc[mt][2 * d + 1], p[mt], f[2], f[3]);
          }
        }
      }
    }
  }

  constexpr float kDegree = kScore == Score::squared ? 2 : 1;
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = w0 + mt * 16 + u * 8 + lane / 4;
      const bool valid = row < length;
      const uint32_t* const from = reinterpret_cast<const uint32_t*>(m.q.row(b, valid ? row : 0, h));
      uint32_t* const to = reinterpret_cast<uint32_t*>(m.dq.row(b, valid ? row : 0, h));
      float product = 0;  // q·dq
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        const float x = acc[mt][d][u * 2], y = acc[mt][d][u * 2 + 1];
        if (valid) to[d * 4 + lane % 4] = pack(x, y);
        if (m.row_decay) {
          const float2 q = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(from[d * 4 + lane % 4]));
          product += q.x * x + q.y * y;
        }
      }
      if (!m.row_decay) continue;
      product = quad_sum(product);
      if (valid && lane % 4 == 0) m.row_decay[head_row + row] = product / kDegree;
    }
}

template <int kDim>
struct KeyLayout {
  static constexpr int kWarps = kDim == 64 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = 16 * kWarps;
  static constexpr int kStage = 2 * kTile * kDim;  // queries and gradients
  static constexpr int kBytes = (2 * kKeys * kDim + 2 * kStage) * 2 + 2 * (4 * kTile + 1) * 4;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(KeyLayout<kDim>::kThreads, 1) key_kernel(const Parallel m) {
  using L = KeyLayout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kGroup / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  const Tile<kDim> keys{reinterpret_cast<bf16*>(memory)};
  const Tile<kDim> values{keys.data + L::kKeys * kDim};
  bf16* const stages = values.data + L::kKeys * kDim;
  float* const columns = reinterpret_cast<float*>(stages + 2 * L::kStage);  // [2][kTile]: factor, or part of exponent
  float* const locals = columns + 2 * kTile;
  float* const deltas = locals + 2 * kTile;
  int* const begins = reinterpret_cast<int*>(deltas + 2 * kTile);  // starts of the queries' documents
  float* const steps = reinterpret_cast<float*>(begins + 2 * kTile);

  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int key0 = static_cast<int>(blockIdx.x) * L::kKeys;  // the first keys have the most queries
  const int length = static_cast<int>(m.length);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const double* const a = m.decay_of(b, h);
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const int64_t head_row = (b * m.heads + h) * m.length;
  const int last_key = min(key0 + L::kKeys, length) - 1;
  const double reference = a ? a[last_key] : 0.0;
  const float scale = score_scale<kScore>(m.scale);
  const int first_tile = key0 / kTile;
  int last_tile = (m.ends ? m.ends[b * m.length + last_key] - 1 : length - 1) / kTile;
  if (a)
    last_tile -= count_erased<L::kThreads>(last_tile - last_key / kTile, [&](int i) {
      return static_cast<float>(a[(last_tile - i) * kTile] - reference) < static_cast<float>(kErased);
    });

  const auto queries_of = [&](int stage) { return Tile<kDim>{stages + stage * L::kStage}; };
  const auto gradients_of = [&](int stage) { return Tile<kDim>{stages + stage * L::kStage + kTile * kDim}; };
  const auto load = [&](int tile, int stage) {
    const int64_t row0 = static_cast<int64_t>(tile) * kTile;
    queries_of(stage).template load<L::kThreads>(m.q.row(b, row0, h), m.q.token, kTile, length - row0);
    gradients_of(stage).template load<L::kThreads>(m.g.row(b, row0, h), m.g.token, kTile, length - row0);
    commit_copies();
    const int i = static_cast<int>(threadIdx.x);
    if (i < kTile) {
      const int64_t row = row0 + i;
      const bool valid = row < length;
      float column = kExponential ? -INFINITY : 0.0f, local = 0, delta = 0;
      if (valid) {
        const double own = a ? a[row] : 0.0;
        local = static_cast<float>(own - reference);
        delta = m.delta[head_row + row];
        if (kExponential)
          column = local * kLog2e - m.log_sum[head_row + row];
        else
          column = scale * (a ? __expf(static_cast<float>(own - a[row0])) : 1.0f);
      }
      columns[stage * kTile + i] = column;
      locals[stage * kTile + i] = local;
      deltas[stage * kTile + i] = delta;
      begins[stage * kTile + i] = starts && valid ? starts[row] : 0;
    } else if (i == kTile && a && !kExponential) {
      steps[stage] = tile < last_tile ? __expf(static_cast<float>(a[row0 + kTile] - a[row0])) : 1.0f;
    }
  };

  keys.template load<L::kThreads>(m.k.row(b, key0, h), m.k.token, L::kKeys, length - key0);
  values.template load<L::kThreads>(m.v.row(b, key0, h), m.v.token, L::kKeys, length - key0);
  load(last_tile, 0);

  const int w0 = key0 + warp * 16;
  const int w_last = w0 + 15;
  uint32_t k[kSteps][4], v[kSteps][4];
  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  float own[2], decay_sum[2] = {};
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int key = min(w0 + u * 8 + lane / 4, length - 1);
    own[u] = a ? static_cast<float>(a[key] - reference) : 0.0f;
    if (kExponential) own[u] *= kLog2e;
  }
  bool true_sums = false;
  float previous = 0;  // A at the first query of the tile before, less the reference

  for (int tile = last_tile; tile >= first_tile; --tile) {
    const int stage = (last_tile - tile) & 1;
    wait_for_copies<0>();
    __syncthreads();
    if (tile > first_tile) load(tile - 1, stage ^ 1);
    if (tile == last_tile)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        keys.a_fragment(k[step], w0 - key0, step);
        values.a_fragment(v[step], w0 - key0, step);
      }
    const int row0 = tile * kTile;
    if (row0 + kTile - 1 < w0 || w0 >= length) continue;
    const bool diagonal = row0 < w_last;
    const float* const column = columns + stage * kTile;
    const float* const local = locals + stage * kTile;
    const float* const delta = deltas + stage * kTile;
    const int* const begin = begins + stage * kTile;
    const bool masked = diagonal || begin[kTile - 1] > w0 || (starts && row0 + kTile > length);
    const Tile<kDim> queries = queries_of(stage), gradients = gradients_of(stage);

    if (!kExponential) {
      if (diagonal && !true_sums) {
        true_sums = true;
        if (a && tile < last_tile) {
          const float upper = __expf(previous - own[0]), lower = __expf(previous - own[1]);
          scale_rows(dk, upper, lower);
          scale_rows(dv, upper, lower);
        }
      } else if (!diagonal && a) {
        scale_rows(dk, steps[stage], steps[stage]);
        scale_rows(dv, steps[stage], steps[stage]);
      }
      previous = local[0];
    }

#pragma unroll
    for (int first = 0; first < kTile; first += kGroup) {
      float s[kN][4] = {}, dp[kN][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int nn = 0; nn < kN; nn += 2) {
          uint32_t f[4];
          queries.b_fragment(f, first + nn * 8, step);
          mma(s[nn], k[step], f[0], f[1]);
          mma(s[nn + 1], k[step], f[2], f[3]);
          gradients.b_fragment(f, first + nn * 8, step);
          mma(dp[nn], v[step], f[0], f[1]);
          mma(dp[nn + 1], v[step], f[2], f[3]);
        }
      const auto weigh = [&](auto is_masked) {
        constexpr bool kMasked = decltype(is_masked)::value;
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const int c = first + nn * 8 + lane % 4 * 2;
          const float2 factors = *reinterpret_cast<const float2*>(column + c);
          const float2 shifts = *reinterpret_cast<const float2*>(delta + c);
          const float2 places = kMasked ? *reinterpret_cast<const float2*>(local + c) : float2{};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int u = e / 2;
            const float x = s[nn][e];
            float d = e % 2 == 0 ? factors.x : factors.y;
            if (kExponential) d -= own[u];
            if (kMasked && !kExponential && diagonal && a)
              d = scale * __expf(fminf((e % 2 == 0 ? places.x : places.y) - own[u], 0.0f));
            float w = weight<kScore>(x, d, scale);
            const float dw = dp[nn][e] - (e % 2 == 0 ? shifts.x : shifts.y);
            float coef = coefficient<kScore>(x, d, w, dw, m.scale);
            if constexpr (kMasked) {
              const int key = w0 + u * 8 + lane / 4, row = row0 + c + e % 2;
              if (key > row || key < begin[c + e % 2] || row >= length) w = coef = 0.0f;
            }
            if (kExponential) decay_sum[u] += w * dw;
            s[nn][e] = coef;
            dp[nn][e] = w;
          }
        }
      };
      masked ? weigh(std::true_type()) : weigh(std::false_type());
#pragma unroll
      for (int kk = 0; kk < kGroup / 16; ++kk) {
        const uint32_t c[4] = {pack(s[2 * kk][0], s[2 * kk][1]), pack(s[2 * kk][2], s[2 * kk][3]),
                               pack(s[2 * kk + 1][0], s[2 * kk + 1][1]), pack(s[2 * kk + 1][2], s[2 * kk + 1][3])};
        const uint32_t p[4] = {pack(dp[2 * kk][0], dp[2 * kk][1]), pack(dp[2 * kk][2], dp[2 * kk][3]),
                               pack(dp[2 * kk + 1][0], dp[2 * kk + 1][1]), pack(dp[2 * kk + 1][2], dp[2 * kk + 1][3])};
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t f[4];
          queries.b_fragment_transposed(f, first + kk * 16, d);
          mma(dk[2 * d], c, f[0], f[1]);
          mma(dk[2 * d + 1], c, f[2], f[3]);
          gradients.b_fragment_transposed(f, first + kk * 16, d);
          mma(dv[2 * d], p, f[0], f[1]);
          mma(dv[2 * d + 1], p, f[2], f[3]);
        }
      }
    }
  }

  constexpr float kDegree = kScore == Score::squared ? 2 : 1;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int key = w0 + u * 8 + lane / 4;
    const bool valid = key < length;
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(m.k.row(b, valid ? key : 0, h));
    uint32_t* const to_k = reinterpret_cast<uint32_t*>(m.dk.row(b, valid ? key : 0, h));
    uint32_t* const to_v = reinterpret_cast<uint32_t*>(m.dv.row(b, valid ? key : 0, h));
    float product = 0;  // k·dk
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      const float x = dk[d][u * 2], y = dk[d][u * 2 + 1];
      if (valid) to_k[d * 4 + lane % 4] = pack(x, y);
      if (valid) to_v[d * 4 + lane % 4] = pack(dv[d][u * 2], dv[d][u * 2 + 1]);
      if (m.key_decay && !kExponential) {
        const float2 one = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(from[d * 4 + lane % 4]));
        product += one.x * x + one.y * y;
      }
    }
    if (!m.key_decay) continue;
    product = quad_sum(kExponential ? decay_sum[u] : product / kDegree);
    if (valid && lane % 4 == 0) m.key_decay[head_row + key] = -product;
  }
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m) {
  const MixerShape& shape = call.shape;
  const cudaStream_t s = stream(call.inputs.q.device());
  const auto grid = [&](int rows) {
    return dim3(blocks_for(shape.length, rows), static_cast<unsigned>(shape.heads), static_cast<unsigned>(shape.batch));
  };
  using Q = QueryLayout<kDim>;
  using K = KeyLayout<kDim>;
  const auto query = query_kernel<kScore, kDim>;
  const auto key = key_kernel<kScore, kDim>;
  allow_shared_memory(query, Q::kBytes);
  allow_shared_memory(key, K::kBytes);
  query<<<grid(Q::kRows), Q::kThreads, Q::kBytes, s>>>(m);
  check_launch("mixer_backward");
  key<<<grid(K::kKeys), K::kThreads, K::kBytes, s>>>(m);
  check_launch("mixer_backward");
}

Parallel backward_of(const MixerCall& call, const TokenTables& tables, const ScaledGradient& scaled,
                     const HeadGradients& gradients) {
  const int64_t heads = call.shape.heads;
  Parallel m = parallel_of(call, tables);
  m.g = heads_of<bfloat16>(scaled.g, heads);
  m.delta = floats(scaled.delta);
  m.log_sum = floats(scaled.log_sum);
  m.dq = heads_of<bfloat16>(gradients.q, heads);
  m.dk = heads_of<bfloat16>(gradients.k, heads);
  m.dv = heads_of<bfloat16>(gradients.v, heads);
  m.row_decay = doubles(gradients.row_decay);
  m.key_decay = doubles(gradients.key_decay);
  return m;
}

}  // namespace

ScaledGradient scale_gradient(const MixerCall& call, const Tensor& out_gradient) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  ScaledGradient scaled;
  scaled.g = Tensor::empty({shape.batch, shape.length, shape.heads, shape.v_dim}, DType::bf16, device);
  scaled.delta = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f32, device);
  if (call.result.maximum) scaled.log_sum = Tensor::empty_like(scaled.delta);
  Parallel m = parallel_of(call, {});
  m.delta = floats(scaled.delta);
  m.log_sum = floats(scaled.log_sum);
  with_score_and_dim(call, [&](auto score, auto dim) {
    constexpr int kDim = decltype(dim)::value;
    const dim3 grid(blocks_for(shape.length, kPrepareThreads / (kDim / 8)), static_cast<unsigned>(shape.heads),
                    static_cast<unsigned>(shape.batch));
    prepare_kernel<kDim, decltype(score)::value == Score::exponential><<<grid, kPrepareThreads, 0, stream(device)>>>(
        m, pointer<bfloat16>(scaled.g), heads_of<bfloat16>(out_gradient, shape.heads),
        rows_are_wide(out_gradient) && rows_are_wide(call.result.out));
  });
  check_launch("mixer_backward");
  return scaled;
}

void parallel_backward(const MixerCall& call, const TokenTables& tables, const ScaledGradient& scaled,
                       const HeadGradients& gradients) {
  const Parallel m = backward_of(call, tables, scaled, gradients);
  if (on_hopper(call.inputs.q.device())) return hopper_backward(call, m, scaled.g);
  with_score_and_dim(call,
                     [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m); });
}

void inside_chunks_backward(const MixerCall& call, const TokenTables& tables, int64_t chunk,
                            const ScaledGradient& scaled, const HeadGradients& gradients) {
  Parallel m = backward_of(call, tables, scaled, gradients);
  m.chunk = static_cast<int>(chunk);
  m.add = true;
  hopper_backward(call, m, scaled.g);
}

}  // namespace furious::cuda
