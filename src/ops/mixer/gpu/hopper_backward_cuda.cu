// The parallel form on Hopper, backward: parallel_backward_cuda.cu says what is computed. A block owns keys and walks
// over queries, from the last to its own: dk and dv stay in registers. What the keys add to dq goes through shared
// memory to f32 sums in global memory, a tile of 64 queries at a time, in the order of the keys: the results have the
// same bits every time. A word per tile says whose turn it is. Blocks wait only for pieces of work with lower numbers,
// which were taken before, so one of them always goes on. A second kernel rounds the sums.
//
// Two warpgroups have 64 keys each and take turns: one issues all products of a tile while the other computes weights
// and coefficients from its scores. dq of a tile needs the coefficients of both; it is multiplied one turn later, so
// that neither waits for the other.
//
// Constant factors of the coefficients c_ij are left to the end.
#include <climits>

#include "ops/mixer/gpu/hopper_backward.cuh"

namespace furious::cuda {
namespace {

constexpr int kSumCount = kTile * 64;  // numbers of dq of a tile, in 64 columns
[[maybe_unused]] constexpr int kSumBytes = kSumCount * 4;

struct Arguments {
  CUtensorMap q, k, v, g;
  // Of each tile of queries, [batch, heads, tiles, columns / 64]: dq in the order in which the threads of a warpgroup
  // hold it, four numbers of each at a time; and the tile of keys whose turn it is.
  float* sums;
  int* turns;
};

// Where a tile's sums lie among all.
template <int kPanels>
__device__ int64_t sums_at(const Parallel& m, const Work& work, int tile, int panel) {
  const int64_t tiles = (m.length + kTile - 1) / kTile;
  return ((static_cast<int64_t>(work.batch) * m.heads + work.head) * tiles + tile) * kPanels + panel;
}

template <int kDim>
struct Layout {
  static constexpr int kGroups = 2;
  static constexpr int kRegisters = kDim == 64 ? 232 : 240, kCopyRegisters = kDim == 64 ? 40 : 24;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 3 : 2, kSlots = kDim == 64 ? 2 : 1;
  static constexpr int kHeld = kDim == 64 ? 2 : 1;  // sums of a warpgroup that wait to be added

  unsigned char keys[kSlots][kGroups][kPanels][kPanelBytes];
  unsigned char values[kSlots][kGroups][kPanels][kPanelBytes];
  unsigned char queries[kStages][kPanels][kPanelBytes];
  unsigned char gradients[kStages][kPanels][kPanelBytes];
  unsigned char coefficients[2][kGroups][kPanelBytes];  // rows are keys
  float sums[kGroups][kHeld][kSumCount];                // what each warpgroup adds next
  float deltas[kStages][kTile];
  float columns[kStages][kTile];  // factor of a query, or its part of the exponent
  float locals[kStages][kTile];   // A_i less that of the last key, times log2(e)
  float scales[kStages][kTile];   // the factor of a query without decay
  int begins[kStages][kTile];     // starts of the queries' documents
  float own[kSlots][kRows];       // A_j less that of the last key, times log2(e)
  int ends[kSlots][kRows];        // of the keys' documents
  int before[kSlots];             // tiles of queries up to this one have sums from earlier keys
  Barriers<kSlots, kStages> sync;
  Barrier written[2], multiplied[2];                      // coefficients
  Barrier summed[kGroups][kHeld], added[kGroups][kHeld];  // sums

