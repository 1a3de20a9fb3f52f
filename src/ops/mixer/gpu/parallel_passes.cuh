// The parallel form on tensor cores, any score and any dimensions of a head: four passes of one kernel.
//
//   out_i = Σ_j w_ij v_j (/ n_i)     dv_j = Σ_i w_ij g'_i     dq_i = Σ_j c_ij k_j     dk_j = Σ_i c_ij q_i
//   c_ij = ∂w_ij/∂(q_i·k_j)·(g'_i·v_j − δ'_i)
//
// with g' = g/n and δ' = δ/n (exponential: g and δ, and w holds 1/n). A block owns some rows of one head, queries or
// keys, and walks over tiles of the other side, from the farthest to the diagonal (parallel-inl.cuh says how decay is
// weighed on that path). Each side has two operands: the one that scores contract, queries or keys, and the other one,
// gradients or values. For each tile a pass copies, computes scores, weighs them and multiplies with the weights; at
// the end it writes its rows. Scores are computed in every pass, and nothing is added up across blocks: the same bits
// on every run.
//
// The operand that is accumulated is padded to kWidth columns, which registers hold; products over the other one count
// their steps at run time.
#pragma once

#include "gpu/device.h"
#include "ops/mixer/gpu/parallel-inl.cuh"

namespace furious::cuda {

// `polynomial` holds powers and series, and every polynomial with a decay that may grow.
enum class Kind : uint8_t { linear, squared, polynomial, exponential };

// kSmall: for devices whose shared memory holds no other layout. It has fewer rows, and a single stage: a tile is
// copied while nothing is computed.
template <Target kTarget, int kWidth, bool kSmall>
struct PassLayout {
  static constexpr bool kQueries = kTarget == Target::out || kTarget == Target::dq;  // what the block owns
  static constexpr bool kGradient = kTarget == Target::dq || kTarget == Target::dk;
  static constexpr int kM = kWidth <= 128 ? 2 : 1;  // of 16 rows, per warp: as many as registers hold
  static constexpr int kWarps = kWidth <= 192 || kSmall ? 4 : 8;
  static constexpr int kStages = kSmall ? 1 : 2;  // of tiles
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kWidth <= 32 ? 3 : kWidth <= 192 ? 2 : 1;  // at a time on a multiprocessor
  static constexpr int kWarpRows = 16 * kM;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kTile = kWidth <= (kGradient ? 96 : 128) ? 64 : 32;
  // Columns of a tile that scores are held for at a time.
  static constexpr int kGroup = !kGradient && kWidth <= 96 ? kTile : 32;

  // What weighs the columns of a tile.
  struct alignas(16) Columns {
    float factor[kTile];  // without exponentials; else a part of the exponent
    float local[kTile];   // A less the reference of the block
    float delta[kTile];
    int begin[kTile];  // where documents of queries start
    float step;        // from the reference of the tile before
  };

  static int bytes(int other) {
    const int both = kWidth + stride_of(other);
    const int own = kGradient ? both : stride_of(other);
    return (kRows * own + kStages * kTile * both) * 2 + kStages * static_cast<int>(sizeof(Columns));
  }
  __host__ __device__ static int stride_of(int dim) { return (dim + 31) / 32 * 32; }
};

template <Target kTarget, Kind kKind, int kWidth, bool kSmall>
struct Walk {
  using L = PassLayout<kTarget, kWidth, kSmall>;
  using Columns = typename L::Columns;
  static constexpr bool kQueries = L::kQueries, kGradient = L::kGradient;
  static constexpr bool kExponential = kKind == Kind::exponential;
  // Where x·f'(x) is no multiple of f(x), the gradient of the decay is summed pair by pair.
  static constexpr bool kPairSums = kGradient && (kExponential || kKind == Kind::polynomial);
  static constexpr int kM = L::kM, kN = L::kGroup / 8, kTile = L::kTile;
  using Scores = float[kM][kN][4];

  const Parallel& m;  // a parameter of the kernel: what is not needed in registers stays there
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const double* const a;
  const int* const starts;
  const int64_t head_row;
  const int length, qk_steps, v_steps;
  const __nv_bfloat16 *qk_from, *v_from;  // where the thread's part of the walked side begins
  StridedTile own_qk, own_v;
  __nv_bfloat16* stages;
  Columns* columns;
  int row0, w0, w_last;  // the first row of the block, and the first and last of the warp
  double reference;
  float scale;
  int far_tile, near_tile, latest_start;

