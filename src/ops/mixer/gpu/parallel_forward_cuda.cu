// The parallel form on tensor cores, forward. A block owns some queries of one head and walks over tiles of keys.
#include "gpu/device.h"
#include "ops/mixer/gpu/parallel-inl.cuh"

namespace furious::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

template <int kDim>
struct Layout {
  static constexpr int kMTiles = kDim == 64 ? 2 : 1;  // of 16 queries, per warp: as many as registers hold
  static constexpr int kWarpRows = 16 * kMTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kStage = 2 * kTile * kDim;  // elements: keys and values
  static constexpr int kBytes = (kRows * kDim + 2 * kStage) * 2 + 2 * (2 * kTile + 1) * 4;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const Parallel m) {
  using L = Layout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kM = L::kMTiles, kN = kTile / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  const Tile<kDim> queries{reinterpret_cast<bf16*>(memory)};
  bf16* const stages = queries.data + L::kRows * kDim;
  float* const columns = reinterpret_cast<float*>(stages + 2 * L::kStage);  // [2][kTile]: factor, or added exponent
  float* const locals = columns + 2 * kTile;                                // [2][kTile]: A_j less the reference
  float* const steps = locals + 2 * kTile;                                  // [2]: exp(r_J − r_{J−1})

  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int row0 = m.first + static_cast<int>(gridDim.x - 1 - blockIdx.x) * L::kRows;  // the longest work first
  const int length = static_cast<int>(m.length);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const double* const a = m.decay_of(b, h);
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const double reference = a ? a[row0] : 0.0;
  const float scale = score_scale<kScore>(m.scale);
  const int last_row = min(row0 + L::kRows, length) - 1;
  int first_tile = (starts ? starts[row0] : 0) / kTile;
  if (a)
    first_tile += count_erased<kThreads>(row0 / kTile - first_tile, [&](int i) {
      return static_cast<float>(reference - a[(first_tile + i) * kTile + kTile - 1]) < static_cast<float>(kErased);
    });
  const int last_tile = last_row / kTile;

  const auto keys_of = [&](int stage) { return Tile<kDim>{stages + stage * L::kStage}; };
  const auto values_of = [&](int stage) { return Tile<kDim>{stages + stage * L::kStage + kTile * kDim}; };
  const auto load = [&](int tile, int stage) {
    const int64_t key0 = static_cast<int64_t>(tile) * kTile;
    keys_of(stage).template load<kThreads>(m.k.row(b, key0, h), m.k.token, kTile, length - key0);
    values_of(stage).template load<kThreads>(m.v.row(b, key0, h), m.v.token, kTile, length - key0);
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

  queries.template load<kThreads>(m.q.row(b, row0 - m.first, h), m.q.token, L::kRows, length - row0);
  load(first_tile, 0);

  const int w0 = row0 + warp * L::kWarpRows;
  const int w_last = w0 + L::kWarpRows - 1;
  uint32_t q[kM][kSteps][4];
  float acc[kM][kDim / 8][4] = {};
  float n[kM][2] = {}, largest[kM][2], own[kM][2];
  int start[kM][2];
#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = min(w0 + mt * 16 + u * 8 + lane / 4, length - 1);
      own[mt][u] = a ? static_cast<float>(a[row] - reference) : 0.0f;
      start[mt][u] = starts ? starts[row] : 0;
      largest[mt][u] = -INFINITY;
    }
  const int latest_start = starts ? starts[min(w_last, length - 1)] : 0;
  bool true_sums = false;
  float previous = 0;  // A at the last key of the tile before, less the reference

  for (int tile = first_tile; tile <= last_tile; ++tile) {
    const int stage = (tile - first_tile) & 1;
    wait_for_copies<0>();
    __syncthreads();
    if (tile < last_tile) load(tile + 1, stage ^ 1);
    if (tile == first_tile)
#pragma unroll
      for (int mt = 0; mt < kM; ++mt)
#pragma unroll
        for (int s = 0; s < kSteps; ++s) queries.a_fragment(q[mt][s], w0 - row0 + mt * 16, s);
    const int key0 = tile * kTile;
    if (key0 > w_last) continue;
    const bool diagonal = key0 + kTile - 1 > w0;
    const bool masked = diagonal || latest_start > key0;
    const float* const column = columns + stage * kTile;
    const float* const local = locals + stage * kTile;

    float s[kM][kN][4] = {};
    const Tile<kDim> keys = keys_of(stage);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int nn = 0; nn < kN; nn += 2) {
        uint32_t f[4];
        keys.b_fragment(f, nn * 8, step);
#pragma unroll
        for (int mt = 0; mt < kM; ++mt) {
          mma(s[mt][nn], q[mt][step], f[0], f[1]);
          mma(s[mt][nn + 1], q[mt][step], f[2], f[3]);
        }
      }

    if constexpr (kExponential) {
#pragma unroll
      for (int mt = 0; mt < kM; ++mt) {
        float top[2] = {-INFINITY, -INFINITY};
        const auto add_exponents = [&](auto is_masked) {
#pragma unroll
          for (int nn = 0; nn < kN; ++nn) {
            const float2 pair = *reinterpret_cast<const float2*>(column + nn * 8 + lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int u = e / 2;
              float x = fmaf(s[mt][nn][e], scale, e % 2 == 0 ? pair.x : pair.y);
              if constexpr (decltype(is_masked)::value) {
                const int row = w0 + mt * 16 + u * 8 + lane / 4, key = key0 + nn * 8 + lane % 4 * 2 + e % 2;
                if (key > row || key < start[mt][u]) x = -INFINITY;
              }
              s[mt][nn][e] = x;
              top[u] = fmaxf(top[u], x);
            }
          }
        };
        masked ? add_exponents(std::true_type()) : add_exponents(std::false_type());
        float shrink[2];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const float now = fmaxf(largest[mt][u], quad_max(top[u]));
          const float base = now == -INFINITY ? 0.0f : now;
          shrink[u] = fast_exp2(largest[mt][u] - base);
          largest[mt][u] = now;
          n[mt][u] *= shrink[u];
#pragma unroll
          for (int nn = 0; nn < kN; ++nn)
#pragma unroll
            for (int e = 2 * u; e < 2 * u + 2; ++e) {
              s[mt][nn][e] = fast_exp2(s[mt][nn][e] - base);
              n[mt][u] += s[mt][nn][e];
            }
        }
        scale_rows(acc[mt], shrink[0], shrink[1]);
      }
    } else {
      if (diagonal && !true_sums) {
        true_sums = true;
        if (a && tile > first_tile)
#pragma unroll
          for (int mt = 0; mt < kM; ++mt) {
            const float upper = __expf(own[mt][0] - previous), lower = __expf(own[mt][1] - previous);
            scale_rows(acc[mt], upper, lower);
            n[mt][0] *= upper;
            n[mt][1] *= lower;
          }
      } else if (!diagonal && a) {
        const float factor = steps[stage];
#pragma unroll
        for (int mt = 0; mt < kM; ++mt) {
          scale_rows(acc[mt], factor, factor);
          n[mt][0] *= factor;
          n[mt][1] *= factor;
        }
      }
      previous = local[kTile - 1];
      const auto weigh = [&](auto is_masked) {
        constexpr bool kMasked = decltype(is_masked)::value;
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const int c = nn * 8 + lane % 4 * 2;
          const float2 factors = *reinterpret_cast<const float2*>(column + c);
          const float2 places = kMasked ? *reinterpret_cast<const float2*>(local + c) : float2{};
#pragma unroll
          for (int mt = 0; mt < kM; ++mt)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int u = e / 2;
              float& x = s[mt][nn][e];
              float d = e % 2 == 0 ? factors.x : factors.y;
              if constexpr (kMasked) {
                const int row = w0 + mt * 16 + u * 8 + lane / 4, key = key0 + c + e % 2;
                const float place = e % 2 == 0 ? places.x : places.y;
                if (diagonal && a) d = scale * __expf(fminf(own[mt][u] - place, 0.0f));
                if (key > row || key < start[mt][u]) d = 0.0f;
              }
              x = kScore == Score::squared ? x * x * d : x * d;
              n[mt][u] += x;
            }
        }
      };
      masked ? weigh(std::true_type()) : weigh(std::false_type());
    }

    const Tile<kDim> values = values_of(stage);
