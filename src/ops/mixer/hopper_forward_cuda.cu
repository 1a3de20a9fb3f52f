// The parallel form on Hopper, forward. A block owns queries of one head: two warpgroups multiply, a warp of its own
// has tiles of keys and values copied ahead and works out their decay factors.
#include "ops/mixer/hopper_parallel.cuh"

namespace furious::cuda {
namespace {

template <int kDim>
struct Layout {
  static constexpr int kGroups = 2;                     // warpgroups that multiply
  static constexpr int kThreads = 128 * kGroups + 128;  // and one whose first warp copies
  static constexpr int kM = kDim == 64 ? 2 : 1;         // of 64 queries, per warpgroup: as many as registers hold
  static constexpr int kGroupRows = 64 * kM;
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kPieces = kDim / 64;
  static constexpr int kStages = 4;

  unsigned char queries[kGroups * kM][kPieces][kPieceBytes];
  unsigned char keys[kStages][kPieces][kPieceBytes];
  unsigned char values[kStages][kPieces][kPieceBytes];
  float columns[kStages][kTile];
  float locals[kStages][kTile];
  Barrier full[kStages], empty[kStages], ready;
};

struct Maps {
  CUtensorMap q, k, v;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(Layout<kDim>::kThreads, 1)
    forward_kernel(const __grid_constant__ Maps maps, const Parallel m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kM = L::kM, kN = kTile / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);

  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * L::kRows;  // the longest work first
  const int length = static_cast<int>(m.length);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const double* const a = m.decay_of(b, h);
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const double reference = a ? a[row0] : 0.0;
  const float scale = score_scale<kScore>(m.scale);
  const int first_tile = first_key_tile<L::kThreads>(m, a, starts, row0);
  const int last_tile = (min(row0 + L::kRows, length) - 1) / kTile;

  init_barriers(shared, L::kGroups);
  if (warp >= 4 * L::kGroups) {
    give_registers<40>();
    if (warp > 4 * L::kGroups) return;
    if (lane == 0) {
      shared.ready.arrive_and_expect(L::kGroups * kM * L::kPieces * kPieceBytes);
      for (int i = 0; i < L::kGroups * kM; ++i)
        for (int piece = 0; piece < L::kPieces; ++piece)
          copy_tile(shared.queries[i][piece], maps.q, shared.ready, piece * 64, row0 + i * 64, h / m.q.group, b);
    }
    copy_keys<kScore>(shared, maps.k, maps.v, m, a, first_tile, last_tile, row0, reference, scale);
    return;
  }
  take_registers<232>();

  const int group = warp / 4;
  const int w0 = row0 + group * L::kGroupRows;  // the warpgroup's first query; a lane's are 16·(warp % 4) further on
  const int lane_row = warp % 4 * 16 + lane / 4;
  float acc[kM][kDim / 8][4];
  float n[kM][2] = {}, largest[kM][2], own[kM][2];
  int start[kM][2];
  shared.ready.wait(0);
#pragma unroll
  for (int mt = 0; mt < kM; ++mt) {
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[mt][d][e] = 0;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = min(w0 + mt * 64 + lane_row + u * 8, length - 1);
      own[mt][u] = a ? static_cast<float>(a[row] - reference) : 0.0f;
      start[mt][u] = starts ? starts[row] : 0;
      largest[mt][u] = -INFINITY;
    }
  }
  const int latest_start = starts ? starts[min(w0 + L::kGroupRows, length) - 1] : 0;
  const int own_last_tile = min((w0 + L::kGroupRows - 1) / kTile, last_tile);
  bool true_sums = false;

