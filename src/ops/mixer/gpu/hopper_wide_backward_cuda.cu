// The parallel form on Hopper, backward, for heads of more than 128: parallel_backward_cuda.cu says what is computed.
// One accumulator of 64 rows fills the registers of a warpgroup, so there are two kernels, for dk and dv and for dq,
// which both compute the scores: seven products rather than five, and nothing is added up across blocks.
//
// A block owns 64 rows of a head, keys or queries, and walks over tiles of the other side. Of its two warpgroups one
// multiplies queries with keys and makes weights of the scores; the other multiplies gradients with values. The first
// hands the slopes ∂w/∂(q·k) over, thread by thread, of which the second makes the coefficients c. Then
//
//   keys:    the first computes dv += wᵀ g, the second dk += cᵀ q
//   queries: both compute dq += c k, the first for 128 columns, the second, which hands c back, for the others.
//
// Constant factors of the coefficients are left to the end.
#include <climits>

#include "ops/mixer/gpu/hopper_backward.cuh"

namespace furious::cuda {
namespace {

// What the block owns, its rows, and tiles of the other side.
template <int kDim, bool kKeys>
struct Layout {
  static constexpr int kGroups = 2;
  static constexpr int kRegisters = 232, kCopyRegisters = 40;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  static constexpr int kRows = 64;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kStages = kDim <= 192 ? 3 : 2, kSlots = 1;

  unsigned char own_qk[kPanels][kPanelBytes];
  unsigned char own_v[kPanels][kPanelBytes];
  union {
    unsigned char queries[kStages][kPanels][kPanelBytes];
    unsigned char keys[kStages][kPanels][kPanelBytes];
  };
  union {
    unsigned char gradients[kStages][kPanels][kPanelBytes];
    unsigned char values[kStages][kPanels][kPanelBytes];
  };
  float4 slopes[8][128];          // in the order of the threads
  uint4 coefficients[4][128];     // the same, where the first warpgroup needs them
  float columns[kStages][kTile];  // factor of a token of the other side, or its part of the exponent
  float locals[kStages][kTile];   // its A less the reference, times log2(e)
  float scales[kStages][kTile];   // the factor of a query without decay
  float deltas[kStages][kTile];
  int begins[kStages][kTile];
  float own[kSlots][kRows];      // A of an own row less the reference, times log2(e)
  float factors[kSlots][kRows];  // of own queries: 1/n, or log2 of n for exponentials
  float own_deltas[kSlots][kRows];
  int bounds[kSlots][kRows];  // the end of an own key's document, or the start of a query's
  float products[2][128];     // q·dq over the columns of the first warpgroup, of each of its threads
  Barriers<kSlots, kStages> sync;
  Barrier given, taken;  // slopes
  Barrier made;          // coefficients
};

struct Maps {
  CUtensorMap q, k, v, g;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Slopes and, for keys, the weights p of the first warpgroup's scores s, which become the slopes.
template <Score kScore, bool kKeys, Place kPlace, class Shared>
__device__ void weigh(float (&s)[kTile / 8][4], uint32_t (&p)[kTile / 16][4], const Shared& shared, int stage,
                      int tile0, int row0, float scale) {
  constexpr bool kExponential = kScore == Score::exponential, kDiagonal = kPlace == Place::diagonal;
  constexpr bool kMasked = kDiagonal || kPlace == Place::near_documents;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int lane_row = warp * 16 + lane / 4, lane_column = lane % 4 * 2;
  const float* const own_rows = shared.own[0] + lane_row;
  float row[2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float own = own_rows[u * 8];
    if constexpr (kExponential)
      row[u] = kKeys ? -own : own - shared.factors[0][lane_row + u * 8];
    else if constexpr (kDiagonal)
      row[u] = own;
    else
      row[u] = kKeys ? fast_exp2(fminf(-own, 0.0f)) : 1.0f;  // relative to the last key; dq is, until the diagonal
  }
#pragma unroll
  for (int nn = 0; nn < kTile / 8; ++nn) {
    const int column = lane_column + nn * 8;
    const float* const factors = kDiagonal && !kExponential ? shared.locals[stage] : shared.columns[stage];
    const float2 pair = *reinterpret_cast<const float2*>(factors + column);
    float2 scales = {scale, scale};
    if constexpr (kKeys && kDiagonal && !kExponential)
      scales = *reinterpret_cast<const float2*>(shared.scales[stage] + column);
    int2 begins = {};
    if constexpr (kKeys && kMasked) begins = *reinterpret_cast<const int2*>(shared.begins[stage] + column);
    float w[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int u = e / 2, c = column_of(nn, e);
      const float x = s[nn][e];
      float d = e % 2 == 0 ? pair.x : pair.y;
      if constexpr (kExponential)
        d = fast_exp2(fmaf(x, scale, d + row[u]));
      else if constexpr (kDiagonal)
        d = (e % 2 == 0 ? scales.x : scales.y) * fast_exp2(fminf(kKeys ? d - row[u] : row[u] - d, 0.0f));
      else
        d *= row[u];
      bool masked = false;
      if constexpr (kMasked)
        masked = kKeys ? row0 + lane_row + u * 8 < (e % 2 == 0 ? begins.x : begins.y)
                       : tile0 + lane_column + c < shared.bounds[0][lane_row + u * 8];
      if constexpr (kDiagonal) {
        const int apart = c - (lane_row + u * 8 - lane_column);  // the column less the row
        masked |= kKeys ? apart < 0 : apart > 0;
      }
      if constexpr (kMasked) d = masked ? 0.0f : d;
      const float slope = kScore == Score::squared ? x * d : d;
      w[e] = kExponential ? d : x * slope;
      s[nn][e] = slope;
    }
    if constexpr (kKeys) {
      p[nn / 2][nn % 2 * 2] = pack(w[0], w[1]);
      p[nn / 2][nn % 2 * 2 + 1] = pack(w[2], w[3]);
    }
  }
}

// One warpgroup's part of a piece of work.
template <Score kScore, int kDim, bool kKeys, int kGroup>
struct Computation {
  using L = Layout<kDim, kKeys>;
  static constexpr bool kExponential = kScore == Score::exponential;
  static constexpr int kFirstColumn = kKeys || kGroup == 0 ? 0 : 128;
  static constexpr int kColumns = kKeys ? kDim : kGroup == 0 ? 128 : kDim - 128;  // of its accumulator
  L& shared;
  const Parallel& m;
  int turns = 0;  // how often slopes were handed over
  Pipe<L::kStages> pipe = {};