#pragma unroll
    for (int kk = 0; kk < kTile / 16; ++kk) {
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
        values.b_fragment_transposed(f, kk * 16, d);
#pragma unroll
        for (int mt = 0; mt < kM; ++mt) {
          mma(acc[mt][2 * d], p[mt], f[0], f[1]);
          mma(acc[mt][2 * d + 1], p[mt], f[2], f[3]);
        }
      }
    }
  }

#pragma unroll
  for (int mt = 0; mt < kM; ++mt)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = w0 + mt * 16 + u * 8 + lane / 4;
      const float sum = quad_sum(n[mt][u]);
      if (row >= length) continue;
      const float inverse = !m.sum_norm ? 1.0f : fabsf(sum) < kSmallestNormalizer ? 0.0f : 1 / sum;
      uint32_t* const to = reinterpret_cast<uint32_t*>(m.out.row(b, row - m.first, h));
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d)
        to[d * 4 + lane % 4] = pack(acc[mt][d][u * 2] * inverse, acc[mt][d][u * 2 + 1] * inverse);
      if (lane % 4 != 0) continue;
      if (m.normalizer) m.normalizer[m.place_of(b, h, row)] = sum;
      if (m.maximum) m.maximum[m.place_of(b, h, row)] = largest[mt][u] / kLog2e + own[mt][u];
    }
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m) {
  using L = Layout<kDim>;
  const auto kernel = forward_kernel<kScore, kDim>;
  allow_shared_memory(kernel, L::kBytes);
  const dim3 grid(blocks_for(call.shape.queries(), L::kRows), static_cast<unsigned>(call.shape.heads),
                  static_cast<unsigned>(call.shape.batch));
  kernel<<<grid, kThreads, L::kBytes, stream(call.inputs.q.device())>>>(m);
  check_launch("mixer_forward");
}

}  // namespace