  float acc[kM][kWidth / 8][4] = {};
  float own[kM][2];    // A of a row less the reference
  float shift[kM][2];  // of an exponential: the part of the exponent that a row adds
  float n[kM][2] = {}, largest[kM][2];
  float delta[kM][2], decay_sum[kM][2] = {};
  int start[kM][2];
  float previous = 0;  // A at the reference of the tile before, less that of the block
  bool true_sums = false;

  __device__ Walk(const Parallel& call, unsigned char* memory)
      : m(call),
        a(call.decay_of(blockIdx.z, blockIdx.y)),
        starts(call.starts ? call.starts + blockIdx.z * call.length : nullptr),
        head_row((blockIdx.z * call.heads + blockIdx.y) * call.length),
        length(static_cast<int>(call.length)),
        qk_steps((call.qk_dim + 15) / 16),
        v_steps((call.v_dim + 15) / 16) {
    own_qk = {reinterpret_cast<__nv_bfloat16*>(memory), qk_stride()};
    own_v = {own_qk.data + L::kRows * qk_stride(), v_stride()};
    stages = kGradient ? own_v.data + L::kRows * v_stride() : own_v.data;
    columns = reinterpret_cast<Columns*>(stages + L::kStages * kTile * (qk_stride() + v_stride()));
    qk_from = thread_part<kQkLanes>(kQueries ? m.k : m.q, 0);
    v_from = thread_part<kVLanes>(kQueries ? m.v : m.g, 0);
    // The longest work first: the last queries, the first keys.
    const int block = static_cast<int>(kQueries ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    row0 = m.first + block * L::kRows;
    w0 = row0 + static_cast<int>(threadIdx.x) / 32 * L::kWarpRows;
    w_last = w0 + L::kWarpRows - 1;
    scale = kKind == Kind::linear        ? m.scale
            : kKind == Kind::squared     ? m.scale * m.scale
            : kKind == Kind::exponential ? m.scale * kLog2e
                                         : 1.0f;
  }

  // Of the operand that is accumulated the compiler knows the stride.
  static constexpr int kQkLanes = kGradient ? StridedTile::lanes_of(kWidth) : 4;
  static constexpr int kVLanes = kGradient ? 4 : StridedTile::lanes_of(kWidth);
  template <int kLanes>
  __device__ const __nv_bfloat16* thread_part(const Heads<__nv_bfloat16>& x, int token) const {
    const int thread = static_cast<int>(threadIdx.x);
    return x.row(b, token + thread / kLanes, h) + thread % kLanes * 8;
  }
  // The strides of tiles of queries and keys, and of values and gradients.
  __device__ int qk_stride() const { return kGradient ? kWidth : L::stride_of(m.qk_dim); }
  __device__ int v_stride() const { return kGradient ? L::stride_of(m.v_dim) : kWidth; }
  __device__ StridedTile walked_qk(int stage) const {
    return {stages + stage * kTile * (qk_stride() + v_stride()), qk_stride()};
  }
  __device__ StridedTile walked_v(int stage) const {
    return {stages + stage * kTile * (qk_stride() + v_stride()) + kTile * qk_stride(), v_stride()};
  }
  // The token of row mt, u of the lane, and whether the pair of a row and a token of the tile is no pair.
  __device__ int token_of(int mt, int u) const { return w0 + mt * 16 + u * 8 + lane / 4; }
  __device__ bool hidden(int mt, int u, int other, const Columns& column, int c) const {
    const int token = token_of(mt, u);
    return kQueries ? other > token || other < start[mt][u] : token > other || token < column.begin[c];
  }
  // A_i − A_j.
  __device__ float difference(int mt, int u, float place) const {
    return kQueries ? own[mt][u] - place : place - own[mt][u];
  }

  // Tiles from the farthest that decay and documents leave to the one on the diagonal.
  __device__ void find_tiles() {
    const int last_row = min(row0 + L::kRows, length) - 1;
    if constexpr (kQueries) {
      reference = a ? a[row0] : 0.0;
      far_tile = (starts ? starts[row0] : 0) / kTile;
      if (a && !m.may_grow)
        far_tile += count_erased<L::kThreads>(row0 / kTile - far_tile, [&](int i) {
          return static_cast<float>(reference - a[(far_tile + i) * kTile + kTile - 1]) < static_cast<float>(kErased);
        });
      near_tile = last_row / kTile;
    } else {
      reference = a ? a[last_row] : 0.0;
      far_tile = (m.ends ? m.ends[b * m.length + last_row] - 1 : length - 1) / kTile;
      if (a && !m.may_grow)
        far_tile -= count_erased<L::kThreads>(far_tile - last_row / kTile, [&](int i) {
          return static_cast<float>(a[(far_tile - i) * kTile] - reference) < static_cast<float>(kErased);
        });
      near_tile = row0 / kTile;
    }
  }

  __device__ void load_own() {
    const Heads<__nv_bfloat16>&qk = kQueries ? m.q : m.k, &v = kQueries ? m.g : m.v;
    own_qk.template load<L::kThreads, L::kRows, kQkLanes>(thread_part<kQkLanes>(qk, row0 - m.first), qk.token,
                                                          length - row0, m.qk_dim);
    if constexpr (kGradient)
      own_v.template load<L::kThreads, L::kRows, kVLanes>(thread_part<kVLanes>(v, row0 - m.first), v.token,
                                                          length - row0, m.v_dim);
#pragma unroll
    for (int mt = 0; mt < kM; ++mt)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int token = min(token_of(mt, u), length - 1);
        own[mt][u] = a ? static_cast<float>(a[token] - reference) : 0.0f;
        shift[mt][u] = own[mt][u] * kLog2e;
        if (kQueries && kGradient && m.log_sum) shift[mt][u] -= m.log_sum[head_row + token];
        delta[mt][u] = kTarget == Target::dq ? m.delta[head_row + token] : 0.0f;
        start[mt][u] = kQueries && starts ? starts[token] : 0;
        largest[mt][u] = -INFINITY;
      }
    latest_start = kQueries && starts ? starts[min(w_last, length - 1)] : 0;
  }