  // The warpgroup that multiplies a tile's coefficients with 64 columns of the keys: with 64 columns in all they take
  // turns, otherwise each has its own.
  static __device__ bool has_sums(int group, int tile) { return kPanels > 1 || tile % 2 == group; }
};

// By one thread: adds what a warpgroup has multiplied to the sums of each tile when it is the block's turn.
template <int kDim>
__device__ void add_sums(Layout<kDim>& shared, const Arguments& arguments, const Parallel& m, int group) {
  using L = Layout<kDim>;
  Pipe<L::kHeld> held;
  for (Pipe<L::kSlots> slots;; slots.next()) {
    const int slot = slots.stage;
    shared.sync.ready[slot].wait(slots.phase);
    const Work work = shared.sync.work[slot];
    const int before = shared.before[slot], own_tile = work.row0 / kTile;
    shared.sync.unused[slot].arrive();  // the sums have no part in the slot
    if (work.head < 0) return;
    if (!work.has_rows()) continue;
    const int step = L::kPanels > 1 ? 1 : 2;
    int tile = work.tile - (L::has_sums(group, work.tile) ? 0 : 1);
    const int64_t place = sums_at<L::kPanels>(m, work, 0, L::kPanels > 1 ? group : 0);
    int* const turns = arguments.turns + place;
    float* const sums = arguments.sums + place * kSumCount;
    const auto is_turn = [&] { return tile > before || load_acquire(turns + tile * L::kPanels) == own_tile; };
    bool turn = tile >= own_tile && is_turn();
    while (tile >= own_tile) {
      while (!turn) turn = is_turn();
      fence_global_copies();
      shared.summed[group][held.stage].wait(held.phase);
      float* const from = shared.sums[group][held.stage];
      float* const to = sums + static_cast<int64_t>(tile) * (L::kPanels * kSumCount);
      if (tile > before)
        store_bytes(to, from, kSumBytes);
      else
        add_bytes(to, from, kSumBytes);
      commit_stores();
      int* const next = turns + tile * L::kPanels;
      tile -= step;
      turn = tile >= own_tile && is_turn();  // while the sums are added
      wait_for_reads_of_stores();
      shared.added[group][held.stage].arrive();
      wait_for_stores();
      fence_global_copies();
      store_release(next, own_tile + L::kRows / kTile);
      held.next();
    }
  }
}

template <Score kScore, int kDim>
__global__ void __launch_bounds__(Layout<kDim>::kThreads, 1)
    backward_kernel(const __grid_constant__ Arguments arguments, const Parallel m, const Queue queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  constexpr bool kEarly = kDim == 64;  // whether registers suffice for the scores of the next turn
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;

  if (threadIdx.x == 0)
    for (int i = 0; i < 2; ++i) {
      shared.written[i].init(4 * L::kGroups);
      shared.multiplied[i].init(4 * L::kPanels);
      for (int j = 0; j < L::kHeld; ++j) {
        shared.summed[i][j].init(4);
        shared.added[i][j].init(1);
      }
    }
  init_barriers<2>(shared);  // add_sums()
  if (warp >= 4 * L::kGroups) {
    decrease_registers<L::kCopyRegisters>();
    Pipe<L::kStages> pipe;
    if (warp == 4 * L::kGroups)
      hand_out<false, true>(
          shared, m, queue, 2 * L::kGroups * L::kPanels * kPanelBytes,
          [&](const Work& work, int slot) {
            for (int i = 0; i < L::kGroups; ++i)
              for (int panel = 0; panel < L::kPanels; ++panel) {
                const int key = work.row0 + i * 64;
                Barrier& ready = shared.sync.ready[slot];
                copy_tile(shared.keys[slot][i][panel], arguments.k, ready, panel * 64, key, work.head / m.k.group,
                          work.batch);
                copy_tile(shared.values[slot][i][panel], arguments.v, ready, panel * 64, key, work.head / m.v.group,
                          work.batch);
              }
          },
          [&](const Work& work, int slot, auto&& first_is) {
            const bool is_first = work.row0 == (m.chunk ? work.row0 / m.chunk * m.chunk : 0);
            const int before = is_first ? -1 : last_tile_of(m, work, work.row0 - 1);
            if (lane == 0) shared.before[slot] = before;
            copy_queries<kScore>(shared, pipe, arguments.q, arguments.g, m, work, first_is);
          });
    if (warp == 4 * L::kGroups + 1)
      fill_rows(shared, [&](const Work& work, int slot, int i, int row) {
        const double* const a = m.decay_of(work.batch, work.head);
        shared.own[slot][i] = a ? static_cast<float>(a[row] - a[work.end - 1]) * kLog2e : 0.0f;
        shared.ends[slot][i] = m.ends ? m.ends[work.batch * m.length + row] : INT_MAX;
        if (!m.add) return;  // what the results are added to
        for (int column = 0; column < m.qk_dim; column += 64) prefetch(m.dk.row(work.batch, row, work.head) + column);
        for (int column = 0; column < m.v_dim; column += 64) prefetch(m.dv.row(work.batch, row, work.head) + column);
      });
    if (warp >= 4 * L::kGroups + 2 && lane == 0) add_sums(shared, arguments, m, warp - (4 * L::kGroups + 2));
    return;
  }
  increase_registers<L::kRegisters>();

  const int group = __shfl_sync(0xFFFFFFFFu, warp / 4, 0);
  const int lane_row = warp % 4 * 16 + lane / 4, lane_column = lane % 4 * 2;
  const float scale = score_scale<kScore>(m.scale);
  if (group == 1) arrive_at(0);
  Pipe<L::kStages> pipe;
  int turns = 0;  // of all pieces of work
  Pipe<L::kHeld> held;
  bool given = false;  // whether sums were written that the thread which adds them has not been told of
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
    // The assembler takes what comes from another lane of the warp for the same in all.
    const auto same = [](int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); };
    const int first_tile = same(work.has_rows() ? work.tile : -1), lowest = same(work.row0 / kTile);
    const int own_tile = same(w0 < end ? w0 / kTile : first_tile + 1);
    int tile = first_tile;

