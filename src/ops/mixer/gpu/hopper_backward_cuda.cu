// The parallel form on Hopper, backward: parallel_backward_cuda.cu says what is computed. Two kernels, as there: one
// owns queries and walks over keys for dq, one owns keys and walks over queries for dk and dv. Constant factors of the
// coefficients c_ij are left to the end.
#include <climits>

#include "ops/mixer/gpu/hopper_parallel.cuh"

namespace furious::cuda {
namespace {

// What is left of c_ij's factors, besides decay: f' of the squared score gives 2, an exponential's scale comes last.
template <Score kScore>
__device__ float last_factor(float scale) {
  return kScore == Score::squared ? 2.0f : kScore == Score::exponential ? scale : 1.0f;
}

// The lane's columns 8d and up of a row of a tile that the copy engine wrote.
template <int kPanels>
__device__ float2 pair_at(const unsigned char (&panels)[kPanels][kPanelBytes], int row, int d) {
  const int place = row * 128 + (d % 8 ^ row % 8) * 16 + static_cast<int>(threadIdx.x) % 4 * 4;
  return unpack(*reinterpret_cast<const uint32_t*>(panels[d / 8] + place));
}

// What belongs to the lane's columns of a tile; `from` is at the first.
template <int kN>
__device__ void read_pairs(float2 (&pairs)[kN], const float* from) {
#pragma unroll
  for (int n = 0; n < kN; ++n) pairs[n] = *reinterpret_cast<const float2*>(from + n * 8);
}

// One row of a result, added to what the row holds (in bf16) under m.add: the lane's columns. Returns the lane's part
// of row · other, of what is new; `other` is row `other_row` of a tile. `dim`: columns of the row, a multiple of 8.
template <int kDim>
__device__ float finish_row(const float (&acc)[kDim / 8][4], int u, float factor, bf16* to,
                            const unsigned char (*other)[kDim / 64][kPanelBytes], int other_row, int dim, bool add) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(to) + threadIdx.x % 4;
  // All are issued before the first store, behind which they would wait one by one.
  uint32_t before[kDim / 8] = {};
  if (add) {
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d)
      if (d * 8 < dim) before[d] = words[d * 4];
  }
  float product = 0;
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    const float2 x = {acc[d][u * 2] * factor, acc[d][u * 2 + 1] * factor};
    if (other) {
      const float2 y = pair_at(*other, other_row, d);
      product += x.x * y.x + x.y * y.y;
    }
    const float2 z = unpack(before[d]);
    if (d * 8 < dim) words[d * 4] = pack(x.x + z.x, x.y + z.y);
  }
  return product;
}

// A token's part of dA; under m.add, key_decay holds the part of the states.
[[maybe_unused]] __device__ void write_decay(double* to, float value, bool add) {
  *to = static_cast<double>(value) + (add ? *to : 0.0);
}

struct Maps {
  CUtensorMap q, k, v, g;
};

template <int kDim>
struct QueryLayout {
  static constexpr int kGroups = kDim == 64 ? 3 : 2;  // warpgroups that multiply: as many as registers hold
  static constexpr int kRegisters = kDim == 64 ? 160 : 232, kCopyRegisters = kDim == 64 ? 32 : 40;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 3, kSlots = kDim == 64 ? 2 : 1;