  __device__ void copy_tile(int tile, int stage) const {
    const int tile0 = tile * kTile, rows = length - tile0;
    const int64_t qk_step = kQueries ? m.k.token : m.q.token, v_step = kQueries ? m.v.token : m.g.token;
    walked_qk(stage).template load<L::kThreads, kTile, kQkLanes>(qk_from + tile0 * qk_step, qk_step, rows, m.qk_dim);
    walked_v(stage).template load<L::kThreads, kTile, kVLanes>(v_from + tile0 * v_step, v_step, rows, m.v_dim);
    commit_copies();
  }

  // What a thread reads of a tile's tokens, for one column or (the thread after those) for `step`. It is requested
  // before the tile ahead is walked and used after it, so that nobody waits for memory.
  struct ColumnInput {
    double here, edge;  // A of the column, and of the tile's reference; or those that `step` is between
    float delta, log_sum;
    int begin;
  };
  __device__ ColumnInput read_column(int tile) const {
    const int tile0 = tile * kTile, i = static_cast<int>(threadIdx.x);
    ColumnInput in = {};
    if (i > kTile) return in;
    const int token = min(tile0 + i, length - 1), last = min(tile0 + kTile, length) - 1;
    if (a && i < kTile) {
      in.here = load_early(a + token);
      if (!kExponential) in.edge = load_early(a + (kQueries ? last : tile0));
    } else if (a && !kExponential && tile != far_tile) {
      in.here = load_early(a + (kQueries ? last : tile0 + kTile));
      in.edge = load_early(a + (kQueries ? tile0 - 1 : tile0));
    }
    if (kQueries || i == kTile) return in;
    if (kExponential && m.log_sum) in.log_sum = load_early(m.log_sum + head_row + token);
    if (kGradient) in.delta = load_early(m.delta + head_row + token);
    in.begin = tile0 + i >= length ? length : starts ? starts[token] : 0;  // behind the last query: sees no key
    return in;
  }
  __device__ void write_column(const ColumnInput& in, int stage) const {
    Columns& column = columns[stage];
    const int i = static_cast<int>(threadIdx.x);
    if (i == kTile) column.step = __expf(static_cast<float>(in.here - in.edge));
    if (i >= kTile) return;
    const float local = a ? static_cast<float>(in.here - reference) : 0.0f;
    column.local[i] = local;
    if constexpr (kExponential)
      column.factor[i] = kQueries ? -local * kLog2e : local * kLog2e - in.log_sum;
    else
      column.factor[i] = scale * __expf(static_cast<float>(kQueries ? in.edge - in.here : in.here - in.edge));
    if (kTarget == Target::dk) column.delta[i] = in.delta;
    if (!kQueries) column.begin[i] = in.begin;
  }

