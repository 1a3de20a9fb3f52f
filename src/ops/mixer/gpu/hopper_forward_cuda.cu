// The parallel form on Hopper, forward.
#include "ops/mixer/gpu/hopper_parallel.cuh"

namespace furious::cuda {
namespace {

template <int kDim>
struct Layout {
  static constexpr int kGroups = kDim == 64 ? 4 : 2;  // warpgroups that multiply: as many as registers hold
  static constexpr int kRegisters = kDim == 64 ? 112 : 232, kCopyRegisters = kDim == 64 ? 32 : 40;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 3;

  unsigned char queries[kGroups][kPanels][kPanelBytes];
  unsigned char keys[kStages][kPanels][kPanelBytes];
  unsigned char values[kStages][kPanels][kPanelBytes];
  float columns[kStages][kTile];  // factor of a key, or what it adds to the exponent
  float locals[kStages][kTile];   // A_j less that of the block's first query, times log2(e)
  Barrier full[kStages], empty[kStages], ready;
  int first_tile;
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
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);
  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const RowBlock rows = row_block<L::kRows, true>(m);
  if (rows.row0 >= rows.end) return;

  init_barriers(shared, L::kGroups);
  if (warp >= 4 * L::kGroups) {
    decrease_registers<L::kCopyRegisters>();
    if (warp > 4 * L::kGroups) return;
    if (lane == 0) {
      shared.ready.arrive_and_expect(L::kGroups * L::kPanels * kPanelBytes);
      for (int i = 0; i < L::kGroups; ++i)
        for (int panel = 0; panel < L::kPanels; ++panel)
          copy_tile(shared.queries[i][panel], maps.q, shared.ready, panel * 64, rows.row0 - m.first + i * 64,
                    h / m.q.group, b);
    }
    copy_keys<kScore>(shared, maps.k, maps.v, m, rows);
    return;
  }
  increase_registers<L::kRegisters>();

  const int group = warp / 4;
  const int w0 = rows.row0 + group * 64;  // the warpgroup's first query
  const int lane_row = warp % 4 * 16 + lane / 4, lane_column = lane % 4 * 2;
  const double* const a = m.decay_of(b, h);
  const float scale = score_scale<kScore>(m.scale);
  float acc[kDim / 8][4];
  float n[2] = {}, largest[2] = {-INFINITY, -INFINITY}, own[2] = {};  // own: A_i less that of the first, times log2(e)
  int start[2] = {}, latest_start = 0;
  clear(acc);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = min(w0 + lane_row + u * 8, rows.end - 1);
    if (a) own[u] = static_cast<float>(a[row] - a[rows.row0]) * kLog2e;
    if (m.starts) start[u] = m.starts[b * m.length + row];
  }
  if (m.starts) latest_start = m.starts[b * m.length + min(w0 + 64, rows.end) - 1];
  const int last_tile = (rows.end - 1) / kTile, own_last_tile = w0 < rows.end ? w0 / kTile : -1;
  bool true_sums = false;
  Pipe<L::kStages> pipe;
  shared.ready.wait(0);
  int tile = shared.first_tile;

  for (; tile <= own_last_tile; ++tile, pipe.next()) {
    const int stage = pipe.stage;
    const int key0 = tile * kTile;
    const bool near = key0 >= rows.row0;
    const float* const column = shared.columns[stage] + lane_column;
    const float* const local = shared.locals[stage];
    uint32_t q[kSteps][4];
    float s[kN][4];
    load_rows(q, shared.queries[group]);
    shared.full[stage].wait(pipe.phase);
    const uint64_t keys = operand(shared.keys[stage][0], 0);
    fence_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) wgmma<0>(s, q[step], columns_at(keys, step), step > 0);
    commit_products();
    wait_for_products<0>();
    settle(s);