    float s[kN][4], dp[kN][4];
    const auto begin_scores = [&](const Pipe<L::kStages>& at) {
      shared.sync.full[at.stage].wait(at.phase);
      multiply_tiles<kSteps>(s, shared.keys[slot][group][0], shared.queries[at.stage][0]);
      multiply_tiles<kSteps>(dp, shared.values[slot][group][0], shared.gradients[at.stage][0]);
    };
    const auto end_scores = [&] {
      commit_products();
      wait_for_products<0>();
      settle(s);
      settle(dp);
    };
    const auto make_scores = [&] {
      fence_products();
      begin_scores(pipe);
      end_scores();
    };
    // dq of the tile of the turn before: its coefficients with the keys of all warpgroups.
    const auto begin_sums = [&](float(&dq)[8][4]) {
      const int last = turns - 1;
      shared.written[last % 2].wait(last / 2);
      const uint64_t a = operand_transposed(shared.coefficients[last % 2][0], 0);
      const uint64_t b = operand_transposed(shared.keys[slot][0][L::kPanels > 1 ? group : 0], 0);
      wgmma_new<1, 1>(dq, a, b);
#pragma unroll
      for (int step = 1; step < 4 * L::kGroups; ++step)
        wgmma<1, 1>(dq, rows_at(a, step), rows_at(b + step / 4 * L::kPanels * kPanelBytes / 16, step % 4), 1);
    };
    // Behind fence_shared_writes().
    const auto tell_sums = [&] {
      if (!given) return;
      given = false;
      release(shared.summed[group][held.stage]);
      held.next();
    };
    const auto give_sums = [&](float(&dq)[8][4]) {
      settle(dq);
      release(shared.multiplied[(turns - 1) % 2]);
      if (held.phase > 0) shared.added[group][held.stage].wait(held.phase - 1);
      float4* const to = reinterpret_cast<float4*>(shared.sums[group][held.stage]) + threadIdx.x % 128;
#pragma unroll
      for (int n = 0; n < 8; ++n) to[n * 128] = {dq[n][0], dq[n][1], dq[n][2], dq[n][3]};
      given = true;
      if constexpr (L::kHeld == 1) {
        fence_shared_writes();
        tell_sums();
      }
    };
    const auto make_sums = [&] {
      float dq[8][4];
      fence_products();
      begin_sums(dq);
      commit_products();
      wait_for_products<0>();
      give_sums(dq);
      fence_shared_writes();
      tell_sums();
    };
    // Coefficients of the tile of this turn, for the warpgroup that multiplies them in the next.
    const auto write_coefficients = [&](const uint32_t(&c)[kTile / 16][4]) {
      if (turns > 1) shared.multiplied[turns % 2].wait(turns / 2 - 1);
      const Tile<64> to = panel_of(shared.coefficients[turns % 2][group]);
#pragma unroll
      for (int i = 0; i < kTile / 16; ++i) store_matrices(to.at(warp % 4 * 16 + lane % 16, 2 * i + lane / 16), c[i]);
    };
    // What was written is there. Late, when products run: the fence waits for all writes.
    const auto tell = [&] {
      fence_shared_writes();
      release(shared.written[turns % 2]);
      tell_sums();
    };