  // s = products of the warp's rows of `rows` with the group of the tile that begins at `first`.
  __device__ void scores(Scores& s, const StridedTile& rows, const StridedTile& tile, int first, int steps) const {
#pragma unroll
    for (int mt = 0; mt < kM; ++mt)
#pragma unroll
      for (int nn = 0; nn < kN; ++nn)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[mt][nn][e] = 0;
    add_products(s, rows, w0 - row0, tile, first, steps);
  }

  // Sums so far become relative to the reference of the tile, or true ones on the diagonal.
  __device__ void move_reference(const Columns& column, bool is_far, bool diagonal) {
    if (kExponential || !a || m.may_grow) return;
    const float upto = previous;
    previous = column.local[kQueries ? kTile - 1 : 0];
    if (is_far || true_sums) {
      true_sums |= diagonal;
      return;
    }
    true_sums = diagonal;
#pragma unroll
    for (int mt = 0; mt < kM; ++mt) {
      float factor[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        factor[u] = diagonal ? __expf(difference(mt, u, upto)) : column.step;
        n[mt][u] *= factor[u];
        decay_sum[mt][u] *= factor[u];
      }
      scale_rows(acc[mt], factor[0], factor[1]);
    }
  }

  __device__ float value(float x) const {
    return kKind == Kind::squared ? x * x : kKind == Kind::linear ? x : m.f.polynomial(x);
  }
  __device__ float slope(float x) const {
    return kKind == Kind::squared ? 2 * x : kKind == Kind::linear ? 1.0f : m.f.derivative(x);
  }

  // Calls f(nn, c) for the scores [·][nn] of a group, whose elements are columns c and c + 1 of the tile.
  template <class F>
  __device__ void for_columns(int first, F&& f) const {
#pragma unroll
    for (int nn = 0; nn < kN; ++nn) f(nn, first + nn * 8 + lane % 4 * 2);
  }
  // Calls f(mt, u, e, i) for the elements e of scores [mt][nn], row u of the lane and column i of the two.
  template <class F>
  static __device__ void for_elements(F&& f) {
#pragma unroll
    for (int mt = 0; mt < kM; ++mt)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(mt, e / 2, e, e % 2);
  }
  struct Two {
    float at[2];
  };
  static __device__ Two two(const float* column, int c) {
    const float2 x = *reinterpret_cast<const float2*>(column + c);
    return {{x.x, x.y}};
  }

  // Polynomials: s becomes the weights, or the coefficients c_ij. kMasked: some pairs are none, or (`exact`) their
  // decay is an exponential for each.
  template <bool kMasked>
  __device__ void weigh(Scores& s, const Scores& dw, const Columns& column, int tile0, int first, bool exact) {
    for_columns(first, [&](int nn, int c) {
      const Two factor = two(column.factor, c), local = kMasked ? two(column.local, c) : Two();
      const Two shifts = kTarget == Target::dk ? two(column.delta, c) : Two();
      for_elements([&](int mt, int u, int e, int i) {
        const float x = s[mt][nn][e];
        float d = factor.at[i];
        bool none = false, saturated = false;
        if constexpr (kMasked) {
          if (exact) {
            const float apart = difference(mt, u, local.at[i]);
            d = scale * fast_exp2(fminf(apart, m.f.largest_decay) * kLog2e);
            saturated = apart >= m.f.saturated;
          }
          none = hidden(mt, u, tile0 + c + i, column, c + i);
        }
        float w = kGradient ? slope(x) * d : value(x) * d;
        if constexpr (kGradient) {
          const float g = dw[mt][nn][e] - (kQueries ? delta[mt][u] : shifts.at[i]);
          if (kPairSums) decay_sum[mt][u] += none || saturated ? 0.0f : value(x) * d * g;
          w *= g;
        }
        if (kMasked && none) w = 0.0f;
        if (kTarget == Target::out) n[mt][u] += w;
        s[mt][nn][e] = w;
      });
    });
  }