  __device__ int thread() const { return static_cast<int>(threadIdx.x) % 128; }

  // The tile's rows of the second product: those that weights, or coefficients, are multiplied with.
  __device__ const unsigned char* tile_rows() const {
    const auto& rows = kKeys && kGroup == 0 ? shared.gradients : kKeys ? shared.queries : shared.keys;
    return rows[pipe.stage][kFirstColumn / 64];
  }

  __device__ void add(float (&acc)[kColumns / 8][4], const uint32_t (&p)[kTile / 16][4]) {
    const uint64_t rows = operand_transposed(tile_rows(), 0, kPanelBytes);
    fence_products();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) wgmma<1>(acc, p[step], rows_at(rows, step), 1);
    commit_products();
    wait_for_products<0>();
    settle(acc);
    release(shared.sync.empty[pipe.stage]);
  }

  __device__ void multiply(float (&s)[kTile / 8][4], unsigned char* own, const unsigned char* tile) const {
    fence_products();
    multiply_tiles<kDim / 16>(s, own, tile);
    commit_products();
    wait_for_products<0>();
    settle(s);
  }

  // Scores, their weights and slopes.
  __device__ void first(float (&acc)[kColumns / 8][4], int tile0, int row0, bool documents, float scale) {
    const int stage = pipe.stage;
    float s[kTile / 8][4];
    uint32_t p[kTile / 16][4];
    multiply(s, shared.own_qk[0], shared.queries[stage][0]);
    with_place(tile0 == row0, documents, false, [&](auto place) {
      weigh<kScore, kKeys, decltype(place)::value>(s, p, shared, stage, tile0, row0, scale);
    });
    if (turns > 0) shared.taken.wait(turns - 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) shared.slopes[i][thread()] = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
    release(shared.given);
    if constexpr (!kKeys) {
      shared.made.wait(turns);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 c = shared.coefficients[i][thread()];
        p[i][0] = c.x;
        p[i][1] = c.y;
        p[i][2] = c.z;
        p[i][3] = c.w;
      }
    }
    ++turns;
    add(acc, p);
  }