    // Weights p and coefficients c of the turn's tile.
    uint32_t p[kTile / 16][4], c[kTile / 16][4];
    const auto weigh = [&](auto place) {
      constexpr Place kPlace = decltype(place)::value;
      constexpr bool kMasked = kPlace == Place::diagonal || kPlace == Place::near_documents;
      const int stage = pipe.stage;
      float row[2] = {1, 1};
      const float own[2] = {own_rows[0], own_rows[8]};
      if constexpr (!kExponential && kPlace != Place::diagonal) {
        // Factors of far columns are relative to the last key.
        const float edge = kPlace != Place::far && tile * kTile < end ? shared.locals[stage][0] : 0.0f;
        row[0] = fast_exp2(fminf(edge - own[0], 0.0f));
        row[1] = fast_exp2(fminf(edge - own[1], 0.0f));
      }
#pragma unroll
      for (int nn = 0; nn < kN; ++nn) {
        const int column = lane_column + nn * 8;
        const float2 pair = *reinterpret_cast<const float2*>(shared.columns[stage] + column);
        const float2 shifts = *reinterpret_cast<const float2*>(shared.deltas[stage] + column);
        float2 locals = {}, scales = {};
        int2 begins = {};
        if constexpr (kPlace == Place::diagonal && !kExponential) {
          locals = *reinterpret_cast<const float2*>(shared.locals[stage] + column);
          scales = *reinterpret_cast<const float2*>(shared.scales[stage] + column);
        }
        if constexpr (kMasked) begins = *reinterpret_cast<const int2*>(shared.begins[stage] + column);
        float w[4], x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int u = e / 2;
          float d = e % 2 == 0 ? pair.x : pair.y;
          if constexpr (kExponential) {
            w[e] = fast_exp2(fmaf(s[nn][e], scale, d - own[u]));
          } else {
            if constexpr (kPlace == Place::diagonal)
              d = (e % 2 == 0 ? scales.x : scales.y) *
                  fast_exp2(fminf((e % 2 == 0 ? locals.x : locals.y) - own[u], 0.0f));
            else
              d *= row[u];
            w[e] = s[nn][e] * d;
          }
          // Queries behind the last are zeros, and so is what they give.
          bool masked = false;
          if constexpr (kMasked) masked = w0 + lane_row + u * 8 < (e % 2 == 0 ? begins.x : begins.y);
          if constexpr (kPlace == Place::diagonal) masked |= column_of(nn, e) < lane_row + u * 8 - lane_column;
          if constexpr (kMasked) {
            w[e] = masked ? 0.0f : w[e];
            d = masked ? 0.0f : d;
          }
          x[e] = (kScore == Score::linear ? d : w[e]) * (dp[nn][e] - (e % 2 == 0 ? shifts.x : shifts.y));
          if constexpr (kExponential) decay_sum[u] += x[e];
          if constexpr (kScore == Score::squared) w[e] *= s[nn][e];
        }
        p[nn / 2][nn % 2 * 2] = pack(w[0], w[1]);
        p[nn / 2][nn % 2 * 2 + 1] = pack(w[2], w[3]);
        c[nn / 2][nn % 2 * 2] = pack(x[0], x[1]);
        c[nn / 2][nn % 2 * 2 + 1] = pack(x[2], x[3]);
      }
    };
    // All products of a turn: dv and dk of this one's tile, dq of the last one's (kSums), the scores of the next
    // (kMore).
    const auto multiply = [&](auto more, auto sums) {
      constexpr bool kMore = decltype(more)::value, kSums = decltype(sums)::value;
      [[maybe_unused]] float dq[8][4];
      const int stage = pipe.stage;
      const uint64_t gradients = operand_transposed(shared.gradients[stage][0], 0, kPanelBytes);
      const uint64_t queries = operand_transposed(shared.queries[stage][0], 0, kPanelBytes);
      Pipe<L::kStages> next = pipe;
      next.next();
      wait_at(group);
      fence_products();
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) wgmma<1>(dv, p[step], rows_at(gradients, step), 1);
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) wgmma<1>(dk, c[step], rows_at(queries, step), 1);
      if constexpr (kMore) begin_scores(next);
      if constexpr (kSums) begin_sums(dq);
      arrive_at(1 - group);
      tell();
      if constexpr (kMore) {
        end_scores();
      } else {
        commit_products();
        wait_for_products<0>();
      }
      settle(dk);
      settle(dv);
      release(shared.sync.empty[stage]);
      if constexpr (kSums) give_sums(dq);
    };
    // Queries of tiles that end behind the document of the first key may belong to another, or be none.
    const int document_end = same(shared.ends[slot][group * 64]);
    const int first_far = kExponential ? own_tile + 1 : same((end + kTile - 1) / kTile);
    if (kEarly && tile >= own_tile) make_scores();
    for (; tile >= lowest; --tile, ++turns, pipe.next()) {
      const bool sums = tile < first_tile && L::has_sums(group, tile + 1);
      if (tile >= own_tile) {
        if (!kEarly) make_scores();
        with_place(tile == own_tile, (tile + 1) * kTile > document_end, tile < first_far, weigh);
        write_coefficients(c);
        if (kEarly && tile > own_tile && sums)
          multiply(std::true_type(), std::true_type());
        else if (kEarly && tile > own_tile)
          multiply(std::true_type(), std::false_type());
        else if (sums)
          multiply(std::false_type(), std::true_type());
        else
          multiply(std::false_type(), std::false_type());
      } else {
        shared.sync.full[pipe.stage].wait(pipe.phase);
        write_coefficients({});
        tell();
        wait_at(group);
        if (sums) make_sums();
        arrive_at(1 - group);
        release(shared.sync.empty[pipe.stage]);
      }
    }
    fence_shared_writes();
    tell_sums();
    if (first_tile >= lowest && L::has_sums(group, lowest)) make_sums();

    // What the gradients are added to.
    const int64_t head_row = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length;
    const auto key_of = [&](int u) { return w0 + lane_row + u * 8; };
    uint32_t dk_before[2][kDim / 8] = {}, dv_before[2][kDim / 8] = {};
    double decay_before[2] = {};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (!m.add || key_of(u) >= work.end) continue;
      load_row<kDim>(dk_before[u], m.dk.row(work.batch, key_of(u), work.head), m.qk_dim);
      load_row<kDim>(dv_before[u], m.dv.row(work.batch, key_of(u), work.head), m.v_dim);
      if (m.key_decay) decay_before[u] = m.key_decay[head_row + key_of(u)];
    }
    constexpr float kDegree = kScore == Score::squared ? 2 : 1;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int key = key_of(u);
      float product = 0;  // k·dk
      if (key < work.end) {
        product =
            finish_row<kDim>(dk, u, last_factor<kScore>(m.scale), dk_before[u], m.dk.row(work.batch, key, work.head),
                             m.key_decay ? &shared.keys[slot][group] : nullptr, lane_row + u * 8, m.qk_dim);
        finish_row<kDim>(dv, u, 1.0f, dv_before[u], m.dv.row(work.batch, key, work.head), nullptr, 0, m.v_dim);
      }
      if (!m.key_decay) continue;
      product = quad_sum(kExponential ? decay_sum[u] : product / kDegree);
      if (key < work.end && lane % 4 == 0)
        m.key_decay[head_row + key] = static_cast<double>(-product) + decay_before[u];
    }
    release(shared.sync.unused[slot]);
  }