  // The exponent (base 2) of a pair's weight; forward without what a row adds to all of its pairs. kAny: it may
  // saturate.
  template <bool kAny>
  __device__ float exponent(float x, int mt, int u, float factor, float local) const {
    const float rest = kTarget == Target::out ? 0.0f : kQueries ? shift[mt][u] : -shift[mt][u];
    if constexpr (!kAny) return fmaf(x, scale, factor + rest);
    const float apart = difference(mt, u, local);
    const float log_sum = kTarget == Target::out ? 0.0f : apart * kLog2e - (factor + rest);
    return fminf(x * scale, m.f.largest_score * kLog2e) + fminf(apart, m.f.largest_decay) * kLog2e - log_sum;
  }

  // Exponentials, forward: relative to the largest exponent of the row so far, under the sum norm.
  template <bool kMasked, bool kAny>
  __device__ void exponentiate(Scores& s, const Columns& column, int tile0, int first) {
    float top[kM][2];
#pragma unroll
    for (int mt = 0; mt < kM; ++mt) top[mt][0] = top[mt][1] = -INFINITY;
    for_columns(first, [&](int nn, int c) {
      const Two factor = two(column.factor, c), local = kAny ? two(column.local, c) : Two();
      for_elements([&](int mt, int u, int e, int i) {
        float x = exponent<kAny>(s[mt][nn][e], mt, u, factor.at[i], local.at[i]);
        if (kMasked && hidden(mt, u, tile0 + c + i, column, c + i)) x = -INFINITY;
        s[mt][nn][e] = x;
        top[mt][u] = fmaxf(top[mt][u], x);
      });
    });
    float base[kM][2] = {};
    if (!kAny || m.sum_norm) {
#pragma unroll
      for (int mt = 0; mt < kM; ++mt) {
        float shrink[2];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const float now = fmaxf(largest[mt][u], quad_max(top[mt][u]));
          base[mt][u] = now == -INFINITY ? 0.0f : now;
          shrink[u] = fast_exp2(largest[mt][u] - base[mt][u]);
          largest[mt][u] = now;
          n[mt][u] *= shrink[u];
        }
        scale_rows(acc[mt], shrink[0], shrink[1]);
      }
    }
    for_columns(first, [&](int nn, int) {
      for_elements([&](int mt, int u, int e, int) {
        s[mt][nn][e] = fast_exp2(s[mt][nn][e] - base[mt][u]);
        n[mt][u] += s[mt][nn][e];
      });
    });
  }

  // Exponentials, backward.
  template <bool kMasked, bool kAny>
  __device__ void weigh_exponential(Scores& s, const Scores& dw, const Columns& column, int tile0, int first) {
    for_columns(first, [&](int nn, int c) {
      const Two factor = two(column.factor, c), local = kAny ? two(column.local, c) : Two();
      const Two shifts = kTarget == Target::dk ? two(column.delta, c) : Two();
      for_elements([&](int mt, int u, int e, int i) {
        const float x = s[mt][nn][e];
        float w = fast_exp2(exponent<kAny>(x, mt, u, factor.at[i], local.at[i]));
        if (kMasked && hidden(mt, u, tile0 + c + i, column, c + i)) w = 0.0f;
        if constexpr (kGradient) {
          const float g = w * (dw[mt][nn][e] - (kQueries ? delta[mt][u] : shifts.at[i]));
          // Under the sum norm the decays of a query's pairs cancel, unless some saturate.
          if (kAny || !kQueries) decay_sum[mt][u] += kAny && difference(mt, u, local.at[i]) >= m.f.saturated ? 0.0f : g;
          w = kAny && x * scale >= m.f.largest_score * kLog2e ? 0.0f : g * m.scale;
        }
        s[mt][nn][e] = w;
      });
    });
  }

  template <bool kMasked, bool kAny>
  __device__ void weigh_as(Scores& s, const Scores& dw, const Columns& column, int tile0, int first, bool diagonal) {
    if constexpr (!kExponential)
      weigh<kMasked>(s, dw, column, tile0, first, diagonal || m.may_grow);
    else if constexpr (kTarget == Target::out)
      exponentiate<kMasked, kAny>(s, column, tile0, first);
    else
      weigh_exponential<kMasked, kAny>(s, dw, column, tile0, first);
  }