    if constexpr (kExponential) {
      float top[2] = {-INFINITY, -INFINITY};
      with_place(tile == own_last_tile, latest_start > key0, false, [&](auto place) {
        constexpr Place kPlace = decltype(place)::value;
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const float2 pair = *reinterpret_cast<const float2*>(column + nn * 8);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int u = e / 2;
            float x = fmaf(s[nn][e], scale, e % 2 == 0 ? pair.x : pair.y);
            if (kPlace == Place::diagonal && column_of(nn, e) > lane_row + u * 8 - lane_column) x = -INFINITY;
            if ((kPlace == Place::diagonal || kPlace == Place::near_documents) &&
                key0 + lane_column + column_of(nn, e) < start[u])
              x = -INFINITY;
            s[nn][e] = x;
            top[u] = fmaxf(top[u], x);
          }
        }
      });
      float shrink[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const float now = fmaxf(largest[u], quad_max(top[u]));
        const float base = now == -INFINITY ? 0.0f : now;
        shrink[u] = fast_exp2(largest[u] - base);
        largest[u] = now;
        n[u] *= shrink[u];
#pragma unroll
        for (int nn = 0; nn < kN; ++nn)
#pragma unroll
          for (int e = 2 * u; e < 2 * u + 2; ++e) {
            s[nn][e] = fast_exp2(s[nn][e] - base);
            n[u] += s[nn][e];
          }
      }
      scale_rows(acc, shrink[0], shrink[1]);
    } else {
      if (a && near && !true_sums) {
        true_sums = true;
        const float upper = fast_exp2(own[0]), lower = fast_exp2(own[1]);
        scale_rows(acc, upper, lower);
        n[0] *= upper;
        n[1] *= lower;
      }
      float row[2] = {1, 1};
      if (a && near) {
        row[0] = fast_exp2(fminf(own[0] - local[kTile - 1], 0.0f));
        row[1] = fast_exp2(fminf(own[1] - local[kTile - 1], 0.0f));
      }
      with_place(tile == own_last_tile, latest_start > key0, near, [&](auto place) {
        constexpr Place kPlace = decltype(place)::value;
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const float2 pair =
              *reinterpret_cast<const float2*>((kPlace == Place::diagonal ? local + lane_column : column) + nn * 8);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int u = e / 2;
            float& x = s[nn][e];
            float d = e % 2 == 0 ? pair.x : pair.y;
            if constexpr (kPlace == Place::diagonal) {
              d = scale * fast_exp2(fminf(own[u] - d, 0.0f));
              if (column_of(nn, e) > lane_row + u * 8 - lane_column) d = 0.0f;
            } else if constexpr (kPlace != Place::far) {
              d *= row[u];
            }
            if constexpr (kPlace == Place::diagonal || kPlace == Place::near_documents)
              if (key0 + lane_column + column_of(nn, e) < start[u]) d = 0.0f;
            x = kScore == Score::squared ? x * x * d : x * d;
            n[u] += x;
          }
        }
      });
    }
    uint32_t p[kTile / 16][4];
    pack_rows(p, s);
    const uint64_t values = operand_transposed(shared.values[stage][0], 0, kPanelBytes);
    fence_products();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) wgmma<1>(acc, p[step], rows_at(values, step), 1);
    commit_products();
    // Products left running into the next turn of a loop would be serialized by the assembler.
    wait_for_products<0>();
    settle(acc);
    shared.empty[stage].arrive();
  }
  // Other warpgroups may have tiles to come; the warp that copies waits for all.
  for (; tile <= last_tile; ++tile, pipe.next()) {
    shared.full[pipe.stage].wait(pipe.phase);
    shared.empty[pipe.stage].arrive();
  }

#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = w0 + lane_row + u * 8;
    float sum = quad_sum(n[u]);
    if (row >= rows.end || row < m.first) continue;
    const int64_t place = m.place_of(b, h, row);
    float past = 1;  // what the past is to be multiplied by
    if (m.past.data && m.sum_norm) {
      past = m.past_n[place];
      sum += past;
    }
    const float inverse = !m.sum_norm ? 1.0f : fabsf(sum) < kSmallestNormalizer ? 0.0f : 1 / sum;
    uint32_t* const to = reinterpret_cast<uint32_t*>(m.out.row(b, row - m.first, h)) + lane % 4;
    const uint32_t* const from = m.past.data ? reinterpret_cast<uint32_t*>(m.past.row(b, row, h)) + lane % 4 : nullptr;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      if (d * 8 >= m.v_dim) break;
      float2 y = {acc[d][u * 2], acc[d][u * 2 + 1]};
      if (from) {
        const float2 before = unpack(from[d * 4]);
        y.x += past * before.x;
        y.y += past * before.y;
      }
      to[d * 4] = pack(y.x * inverse, y.y * inverse);
    }
    if (lane % 4 != 0) continue;
    if (m.normalizer) m.normalizer[place] = sum;
    if (m.maximum) m.maximum[place] = (largest[u] + own[u]) / kLog2e;
  }
#endif
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m) {
  using L = Layout<kDim>;
  const auto kernel = forward_kernel<kScore, kDim>;
  allow_shared_memory(kernel, sizeof(L));
  const Maps maps{tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v)};
  kernel<<<row_blocks<L::kRows>(call.shape, m.chunk), L::kThreads, sizeof(L), stream(call.inputs.q.device())>>>(maps,
                                                                                                                m);
  check_launch("mixer_forward");
}

}  // namespace

void hopper_forward(const MixerCall& call, const Parallel& m) {
  with_score_and_dim(call,
                     [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m); });
}

}  // namespace furious::cuda