#endif
}

// dq from its sums: a thread has 8 columns of a query, and its neighbours the rest.
constexpr int kRoundThreads = 256;
union Eight {
  uint4 all;
  uint32_t pairs[4];
};
template <int kDim>
__global__ void round_kernel(const float* sums, const Parallel m, float factor, float degree) {
  constexpr int kLanes = kDim / 8, kQueries = kRoundThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int row = static_cast<int>(blockIdx.x) * kQueries + static_cast<int>(threadIdx.x) / kLanes;
  const Work work{0, 0, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z), 0};
  const bool valid = row < m.length && lane * 8 < m.qk_dim;
  float2 x[4] = {};
  Eight q = {};
  if (valid) {
    const float* const from = sums + sums_at<kDim / 64>(m, work, row / kTile, lane / 8) * kSumCount + lane % 8 * 512 +
                              (row % kTile / 16 * 32 + row % 8 * 4) * 4 + row % 16 / 8 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __ldcs(reinterpret_cast<const float2*>(from + i * 4));
    uint4* const to = reinterpret_cast<uint4*>(m.dq.row(work.batch, row, work.head)) + lane;
    Eight y = {};
    if (m.add) y.all = *to;
    if (m.row_decay) q.all = *(reinterpret_cast<const uint4*>(m.q.row(work.batch, row, work.head)) + lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = {x[i].x * factor, x[i].y * factor};
      const float2 before = unpack(y.pairs[i]);
      y.pairs[i] = pack(x[i].x + before.x, x[i].y + before.y);
    }
    *to = y.all;
  }
  if (!m.row_decay) return;
  // q·dq, in the order in which a quad sums k·dk: for a token that only sees itself the two are equal. Four threads of
  // a query add up what all of them have.
  __shared__ float parts[kRoundThreads / 32][32 / kLanes][4][kLanes + 1];
  float(&own)[4][kLanes + 1] = parts[threadIdx.x / 32][threadIdx.x % 32 / kLanes];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 y = unpack(q.pairs[i]);
    own[i][lane] = x[i].x * y.x + x[i].y * y.y;
  }
  __syncwarp();
  float product = 0;