  // Coefficients of the first warpgroup's slopes.
  __device__ void second(float (&acc)[kColumns / 8][4], float (&decay_sum)[2]) {
    const int stage = pipe.stage, lane_row = thread() / 32 * 16 + thread() % 32 / 4;
    float dp[kTile / 8][4];
    uint32_t c[kTile / 16][4];
    multiply(dp, shared.own_v[0], shared.gradients[stage][0]);
    shared.given.wait(turns);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 slope = shared.slopes[i][thread()];
      float2 deltas[2];  // of the lane's rows
      if constexpr (kKeys) {
        deltas[0] = deltas[1] = *reinterpret_cast<const float2*>(shared.deltas[stage] + thread() % 4 * 2 + i * 8);
      } else {
#pragma unroll
        for (int u = 0; u < 2; ++u) deltas[u].x = deltas[u].y = shared.own_deltas[0][lane_row + u * 8];
      }
      const float x[4] = {slope.x * (dp[i][0] - deltas[0].x), slope.y * (dp[i][1] - deltas[0].y),
                          slope.z * (dp[i][2] - deltas[1].x), slope.w * (dp[i][3] - deltas[1].y)};
      if constexpr (kKeys && kExponential) {
        decay_sum[0] += x[0] + x[1];
        decay_sum[1] += x[2] + x[3];
      }
      c[i / 2][i % 2 * 2] = pack(x[0], x[1]);
      c[i / 2][i % 2 * 2 + 1] = pack(x[2], x[3]);
    }
    release(shared.taken);
    if constexpr (!kKeys) {
      // Read by the first warpgroup before it gives the slopes of the next turn.
#pragma unroll
      for (int i = 0; i < 4; ++i) shared.coefficients[i][thread()] = make_uint4(c[i][0], c[i][1], c[i][2], c[i][3]);
      release(shared.made);
    }
    ++turns;
    add(acc, c);
  }

  __device__ void finish(const float (&acc)[kColumns / 8][4], const float (&decay_sum)[2], const Work& work) {
    const int lane = thread() % 32, lane_row = thread() / 32 * 16 + lane / 4;
    const int64_t head_row = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length;
    constexpr float kDegree = kScore == Score::squared ? 2 : 1;
    const float last = kKeys && kGroup == 0 ? 1.0f : last_factor<kScore>(m.scale);
    double* const decay = kKeys ? m.key_decay : m.row_decay;
    const auto* const rows =
        decay && !(kKeys && kGroup == 0)
            ? reinterpret_cast<const unsigned char(*)[kColumns / 64][kPanelBytes]>(shared.own_qk[kFirstColumn / 64])
            : nullptr;
    // x·dx. Of queries the second warpgroup goes on where the first ends, in the order of a key's sum, so that the two
    // cancel for a token that sees nothing but itself.
    float products[2] = {};
    if constexpr (!kKeys && kGroup == 1) {
      if (decay) {
        shared.given.wait(turns);
#pragma unroll
        for (int u = 0; u < 2; ++u) products[u] = shared.products[u][thread()];
      }
    }
    const Heads<bf16>& to = !kKeys ? m.dq : kGroup == 0 ? m.dv : m.dk;
    const int dim = (kKeys && kGroup == 0 ? m.v_dim : m.qk_dim) - kFirstColumn;
    const auto row_of = [&](int u) {
      return to.row(work.batch, work.row0 + lane_row + u * 8, work.head) + kFirstColumn;
    };
    const auto is_there = [&](int u) { return work.row0 + lane_row + u * 8 < work.end; };
    uint32_t before[2][kColumns / 8] = {};
    double decay_before[2] = {};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (!m.add || !is_there(u)) continue;
      load_row<kColumns>(before[u], row_of(u), dim);
      if (rows && (kKeys || kGroup == 1)) decay_before[u] = decay[head_row + work.row0 + lane_row + u * 8];
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (!is_there(u)) continue;
      const int own = lane_row + u * 8;
      const float factor = kKeys || kExponential ? last : last * shared.factors[0][own];
      products[u] = finish_row<kColumns>(acc, u, factor, before[u], row_of(u), rows, own, dim, products[u]);
    }
    if (!decay || (kKeys && kGroup == 0)) return;
    if constexpr (!kKeys && kGroup == 0) {
      if (turns > 0) shared.taken.wait(turns - 1);
#pragma unroll
      for (int u = 0; u < 2; ++u) shared.products[u][thread()] = products[u];
      release(shared.given);
    } else {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int token = work.row0 + lane_row + u * 8;
        const float product = quad_sum(kKeys && kExponential ? decay_sum[u] : products[u] / kDegree);
        if (token < work.end && lane % 4 == 0)
          decay[head_row + token] = static_cast<double>(kKeys ? -product : product) + decay_before[u];
      }
      if constexpr (!kKeys) {
        release(shared.taken);
        release(shared.made);
      }
    }
    // The first warpgroup does not wait for this turn of `made`: its next turn is that of another piece of work, which
    // comes when all have finished this one.
    static_assert(L::kSlots == 1);
    if constexpr (!kKeys) ++turns;
  }

  __device__ void run() {
    const float scale = score_scale<kScore>(m.scale);
    const int lane = thread() % 32, lane_row = thread() / 32 * 16 + lane / 4;
    for (Pipe<L::kSlots> slots;; slots.next()) {
      shared.sync.ready[0].wait(slots.phase);
      const Work work = shared.sync.work[0];
      if (work.head < 0) return;
      if (work.has_rows()) {
        float acc[kColumns / 8][4], decay_sum[2] = {};
        clear(acc);
        const int own_tile = work.row0 / kTile;
        // Of keys the document that ends first, of queries that which starts last.
        const int bound = shared.bounds[0][kKeys ? 0 : kTile - 1];
        const int count = (kKeys ? work.tile - own_tile : own_tile - work.tile) + 1;
        for (int i = 0; i < count; ++i, pipe.next()) {
          const int tile0 = (kKeys ? work.tile - i : work.tile + i) * kTile;
          shared.sync.full[pipe.stage].wait(pipe.phase);
          // Sums so far are relative to A of the first query.
          if (!kKeys && !kExponential && m.decay && tile0 == work.row0)
            scale_rows(acc, fast_exp2(shared.own[0][lane_row]), fast_exp2(shared.own[0][lane_row + 8]));
          if constexpr (kGroup == 0)
            first(acc, tile0, work.row0, kKeys ? tile0 + kTile > bound : tile0 < bound, scale);
          else
            second(acc, decay_sum);
        }
        finish(acc, decay_sum, work);
      }
      release(shared.sync.unused[0]);
    }
  }
};