  unsigned char queries[kSlots][kGroups][kPanels][kPanelBytes];
  unsigned char gradients[kSlots][kGroups][kPanels][kPanelBytes];
  unsigned char keys[kStages][kPanels][kPanelBytes];
  unsigned char values[kStages][kPanels][kPanelBytes];
  float columns[kStages][kTile];  // factor of a key, or what it adds to the exponent
  float locals[kStages][kTile];   // A_j less that of the first query, times log2(e)
  float own[kSlots][kRows];       // A_i less that of the first, times log2(e); for exponentials the row's exponent
  float deltas[kSlots][kRows];
  float inverses[kSlots][kRows];  // what is left to multiply a row by
  int starts[kSlots][kRows];
  Barriers<kSlots, kStages> sync;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(QueryLayout<kDim>::kThreads, 1)
    query_kernel(const __grid_constant__ Maps maps, const Parallel m, const Queue queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = QueryLayout<kDim>;
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
      hand_out<true>(
          shared, m, queue, 2 * L::kGroups * L::kPanels * kPanelBytes,
          [&](const Work& work, int slot) {
            for (int i = 0; i < L::kGroups; ++i)
              for (int panel = 0; panel < L::kPanels; ++panel) {
                const int row = work.row0 + i * 64;
                Barrier& ready = shared.sync.ready[slot];
                copy_tile(shared.queries[slot][i][panel], maps.q, ready, panel * 64, row, work.head / m.q.group,
                          work.batch);
                copy_tile(shared.gradients[slot][i][panel], maps.g, ready, panel * 64, row, work.head, work.batch);
              }
          },
          [&](const Work& work, auto&& first_is) {
            copy_keys<kScore>(shared, pipe, maps.k, maps.v, m, work, first_is);
          });
    if (warp == 4 * L::kGroups + 1)
      fill_rows(shared, [&](const Work& work, int slot, int i, int row) {
        const double* const a = m.decay_of(work.batch, work.head);
        const int64_t place = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length + row;
        float own = a ? static_cast<float>(a[row] - a[work.row0]) * kLog2e : 0.0f;
        if (kExponential) own -= m.log_sum[place];
        shared.own[slot][i] = own;
        shared.deltas[slot][i] = m.delta[place];
        shared.inverses[slot][i] = m.inverse ? m.inverse[place] : 1.0f;
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
    const int row0 = work.row0, w0 = row0 + group * 64;
    const bool decays = m.decay != nullptr;
    const float* const own = shared.own[slot] + group * 64 + lane_row;
    float acc[kDim / 8][4];
    const float delta[2] = {shared.deltas[slot][group * 64 + lane_row], shared.deltas[slot][group * 64 + lane_row + 8]};
    const int latest_start = shared.starts[slot][group * 64 + 63];
    clear(acc);
    const int last_tile = work.has_rows() ? (work.end - 1) / kTile : -1;
    const int own_last_tile = w0 < work.end ? w0 / kTile : -1;
    bool true_sums = false;
    int tile = work.tile;

    // kFar: every pair of the tile counts, and only its columns have factors.
    const auto turn = [&](auto far) {
      constexpr bool kFar = decltype(far)::value;
      const int stage = pipe.stage, key0 = tile * kTile;
      const bool near = key0 >= row0;
      const float* const column = shared.columns[stage] + lane_column;
      const float* const local = shared.locals[stage];
      float s[kN][4], dp[kN][4];
      shared.sync.full[stage].wait(pipe.phase);
      fence_products();
      multiply_tiles<kSteps>(s, shared.queries[slot][group][0], shared.keys[stage][0]);
      commit_products();
      multiply_tiles<kSteps>(dp, shared.gradients[slot][group][0], shared.values[stage][0]);
      commit_products();

      // f' and decay first, while the other product runs; for exponentials the weight.
      wait_for_products<1>();
      settle(s);
      const auto multiply = [&](auto place) {
        constexpr Place kPlace = decltype(place)::value;
        constexpr bool kMasked = kPlace == Place::diagonal || kPlace == Place::near_documents;
        float row[2] = {1, 1};
        int start[2] = {};
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          if constexpr (kExponential || kPlace == Place::diagonal)
            row[u] = own[u * 8];
          else if constexpr (kPlace != Place::far)
            if (near) row[u] = fast_exp2(fminf(own[u * 8] - local[kTile - 1], 0.0f));
          if constexpr (kMasked) start[u] = shared.starts[slot][group * 64 + lane_row + u * 8] - key0 - lane_column;
        }
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const bool from_local = kPlace == Place::diagonal && !kExponential;
          const float2 pair = *reinterpret_cast<const float2*>((from_local ? local + lane_column : column) + nn * 8);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int u = e / 2;
            float& x = s[nn][e];
            float d = e % 2 == 0 ? pair.x : pair.y;
            if constexpr (kExponential) {
              x = fast_exp2(fmaf(x, scale, d + row[u]));
            } else {
              if constexpr (kPlace == Place::diagonal)
                d = scale * fast_exp2(fminf(row[u] - d, 0.0f));
              else if constexpr (kPlace != Place::far)
                d *= row[u];
              x = kScore == Score::squared ? x * d : d;
            }
            const int c = column_of(nn, e);
            if constexpr (kMasked) x = c < start[u] ? 0.0f : x;
            if constexpr (kPlace == Place::diagonal) x = c > lane_row + u * 8 - lane_column ? 0.0f : x;
          }
        }
      };
      if constexpr (kFar)
        multiply(PlaceConstant<Place::far>());
      else
        with_place(tile == own_last_tile, latest_start > key0, near && !kExponential, multiply);
      if (!kFar && !kExponential && decays && near && !true_sums) {
        true_sums = true;
        scale_rows(acc, fast_exp2(own[0]), fast_exp2(own[8]));
      }
      wait_for_products<0>();
      settle(dp);
#pragma unroll
      for (int nn = 0; nn < kN; ++nn)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[nn][e] *= dp[nn][e] - delta[e / 2];
      uint32_t p[kTile / 16][4];
      pack_rows(p, s);
      const uint64_t rows_of_keys = operand_transposed(shared.keys[stage][0], 0, kPanelBytes);
      fence_products();
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) wgmma<1>(acc, p[step], rows_at(rows_of_keys, step), 1);
      commit_products();
      wait_for_products<0>();
      settle(acc);
      release(shared.sync.empty[stage]);
    };
    const int first_near = kExponential ? own_last_tile : row0 / kTile;
    for (; tile <= own_last_tile; ++tile, pipe.next()) {
      for (; tile < first_near && latest_start <= tile * kTile; ++tile, pipe.next()) turn(std::true_type());
      turn(std::false_type());
    }
    for (; tile <= last_tile; ++tile, pipe.next()) {
      shared.sync.full[pipe.stage].wait(pipe.phase);
      release(shared.sync.empty[pipe.stage]);
    }

    constexpr float kDegree = kScore == Score::squared ? 2 : 1;
    const int64_t head_row = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = w0 + lane_row + u * 8;
      float product = 0;  // q·dq
      if (row < work.end)
        product = finish_row<kDim>(
            acc, u, last_factor<kScore>(m.scale) * shared.inverses[slot][group * 64 + lane_row + u * 8],
            m.dq.row(work.batch, row, work.head), m.row_decay ? &shared.queries[slot][group] : nullptr,
            lane_row + u * 8, m.qk_dim, m.add);
      if (!m.row_decay) continue;
      product = quad_sum(product);
      if (row < work.end && lane % 4 == 0) write_decay(m.row_decay + head_row + row, product / kDegree, m.add);
    }
    release(shared.sync.unused[slot]);
  }