#pragma unroll
  for (int d = 0; d < kLanes; ++d) product += own[lane % 4][d];
  product = quad_sum(product);
  if (row >= m.length || lane != 0) return;
  double& decay = m.row_decay[(work.batch * m.heads + work.head) * m.length + row];
  decay = static_cast<double>(product / degree) + (m.add ? decay : 0.0);
}

// Lines that are computed together: enough that blocks which start one after the other seldom wait for each other, as
// few as the L2 cache holds with their sums.
template <int kDim>
int lines_together(const MixerShape& shape, int64_t chunk) {
  constexpr int64_t kCached = 40 << 20;
  return static_cast<int>(std::max<int64_t>(1, kCached / ((2 * 2 + 4) * kDim * std::min(chunk, shape.length))));
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m, const Tensor& gradient) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const int64_t tiles = shape.batch * shape.heads * blocks_for(shape.length, kTile) * (kDim / 64);
  const Tensor sums = Tensor::empty({tiles, kSumCount}, DType::f32, device);
  const Tensor turns = Tensor::empty({tiles}, DType::i32, device);
  check(cudaMemsetAsync(turns.raw(), 0, static_cast<size_t>(tiles) * sizeof(int32_t), stream(device)),
        "mixer_backward");
  const Arguments arguments{
      tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v), tile_map(gradient), floats(sums),
      turns.data<int32_t>()};
  launch_queue<Layout<kDim>>(backward_kernel<kScore, kDim>, "mixer_backward", call, arguments, m,
                             lines_together<kDim>(shape, m.chunk ? m.chunk : shape.length));
  const dim3 grid(blocks_for(shape.length, kRoundThreads / (kDim / 8)), static_cast<unsigned>(shape.heads),
                  static_cast<unsigned>(shape.batch));
  round_kernel<kDim><<<grid, kRoundThreads, 0, stream(device)>>>(floats(sums), m, last_factor<kScore>(m.scale),
                                                                 kScore == Score::squared ? 2.0f : 1.0f);
  check_launch("mixer_backward");
}

}  // namespace

void hopper_backward(const MixerCall& call, const Parallel& m, const Tensor& gradient) {
  with_score_and_dim(call, [&](auto score, auto dim) {
    if constexpr (dim() <= 128)
      launch<decltype(score)::value, dim()>(call, m, gradient);
    else
      hopper_wide_backward(call, m, gradient);
  });
}

}  // namespace furious::cuda