#endif

template <Score kScore, int kDim, bool kKeys>
__global__ void __launch_bounds__(Layout<kDim, kKeys>::kThreads, 1)
    wide_kernel(const __grid_constant__ Maps maps, const Parallel m, const Queue queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kDim, kKeys>;
  constexpr bool kExponential = kScore == Score::exponential;
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0)
    for (Barrier* barrier : {&shared.given, &shared.taken, &shared.made}) barrier->init(4);
  init_barriers(shared);
  if (warp >= 4 * L::kGroups) {
    decrease_registers<L::kCopyRegisters>();
    Pipe<L::kStages> pipe;
    if (warp == 4 * L::kGroups)
      hand_out<!kKeys, false>(
          shared, m, queue, 2 * L::kPanels * kPanelBytes,
          [&](const Work& work, int slot) {
            const CUtensorMap &qk = kKeys ? maps.k : maps.q, &v = kKeys ? maps.v : maps.g;
            const int qk_head = work.head / (kKeys ? m.k.group : m.q.group),
                      v_head = kKeys ? work.head / m.v.group : work.head;
            for (int panel = 0; panel < L::kPanels; ++panel) {
              copy_tile(shared.own_qk[panel], qk, shared.sync.ready[slot], panel * 64, work.row0, qk_head, work.batch);
              copy_tile(shared.own_v[panel], v, shared.sync.ready[slot], panel * 64, work.row0, v_head, work.batch);
            }
          },
          [&](const Work& work, int, auto&& first_is) {
            if constexpr (kKeys)
              copy_queries<kScore>(shared, pipe, maps.q, maps.g, m, work, first_is);
            else
              copy_keys<kScore>(shared, pipe, maps.k, maps.v, m, work, first_is);
          });
    if (warp == 4 * L::kGroups + 1)
      fill_rows(shared, [&](const Work& work, int slot, int i, int row) {
        const double* const a = m.decay_of(work.batch, work.head);
        shared.own[slot][i] = a ? static_cast<float>(a[row] - a[kKeys ? work.end - 1 : work.row0]) * kLog2e : 0.0f;
        if constexpr (kKeys) {
          shared.bounds[slot][i] = m.ends ? m.ends[work.batch * m.length + row] : INT_MAX;
        } else {
          const int64_t place = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length + row;
          shared.bounds[slot][i] = m.starts ? m.starts[work.batch * m.length + row] : 0;
          shared.own_deltas[slot][i] = m.delta[place];
          shared.factors[slot][i] = kExponential ? m.log_sum[place] : m.inverse ? m.inverse[place] : 1.0f;
        }
      });
    return;
  }
  increase_registers<L::kRegisters>();
  if (warp < 4)
    Computation<kScore, kDim, kKeys, 0>{shared, m}.run();
  else
    Computation<kScore, kDim, kKeys, 1>{shared, m}.run();
#endif
}

template <Score kScore, int kDim, bool kKeys>
void launch(const MixerCall& call, const Parallel& m, const Tensor& gradient) {
  const Maps maps{tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v), tile_map(gradient)};
  launch_queue<Layout<kDim, kKeys>>(wide_kernel<kScore, kDim, kKeys>, "mixer_backward", call, maps, m);
}

}  // namespace

void hopper_wide_backward(const MixerCall& call, const Parallel& m, const Tensor& gradient) {
  with_score_and_dim(call, [&](auto score, auto dim) {
    if constexpr (dim() > 128) {
      launch<decltype(score)::value, dim(), true>(call, m, gradient);
      launch<decltype(score)::value, dim(), false>(call, m, gradient);
    }
  });
}

}  // namespace furious::cuda