#endif
}

template <int kDim>
struct KeyLayout {
  static constexpr int kGroups = 2;
  static constexpr int kRegisters = kDim == 64 ? 232 : 240, kCopyRegisters = kDim == 64 ? 40 : 24;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 3, kSlots = kDim == 64 ? 2 : 1;

  unsigned char keys[kSlots][kGroups][kPanels][kPanelBytes];
  unsigned char values[kSlots][kGroups][kPanels][kPanelBytes];
  unsigned char queries[kStages][kPanels][kPanelBytes];
  unsigned char gradients[kStages][kPanels][kPanelBytes];
  float deltas[kStages][kTile];
  float columns[kStages][kTile];  // factor of a query, or its part of the exponent
  float locals[kStages][kTile];   // A_i less that of the last key, times log2(e)
  float scales[kStages][kTile];   // the factor of a query without decay
  int begins[kStages][kTile];     // starts of the queries' documents
  float own[kSlots][kRows];       // A_j less that of the last key, times log2(e)
  int ends[kSlots][kRows];        // of the keys\' documents
  Barriers<kSlots, kStages> sync;
};

// By one warp: has tiles of queries and gradients copied, with what belongs to their columns, for the keys of `work`.
template <Score kScore, class Shared, class First>
__device__ void copy_queries(Shared& shared, Pipe<Shared::kStages>& pipe, const CUtensorMap& q, const CUtensorMap& g,
                             const Parallel& m, const Work& work, First&& first_is) {
  constexpr bool kExponential = kScore == Score::exponential;
  const int lane = static_cast<int>(threadIdx.x) % 32, length = static_cast<int>(m.length), last_key = work.end - 1;
  const double* const a = m.decay_of(work.batch, work.head);
  const int64_t head_row = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length;
  const float scale = score_scale<kScore>(m.scale);
  const double reference = a ? a[last_key] : 0.0;
  int end = m.ends ? m.ends[work.batch * m.length + last_key] : length;
  if (m.chunk) end = min(end, (work.row0 / m.chunk + 1) * m.chunk);
  int last_tile = (end - 1) / kTile;
  if (a)
    last_tile -= count_erased_by_warp(last_tile - last_key / kTile, [&](int i) {
      return static_cast<float>(a[(last_tile - i) * kTile] - reference) < static_cast<float>(kErased);
    });
  first_is(last_tile);
  // Read one tile ahead.
  double decay[2] = {};
  float delta[2] = {}, row_factor[2] = {1, 1};  // 1/n, or log2 of n for exponentials
  int begin[2] = {};
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(max(tile, 0) * kTile + i * 32 + lane, length - 1);
      if (a) decay[i] = a[row];
      delta[i] = m.delta[head_row + row];
      if (kExponential)
        row_factor[i] = m.log_sum[head_row + row];
      else if (m.inverse)
        row_factor[i] = m.inverse[head_row + row];
      if (m.starts) begin[i] = m.starts[work.batch * m.length + row];
    }
  };
  load(last_tile);
  for (int tile = last_tile; tile >= work.row0 / kTile; --tile, pipe.next()) {
    const int stage = pipe.stage, row0 = tile * kTile;
    Barrier& full = shared.sync.full[stage];
    if (pipe.phase > 0) shared.sync.empty[stage].wait(pipe.phase - 1);
    if (lane == 0) {
      full.arrive_and_expect(2 * Shared::kPanels * kPanelBytes);
      for (int panel = 0; panel < Shared::kPanels; ++panel) {
        copy_tile(shared.queries[stage][panel], q, full, panel * 64, row0, work.head / m.q.group, work.batch);
        copy_tile(shared.gradients[stage][panel], g, full, panel * 64, row0, work.head, work.batch);
      }
    }
    __syncwarp();
    const double first = __shfl_sync(0xFFFFFFFFu, decay[0], 0);
    const double base = row0 <= last_key ? first : reference;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = i * 32 + lane;
      const bool valid = row0 + row < length;
      const float local = static_cast<float>(decay[i] - reference) * kLog2e;
      const float factor = kExponential ? 1.0f : scale * row_factor[i];
      const float column =
          kExponential ? local - row_factor[i] : factor * fast_exp2(static_cast<float>(decay[i] - base) * kLog2e);
      shared.columns[stage][row] = valid ? column : kExponential ? -INFINITY : 0.0f;
      shared.locals[stage][row] = local;
      shared.scales[stage][row] = valid ? factor : 0.0f;
      shared.deltas[stage][row] = valid ? delta[i] : 0.0f;
      shared.begins[stage][row] = valid ? begin[i] : 0;
    }
    load(tile - 1);
    full.arrive();
  }
}