  __device__ void walk_tile(int tile, int stage) {
    const int tile0 = tile * kTile;
    if (kQueries ? tile0 > w_last : tile0 + kTile - 1 < w0 || w0 >= length) return;
    const Columns& column = columns[stage];
    const bool diagonal = kQueries ? tile0 + kTile - 1 > w0 : tile0 < w_last;
    const bool masked = diagonal || (kKind == Kind::polynomial && m.may_grow) ||
                        (kQueries ? latest_start > tile0 : column.begin[kTile - 1] > w0);
    move_reference(column, tile == far_tile, diagonal);
    const StridedTile qk = walked_qk(stage), v = walked_v(stage);
#pragma unroll 1
    for (int first = 0; first < kTile; first += L::kGroup) {
      if (kTile > L::kGroup && (kQueries ? tile0 + first > w_last : tile0 + first + L::kGroup - 1 < w0)) continue;
      Scores s, dw;
      scores(s, own_qk, qk, first, qk_steps);
      if constexpr (kGradient) scores(dw, own_v, v, first, v_steps);
      if (kExponential && (m.may_grow || !m.sum_norm))
        weigh_as<true, kExponential>(s, dw, column, tile0, first, diagonal);
      else if (masked)
        weigh_as<true, false>(s, dw, column, tile0, first, diagonal);
      else
        weigh_as<false, false>(s, dw, column, tile0, first, diagonal);
      add_weighted_rows<0, kWidth / 16>(acc, s, kGradient ? qk : v, first);
    }
  }

  __device__ void run() {
    find_tiles();
    load_own();
    copy_tile(far_tile, 0);
    write_column(read_column(far_tile), 0);
    const int count = (kQueries ? near_tile - far_tile : far_tile - near_tile) + 1;
    for (int i = 0; i < count; ++i) {
      wait_for_copies<0>();
      __syncthreads();
      const int tile = kQueries ? far_tile + i : far_tile - i, next = kQueries ? tile + 1 : tile - 1;
      const bool more = i + 1 < count;
      const int stage = i % L::kStages, next_stage = (i + 1) % L::kStages;
      ColumnInput column = {};
      if (more) {
        if (L::kStages > 1) copy_tile(next, next_stage);
        column = read_column(next);
      }
      walk_tile(tile, stage);
      if (more && L::kStages == 1) {
        __syncthreads();
        copy_tile(next, next_stage);
      }
      if (more) write_column(column, next_stage);
    }
#pragma unroll
    for (int mt = 0; mt < kM; ++mt)
#pragma unroll
      for (int u = 0; u < 2; ++u) finish(mt, u);
  }

  // Writes row u of block mt: by the four lanes that hold it.
  __device__ void finish(int mt, int u) {
    const int token = token_of(mt, u);
    const bool valid = token < length;
    float factor = 1;
    if constexpr (kTarget == Target::out) {
      float sum = quad_sum(n[mt][u]);
      if (!valid) return;
      if (m.state_part) sum += add_state_part(mt, u, token);
      if (m.sum_norm) factor = fabsf(sum) < kSmallestNormalizer ? 0.0f : 1 / sum;
      if (lane % 4 == 0 && m.normalizer) m.normalizer[m.place_of(b, h, token)] = sum;
      if (lane % 4 == 0 && m.maximum)
        m.maximum[m.place_of(b, h, token)] = largest[mt][u] / kLog2e + (m.may_grow ? 0.0f : own[mt][u]);
    } else if constexpr (kGradient) {
      double* const to = kQueries ? m.row_decay : m.key_decay;
      if (to) {
        const float sum = quad_sum(kPairSums ? decay_sum[mt][u] : decay_of_row(mt, u));
        if (valid && lane % 4 == 0) to[head_row + token] = kQueries ? sum : -sum;
      }
      if (!valid) return;
    } else if (!valid) {
      return;
    }
    const Heads<__nv_bfloat16>& out = kTarget == Target::out  ? m.out
                                      : kTarget == Target::dq ? m.dq
                                      : kTarget == Target::dk ? m.dk
                                                              : m.dv;
    __nv_bfloat16* const to = out.row(b, token - m.first, h);
    const int columns_there = kGradient ? m.qk_dim : m.v_dim;
    const bool pairs = columns_there % 2 == 0 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
#pragma unroll
    for (int d = 0; d < kWidth / 8; ++d) {
      const int c = d * 8 + lane % 4 * 2;
      const float x = acc[mt][d][2 * u] * factor, y = acc[mt][d][2 * u + 1] * factor;
      if (pairs && c < columns_there) *reinterpret_cast<uint32_t*>(to + c) = pack(x, y);
      if (!pairs && c < columns_there) to[c] = from_float<__nv_bfloat16>(x);
      if (!pairs && c + 1 < columns_there) to[c + 1] = from_float<__nv_bfloat16>(y);
    }
  }