bool parallel_supports(const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const std::string_view forced = forced_kernel();
  return forced != "tiles" && forced != "simple" && call.inputs.q.dtype() == DType::bf16 &&
         product_precision(call) == MixerPrecision::bf16 && shape.qk_dim == shape.v_dim &&
         (shape.qk_dim == 64 || shape.qk_dim == 128) && rows_are_wide(call.inputs.q) && rows_are_wide(call.inputs.k) &&
         rows_are_wide(call.inputs.v) && (call.spec.score != Score::exponential || call.spec.norm == Norm::sum) &&
         call.spec.degree == 0 && !call.spec.signed_decay && shape.length <= (int64_t{1} << 30);
}

bool on_hopper(Device device) {
  return is_hopper(device) && forced_kernel() != "tensor cores";
}

void parallel_forward(const MixerCall& call, const TokenTables& tables) {
  const Parallel m = parallel_of(call, tables);
  if (on_hopper(call.inputs.q.device())) return hopper_forward(call, m);
  with_score_and_dim(call,
                     [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m); });
}

void inside_chunks_forward(const MixerCall& call, const TokenTables& tables, int64_t chunk, const Tensor& past,
                           const Tensor& past_n) {
  Parallel m = parallel_of(call, tables);
  m.chunk = static_cast<int>(chunk);
  m.past = heads_of<bfloat16>(past, call.shape.heads);
  m.past_n = floats(past_n);
  hopper_forward(call, m);
}

}  // namespace furious::cuda
