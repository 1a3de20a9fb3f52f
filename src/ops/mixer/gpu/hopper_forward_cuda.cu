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
  // As many as shared memory holds.
  static constexpr int kStages = kDim == 64 ? 4 : kDim <= 192 ? 3 : 2, kSlots = kDim <= 128 ? 2 : 1;

  unsigned char queries[kSlots][kGroups][kPanels][kPanelBytes];
  unsigned char keys[kStages][kPanels][kPanelBytes];
  unsigned char values[kStages][kPanels][kPanelBytes];
  float columns[kStages][kTile];  // factor of a key, or what it adds to the exponent
  float locals[kStages][kTile];   // A_j less that of the block's first query, times log2(e)
  float own[kSlots][kRows];       // A_i less that of the first, times log2(e)
  int starts[kSlots][kRows];
  Barriers<kSlots, kStages> sync;
};

struct Maps {
  CUtensorMap q, k, v;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(Layout<kDim>::kThreads, 1)
    forward_kernel(const __grid_constant__ Maps maps, const Parallel m, const Queue queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;

  init_barriers(shared);
  if (warp >= 4 * L::kGroups) {
    decrease_registers<L::kCopyRegisters>();
    Pipe<L::kStages> pipe;
    if (warp == 4 * L::kGroups)
      hand_out<true, false>(
          shared, m, queue, L::kGroups * L::kPanels * kPanelBytes,
          [&](const Work& work, int slot) {
            for (int i = 0; i < L::kGroups; ++i)
              for (int panel = 0; panel < L::kPanels; ++panel)
                copy_tile(shared.queries[slot][i][panel], maps.q, shared.sync.ready[slot], panel * 64,
                          work.row0 - m.first + i * 64, work.head / m.q.group, work.batch);
          },
          [&](const Work& work, int, auto&& first_is) {
            copy_keys<kScore>(shared, pipe, maps.k, maps.v, m, work, first_is);
          });
    if (warp == 4 * L::kGroups + 1)
      fill_rows(shared, [&](const Work& work, int slot, int i, int row) {
        const double* const a = m.decay_of(work.batch, work.head);
        shared.own[slot][i] = a ? static_cast<float>(a[row] - a[work.row0]) * kLog2e : 0.0f;
        shared.starts[slot][i] = m.starts ? m.starts[work.batch * m.length + row] : 0;
      });
    return;
  }
  increase_registers<L::kRegisters>();

  const int group = warp / 4;
  const int lane_row = warp % 4 * 16 + lane / 4, lane_column = lane % 4 * 2;
  const float scale = score_scale<kScore>(m.scale);
  Pipe<L::kStages> pipe;
  for (Pipe<L::kSlots> slots;; slots.next()) {
    const int slot = slots.stage;
    shared.sync.ready[slot].wait(slots.phase);
    const Work& work = shared.sync.work[slot];  // read anew where it is used: registers are scarce
    if (work.head < 0) return;
    const int row0 = work.row0, w0 = row0 + group * 64;  // w0: the warpgroup's first query
    const float* const own = shared.own[slot] + group * 64 + lane_row;
    const int* const starts = shared.starts[slot] + group * 64;
    const int latest_start = starts[63];
    float acc[kDim / 8][4];
    float n[2] = {}, largest[2] = {-INFINITY, -INFINITY};
    clear(acc);
    const int own_last_tile = w0 < work.end ? w0 / kTile : -1;
    bool true_sums = false;
    int tile = work.tile;

    // kFar: every pair of the tile counts, and only its columns have factors.
    const auto turn = [&](auto far) {
      constexpr bool kFar = decltype(far)::value;
      const int stage = pipe.stage;
      const int key0 = tile * kTile;
      const bool near = key0 >= row0;
      const float* const column = shared.columns[stage] + lane_column;
      const float* const local = shared.locals[stage];
      float s[kN][4];
      shared.sync.full[stage].wait(pipe.phase);
      fence_products();
      multiply_tiles<kSteps, kExponential && kDim == 64>(s, shared.queries[slot][group][0], shared.keys[stage][0]);
      commit_products();
      wait_for_products<0>();
      settle(s);

      [[maybe_unused]] float top[2] = {-INFINITY, -INFINITY};
      const auto multiply = [&](auto place) {
        constexpr Place kPlace = decltype(place)::value;
        constexpr bool kMasked = kPlace == Place::diagonal || kPlace == Place::near_documents;
        float row[2] = {1, 1};
        int start[2] = {};
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          if constexpr (kPlace == Place::diagonal)
            row[u] = own[u * 8];
          else if constexpr (kPlace != Place::far && !kExponential)
            row[u] = near ? fast_exp2(fminf(own[u * 8] - local[kTile - 1], 0.0f)) : 1.0f;
          if constexpr (kMasked) start[u] = starts[lane_row + u * 8] - key0 - lane_column;
        }
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const bool from_local = kPlace == Place::diagonal && !kExponential;
          const float2 pair = *reinterpret_cast<const float2*>((from_local ? local + lane_column : column) + nn * 8);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int u = e / 2, c = column_of(nn, e);
            float& x = s[nn][e];
            float d = e % 2 == 0 ? pair.x : pair.y;
            bool masked = false;
            if constexpr (kMasked) masked = c < start[u];
            if constexpr (kPlace == Place::diagonal) masked |= c > lane_row + u * 8 - lane_column;
            if constexpr (kExponential) {
              x = fmaf(x, scale, d);
              if constexpr (kMasked) x = masked ? -INFINITY : x;
              top[u] = fmaxf(top[u], x);
            } else {
              if constexpr (kPlace == Place::diagonal)
                d = scale * fast_exp2(fminf(row[u] - d, 0.0f));
              else if constexpr (kPlace != Place::far)
                d *= row[u];
              if constexpr (kMasked) d = masked ? 0.0f : d;
              x = kScore == Score::squared ? x * x * d : x * d;
              n[u] += x;
            }
          }
        }
      };
      if (!kFar && !kExponential && m.decay && near && !true_sums) {
        true_sums = true;
        const float upper = fast_exp2(own[0]), lower = fast_exp2(own[8]);
        scale_rows(acc, upper, lower);
        n[0] *= upper;
        n[1] *= lower;
      }
      if constexpr (kFar)
        multiply(PlaceConstant<Place::far>());
      else
        with_place(tile == own_last_tile, latest_start > key0, near && !kExponential, multiply);
      if constexpr (kExponential) {
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
      }
      uint32_t p[kTile / 16][4];
      pack_rows(p, s);
      const uint64_t values = operand_transposed(shared.values[stage][0], 0, kPanelBytes);
      fence_products();
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) wgmma<1>(acc, p[step], rows_at(values, step), 1);
      commit_products();
      // The assembler serializes products left running into the next turn of a loop, unless some run into the first.
      wait_for_products<0>();
      settle(acc);
      release(shared.sync.empty[stage]);
    };
    const int first_near = kExponential ? own_last_tile : row0 / kTile;
    for (; tile <= own_last_tile; ++tile, pipe.next()) {
      for (; tile < first_near && latest_start <= tile * kTile; ++tile, pipe.next()) turn(std::true_type());
      turn(std::false_type());
    }
    // Other warpgroups may have tiles to come; the warp that copies waits for all.
    const int end = work.end, b = work.batch, h = work.head;
    for (; row0 < end && tile <= (end - 1) / kTile; ++tile, pipe.next()) {
      shared.sync.full[pipe.stage].wait(pipe.phase);
      release(shared.sync.empty[pipe.stage]);
    }

    // What comes from earlier chunks. All is read before the first store, behind which it would wait one by one.
    uint32_t before[2][kDim / 8] = {};
    float past[2] = {1, 1};  // what it is to be multiplied by
    const bool has_past = m.past.data != nullptr;
    if (has_past)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int row = w0 + lane_row + u * 8;
        if (row >= end) continue;
        if (m.sum_norm) past[u] = m.past_n[m.place_of(b, h, row)];
        const uint32_t* const from = reinterpret_cast<const uint32_t*>(m.past.row(b, row, h)) + lane % 4;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d)
          if (d * 8 < m.v_dim) before[u][d] = from[d * 4];
      }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = w0 + lane_row + u * 8;
      float sum = quad_sum(n[u]);
      if (row >= end || row < m.first) continue;
      const int64_t place = m.place_of(b, h, row);
      if (has_past && m.sum_norm) sum += past[u];
      const float inverse = !m.sum_norm ? 1.0f : fabsf(sum) < kSmallestNormalizer ? 0.0f : 1 / sum;
      uint32_t* const to = reinterpret_cast<uint32_t*>(m.out.row(b, row - m.first, h)) + lane % 4;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        if (d * 8 >= m.v_dim) break;
        float2 y = {acc[d][u * 2], acc[d][u * 2 + 1]};
        if (has_past) {
          const float2 x = unpack(before[u][d]);
          y.x += past[u] * x.x;
          y.y += past[u] * x.y;
        }
        to[d * 4] = pack(y.x * inverse, y.y * inverse);
      }
      if (lane % 4 != 0) continue;
      if (m.normalizer) m.normalizer[place] = sum;
      if (m.maximum) m.maximum[place] = (largest[u] + own[u * 8]) / kLog2e;
    }
    release(shared.sync.unused[slot]);
  }
#endif
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m) {
  const Maps maps{tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v)};
  launch_queue<Layout<kDim>>(forward_kernel<kScore, kDim>, "mixer_forward", call, maps, m);
}

}  // namespace

void hopper_forward(const MixerCall& call, const Parallel& m) {
  with_score_and_dim(call,
                     [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m); });
}

}  // namespace furious::cuda