  // Returns the part of the normalizer.
  __device__ float add_state_part(int mt, int u, int token) {
    const float* const part = m.state_part + (head_row + token) * past_columns(m.v_dim, m.sum_norm);
#pragma unroll
    for (int d = 0; d < kWidth / 8; ++d)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = d * 8 + lane % 4 * 2 + i;
        if (c < m.v_dim) acc[mt][d][2 * u + i] += part[c];
      }
    return m.sum_norm ? part[m.v_dim] : 0.0f;
  }

  // The lane's part of Σ w·dw of a row, which is x·dx over the degree of the score.
  __device__ float decay_of_row(int mt, int u) const {
    float product = 0;
#pragma unroll
    for (int d = 0; d < kWidth / 8; ++d) {
      const int row = w0 - row0 + mt * 16 + u * 8;
      const float2 x = unpack(*reinterpret_cast<const uint32_t*>(own_qk.at(row, lane / 4, d) + lane % 4 * 2));
      product += x.x * acc[mt][d][2 * u] + x.y * acc[mt][d][2 * u + 1];
    }
    return product / (kKind == Kind::squared ? 2 : 1);
  }
};

template <Target kTarget, Kind kKind, int kWidth, bool kSmall>
__global__ void __launch_bounds__(PassLayout<kTarget, kWidth, kSmall>::kThreads,
                                  PassLayout<kTarget, kWidth, kSmall>::kBlocks)
    pass_kernel(const __grid_constant__ Parallel m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kSmall) return;  // memory suffices
#endif
  extern __shared__ __align__(128) unsigned char memory[];
  Walk<kTarget, kKind, kWidth, kSmall>(m, memory).run();
}

// Calls f with the first of these layouts, as constants, that has a call's columns and fits in the shared memory of the
// device: as wide as what is accumulated, or wider, with fewer rows. False if none does.
template <Target kTarget, class F>
bool with_layout(int qk_dim, int v_dim, F&& f) {
  constexpr bool kGradient = kTarget == Target::dq || kTarget == Target::dk;
  const int width = kGradient ? qk_dim : v_dim, other = kGradient ? v_dim : qk_dim, most = most_shared_memory();
  const auto fits = [&]<int kWidth, bool kSmall>() {
    if (width > kWidth || PassLayout<kTarget, kWidth, kSmall>::bytes(other) > most) return false;
    f(std::integral_constant<int, kWidth>(), std::bool_constant<kSmall>());
    return true;
  };
  return fits.template operator()<32, false>() || fits.template operator()<64, false>() ||
         fits.template operator()<96, false>() || fits.template operator()<128, false>() ||
         fits.template operator()<192, false>() || fits.template operator()<256, false>() ||
         fits.template operator()<256, true>();
}

// Calls f with the kind of the score, as a constant.
template <class F>
void with_kind(const MixerSpec& spec, F&& f) {
  if (spec.score == Score::exponential) return f(std::integral_constant<Kind, Kind::exponential>());
  if (spec.degree > 0 || spec.signed_decay) return f(std::integral_constant<Kind, Kind::polynomial>());
  if (spec.score == Score::squared) return f(std::integral_constant<Kind, Kind::squared>());
  return f(std::integral_constant<Kind, Kind::linear>());
}

template <Target kTarget>
void run_pass(const MixerCall& call, const Parallel& m) {
  with_kind(call.spec, [&](auto kind) {
    with_layout<kTarget>(m.qk_dim, m.v_dim, [&](auto width, auto small) {
      using L = PassLayout<kTarget, width(), small()>;
      const auto kernel = pass_kernel<kTarget, kind(), width(), small()>;
      const int bytes = L::bytes(kTarget == Target::dq || kTarget == Target::dk ? m.v_dim : m.qk_dim);
      const dim3 grid(blocks_for(call.shape.queries(), L::kRows), static_cast<unsigned>(call.shape.heads),
                      static_cast<unsigned>(call.shape.batch));
      allow_shared_memory(kernel, bytes);
      kernel<<<grid, L::kThreads, bytes, stream(call.inputs.q.device())>>>(m);
    });
  });
  check_launch("mixer");
}

}  // namespace furious::cuda