  for (int tile = first_tile; tile <= own_last_tile; ++tile) {
    const int turn = tile - first_tile, stage = turn % L::kStages;
    const int key0 = tile * kTile;
    const bool near = key0 >= row0;  // columns are relative to the tile's last key, not to the block's first query
    const float* const column = shared.columns[stage];
    const float* const local = shared.locals[stage];
    uint32_t q[kM][kSteps][4];
    float s[kM][kN][4];
#pragma unroll
    for (int mt = 0; mt < kM; ++mt) load_rows(q[mt], shared.queries[group * kM + mt]);
    shared.full[stage].wait(turn / L::kStages);
    fence_products();
#pragma unroll
    for (int mt = 0; mt < kM; ++mt) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        wgmma<0>(s[mt], q[mt][step], operand(shared.keys[stage][step / 4], step % 4), step > 0);
      commit_products();
    }
#pragma unroll
    for (int mt = 0; mt < kM; ++mt) {
      wait_for_products<kM - 1>();  // all but the latest are there
      settle(s[mt]);
      const int m0 = w0 + mt * 64;
      const bool diagonal = key0 + kTile - 1 > m0;
      const bool masked = diagonal || latest_start > key0;
      if constexpr (kExponential) {
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
                const int row = m0 + lane_row + u * 8, key = key0 + nn * 8 + lane % 4 * 2 + e % 2;
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
      } else {
        if (a && near && !true_sums) {
          const float upper = __expf(own[mt][0]), lower = __expf(own[mt][1]);
          scale_rows(acc[mt], upper, lower);
          n[mt][0] *= upper;
          n[mt][1] *= lower;
        }
        float row[2] = {1, 1};
        if (a && near) {
          row[0] = __expf(fminf(own[mt][0] - local[kTile - 1], 0.0f));
          row[1] = __expf(fminf(own[mt][1] - local[kTile - 1], 0.0f));
        }
        const auto weigh = [&](auto is_masked, auto is_near) {
          constexpr bool kMasked = decltype(is_masked)::value, kNear = decltype(is_near)::value;
#pragma unroll
          for (int nn = 0; nn < kN; ++nn) {
            const int c = nn * 8 + lane % 4 * 2;
            const float2 factors = *reinterpret_cast<const float2*>(column + c);
            const float2 places = kMasked ? *reinterpret_cast<const float2*>(local + c) : float2{};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int u = e / 2;
              float& x = s[mt][nn][e];
              float d = e % 2 == 0 ? factors.x : factors.y;
              if constexpr (kNear) d *= row[u];
              if constexpr (kMasked) {
                const int query = m0 + lane_row + u * 8, key = key0 + c + e % 2;
                if (diagonal && a) d = scale * __expf(fminf(own[mt][u] - (e % 2 == 0 ? places.x : places.y), 0.0f));
                if (key > query || key < start[mt][u]) d = 0.0f;
              }
              x = kScore == Score::squared ? x * x * d : x * d;
              n[mt][u] += x;
            }
          }
        };
        if (masked)
          weigh(std::true_type(), std::true_type());
        else if (near)
          weigh(std::false_type(), std::true_type());
        else
          weigh(std::false_type(), std::false_type());
      }
      uint32_t p[kTile / 16][4];
      pack_rows(p, s[mt]);
      fence_products();
#pragma unroll
      for (int kk = 0; kk < kTile / 16; ++kk)
        wgmma<1>(acc[mt], p[kk], operand_transposed(shared.values[stage][0], kk, kPieceBytes), 1);
      commit_products();
    }
    // Products left running into the next turn of a loop would be serialized by the assembler.
    wait_for_products<0>();
#pragma unroll
    for (int mt = 0; mt < kM; ++mt) settle(acc[mt]);
    if (lane == 0) shared.empty[stage].arrive();
    if (near) true_sums = true;
  }
  // The other warpgroup may have tiles to come; the warp that copies waits for both.
  for (int tile = own_last_tile + 1; tile <= last_tile; ++tile) {
    const int turn = tile - first_tile, stage = turn % L::kStages;
    shared.full[stage].wait(turn / L::kStages);
    if (lane == 0) shared.empty[stage].arrive();
  }

  const int64_t head_row = (static_cast<int64_t>(b) * m.heads + h) * m.length;
#pragma unroll
  for (int mt = 0; mt < kM; ++mt) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = w0 + mt * 64 + lane_row + u * 8;
      float sum = quad_sum(n[mt][u]);
      if (row >= length) continue;
      float past = 1;  // what the past is to be multiplied by
      if (m.past.data && m.sum_norm) {
        past = m.past_n[head_row + row];
        sum += past;
      }
      const float inverse = !m.sum_norm ? 1.0f : fabsf(sum) < kSmallestNormalizer ? 0.0f : 1 / sum;
      uint32_t* const to = reinterpret_cast<uint32_t*>(m.out.row(b, row, h));
      const uint32_t* const from = m.past.data ? reinterpret_cast<uint32_t*>(m.past.row(b, row, h)) : nullptr;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        float2 y = {acc[mt][d][u * 2], acc[mt][d][u * 2 + 1]};
        if (from) {
          const float2 before = unpack(from[d * 4 + lane % 4]);
          y.x += past * before.x;
          y.y += past * before.y;
        }
        to[d * 4 + lane % 4] = pack(y.x * inverse, y.y * inverse);
      }
      if (lane % 4 != 0) continue;
      if (m.normalizer) m.normalizer[head_row + row] = sum;
      if (m.maximum) m.maximum[head_row + row] = largest[mt][u] / kLog2e + own[mt][u];
    }
  }
#endif
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m) {
  using L = Layout<kDim>;
  const auto kernel = forward_kernel<kScore, kDim>;
  allow_shared_memory(kernel, sizeof(L));
  const Maps maps{tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v)};
  const dim3 grid(blocks_for(call.shape.length, L::kRows), static_cast<unsigned>(call.shape.heads),
                  static_cast<unsigned>(call.shape.batch));
  kernel<<<grid, L::kThreads, sizeof(L), stream(call.inputs.q.device())>>>(maps, m);
  check_launch("mixer_forward");
}

}  // namespace

void hopper_forward(const MixerCall& call, const Parallel& m) {
  with_score_and_dim(call,
                     [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m); });
}

}  // namespace furious::cuda