template <Score kScore, int kDim>
__global__ void __launch_bounds__(KeyLayout<kDim>::kThreads, 1)
    key_kernel(const __grid_constant__ Maps maps, const Parallel m, const Queue queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = KeyLayout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  // Whether registers suffice for factors that are read ahead, and for a loop of its own over tiles far away.
  constexpr bool kAhead = kDim == 64 && kScore != Score::linear;
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;

  init_barriers(shared);
  if (warp >= 4 * L::kGroups) {
    decrease_registers<L::kCopyRegisters>();
    Pipe<L::kStages> pipe;
    if (warp == 4 * L::kGroups)
      hand_out<false>(
          shared, m, queue, 2 * L::kGroups * L::kPanels * kPanelBytes,
          [&](const Work& work, int slot) {
            for (int i = 0; i < L::kGroups; ++i)
              for (int panel = 0; panel < L::kPanels; ++panel) {
                const int key = work.row0 + i * 64;
                Barrier& ready = shared.sync.ready[slot];
                copy_tile(shared.keys[slot][i][panel], maps.k, ready, panel * 64, key, work.head / m.k.group,
                          work.batch);
                copy_tile(shared.values[slot][i][panel], maps.v, ready, panel * 64, key, work.head / m.v.group,
                          work.batch);
              }
          },
          [&](const Work& work, auto&& first_is) {
            copy_queries<kScore>(shared, pipe, maps.q, maps.g, m, work, first_is);
          });
    if (warp == 4 * L::kGroups + 1)
      fill_rows(shared, [&](const Work& work, int slot, int i, int row) {
        const double* const a = m.decay_of(work.batch, work.head);
        shared.own[slot][i] = a ? static_cast<float>(a[row] - a[work.end - 1]) * kLog2e : 0.0f;
        shared.ends[slot][i] = m.ends ? m.ends[work.batch * m.length + row] : INT_MAX;
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
    const int end = work.end, w0 = work.row0 + group * 64;
    float dk[kDim / 8][4], dv[kDim / 8][4];
    float decay_sum[2] = {};
    const float* const own_rows = shared.own[slot] + group * 64 + lane_row;
    clear(dk);
    clear(dv);
    bool true_sums = false;
    int tile = work.has_rows() ? work.tile : -1;
    const int own_tile = w0 < end ? w0 / kTile : tile + 1;

    // kFar: every pair of the tile counts, and only its columns have factors.
    const auto turn = [&](auto far, [[maybe_unused]] bool documents) {
      constexpr bool kFar = decltype(far)::value;
      const int stage = pipe.stage, row0 = tile * kTile;
      const bool near = row0 < end;
      const float* const column = shared.columns[stage] + lane_column;
      const float* const local = shared.locals[stage] + lane_column;
      const float* const delta = shared.deltas[stage] + lane_column;
      float s[kN][4], dp[kN][4];
      shared.sync.full[stage].wait(pipe.phase);
      fence_products();
      multiply_tiles<kSteps>(s, shared.keys[slot][group][0], shared.queries[stage][0]);
      commit_products();
      multiply_tiles<kSteps>(dp, shared.values[slot][group][0], shared.gradients[stage][0]);
      commit_products();

      [[maybe_unused]] float2 pairs[kN], deltas[kN];
      if constexpr (kAhead) read_pairs(pairs, column);
      wait_for_products<1>();
      settle(s);
      // Weights become the operand p; s keeps what the coefficients need.
      uint32_t p[kTile / 16][4];
      const auto multiply = [&](auto place) {
        constexpr Place kPlace = decltype(place)::value;
        constexpr bool kMasked = kPlace == Place::diagonal || kPlace == Place::near_documents;
        float row[2] = {1, 1}, own[2] = {};
        if constexpr (kExponential || kPlace != Place::far) own[0] = own_rows[0], own[1] = own_rows[8];
        if constexpr (!kExponential && kPlace != Place::far && kPlace != Place::diagonal) {
          row[0] = near ? fast_exp2(fminf(shared.locals[stage][0] - own[0], 0.0f)) : 1.0f;
          row[1] = near ? fast_exp2(fminf(shared.locals[stage][0] - own[1], 0.0f)) : 1.0f;
        }
#pragma unroll
        for (int nn = 0; nn < kN; ++nn) {
          const float2 pair = kAhead ? pairs[nn] : *reinterpret_cast<const float2*>(column + nn * 8);
          float2 locals = {}, scales = {};
          int2 begins = {};
          if constexpr (kPlace == Place::diagonal && !kExponential) {
            locals = *reinterpret_cast<const float2*>(local + nn * 8);
            scales = *reinterpret_cast<const float2*>(shared.scales[stage] + lane_column + nn * 8);
          }
          if constexpr (kMasked) begins = *reinterpret_cast<const int2*>(shared.begins[stage] + lane_column + nn * 8);
          float w[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int u = e / 2;
            const float x = s[nn][e];
            float d = e % 2 == 0 ? pair.x : pair.y;
            if constexpr (kExponential) {
              w[e] = fast_exp2(fmaf(x, scale, d - own[u]));
            } else {
              if constexpr (kPlace == Place::diagonal)
                d = (e % 2 == 0 ? scales.x : scales.y) *
                    fast_exp2(fminf((e % 2 == 0 ? locals.x : locals.y) - own[u], 0.0f));
              else if constexpr (kPlace != Place::far)
                d *= row[u];
              w[e] = x * d;
            }
            // Queries behind the last are zeros, and so is what they give.
            bool masked = false;
            if constexpr (kMasked) masked = w0 + lane_row + u * 8 < (e % 2 == 0 ? begins.x : begins.y);
            if constexpr (kPlace == Place::diagonal) masked |= column_of(nn, e) < lane_row + u * 8 - lane_column;
            if constexpr (kMasked) {
              w[e] = masked ? 0.0f : w[e];
              d = masked ? 0.0f : d;
            }
            s[nn][e] = kScore == Score::linear ? d : w[e];
            if constexpr (kScore == Score::squared) w[e] *= x;
          }
          p[nn / 2][nn % 2 * 2] = pack(w[0], w[1]);
          p[nn / 2][nn % 2 * 2 + 1] = pack(w[2], w[3]);
        }
      };
      if constexpr (kFar)
        multiply(PlaceConstant<Place::far>());
      else
        with_place(tile == own_tile, documents, near && !kExponential, multiply);
      if (!kFar && !kExponential && m.decay && near && !true_sums) {
        true_sums = true;
        const float upper = fast_exp2(-own_rows[0]), lower = fast_exp2(-own_rows[8]);
        scale_rows(dk, upper, lower);
        scale_rows(dv, upper, lower);
      }
      if constexpr (kAhead) read_pairs(deltas, delta);
      const uint64_t rows_of_gradients = operand_transposed(shared.gradients[stage][0], 0, kPanelBytes);
      fence_products();
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) wgmma<1>(dv, p[step], rows_at(rows_of_gradients, step), 1);
      commit_products();
      wait_for_products<kAhead ? 1 : 0>();  // otherwise the registers of p are needed for c
      settle(dp);
      uint32_t c[kTile / 16][4];
#pragma unroll
      for (int nn = 0; nn < kN; ++nn) {
        const float2 shifts = kAhead ? deltas[nn] : *reinterpret_cast<const float2*>(delta + nn * 8);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = s[nn][e] * (dp[nn][e] - (e % 2 == 0 ? shifts.x : shifts.y));
          if (kExponential) decay_sum[e / 2] += x[e];
        }
        c[nn / 2][nn % 2 * 2] = pack(x[0], x[1]);
        c[nn / 2][nn % 2 * 2 + 1] = pack(x[2], x[3]);
      }
      const uint64_t rows_of_queries = operand_transposed(shared.queries[stage][0], 0, kPanelBytes);
      fence_products();
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) wgmma<1>(dk, c[step], rows_at(rows_of_queries, step), 1);
      commit_products();
      wait_for_products<0>();
      settle(dk);
      settle(dv);
      release(shared.sync.empty[stage]);
    };
    // Queries of tiles that end behind the document of the first key may belong to another, or be none.
    const int document_end = shared.ends[slot][group * 64];
    const int first_far = kExponential ? own_tile + 1 : (end + kTile - 1) / kTile;
    for (; tile >= own_tile; --tile, pipe.next()) {
      if constexpr (kAhead)
        for (; tile >= first_far && (tile + 1) * kTile <= document_end; --tile, pipe.next())
          turn(std::true_type(), false);
      turn(std::false_type(), (tile + 1) * kTile > document_end);
    }
    for (; tile >= work.row0 / kTile; --tile, pipe.next()) {
      shared.sync.full[pipe.stage].wait(pipe.phase);
      release(shared.sync.empty[pipe.stage]);
    }

    constexpr float kDegree = kScore == Score::squared ? 2 : 1;
    const int64_t head_row = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int key = w0 + lane_row + u * 8;
      float product = 0;  // k·dk
      if (key < work.end) {
        product =
            finish_row<kDim>(dk, u, last_factor<kScore>(m.scale), m.dk.row(work.batch, key, work.head),
                             m.key_decay ? &shared.keys[slot][group] : nullptr, lane_row + u * 8, m.qk_dim, m.add);
        finish_row<kDim>(dv, u, 1.0f, m.dv.row(work.batch, key, work.head), nullptr, 0, m.v_dim, m.add);
      }
      if (!m.key_decay) continue;
      product = quad_sum(kExponential ? decay_sum[u] : product / kDegree);
      if (key < work.end && lane % 4 == 0) write_decay(m.key_decay + head_row + key, -product, m.add);
    }
    release(shared.sync.unused[slot]);
  }
#endif
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m, const Tensor& gradient) {
  const Maps maps{tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v), tile_map(gradient)};
  launch_queue<QueryLayout<kDim>>(query_kernel<kScore, kDim>, "mixer_backward", call, maps, m);
  launch_queue<KeyLayout<kDim>>(key_kernel<kScore, kDim>, "mixer_backward", call, maps, m);
}

}  // namespace

void hopper_backward(const MixerCall& call, const Parallel& m, const Tensor& gradient) {
  with_score_and_dim(
      call, [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m, gradient); });
}

}  // namespace furious::cuda
