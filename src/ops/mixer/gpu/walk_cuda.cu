// With chunks of 64 tokens, tables of chunk_tables() for them, D_ij = exp(A_i − A_j) for tokens j ≤ i of one document:
//
//   o_i  = s Σ_j D_ij (q_i·k_j) v_j + s in_i Sᵀ q_i          S  ← through · S  + Σ_j out_j k_j v_jᵀ
//   dq_i = s Σ_j D_ij (g_i·v_j) k_j + s in_i S g_i
//   dk_j = s Σ_i D_ij (g_i·v_j) q_i + out_j T v_j            T  ← through · T + s Σ_i in_i q_i g_iᵀ
//   dv_j = s Σ_i D_ij (q_i·k_j) g_i + out_j Tᵀ k_j           (from the last chunk to the first)
//
// s is the scale, sums over j or i are those within the chunk. The gradient of A_t is q_t·dq_t − k_t·dk_t.
//
// Where there are too few heads for the device, a head is divided into segments: their own sums are computed first, and
// then what enters each of them.
//
// A block has four warps. Each computes 16 tokens of a chunk and holds a quarter of the rows of the state, in f32; the
// others read it as bf16 from shared memory. The next chunk is loaded meanwhile. Narrower heads are padded with zeros.
#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "ops/elementwise.h"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/walk.h"

namespace furious::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 64;  // tokens of a chunk
constexpr int kGroups = kRows / 16;
static_assert(kGroups == kWarps);

struct Walk {
  Heads<bf16> q, k, v, g;       // g: the gradient of the result
  Heads<bf16> out, dq, dk, dv;  // what is written
  const double* decay;          // [batch, heads, length]; null without
  const int* starts;            // [batch, length]: the first token of the document in the chunk; null without documents
  const float *in, *out_factors, *through;  // chunk_tables(); null: all 1
  const float* first;                       // f32 [batch, heads, segments, qk_dim, v_dim]: what enters; null: nothing
  float* last;                              // what leaves, likewise; null: not needed
  double *row_decay, *key_decay;            // [batch, heads, length]; null without decay
  int length, chunks, segment_chunks;
  int qk_dim, v_dim;
  float scale;
};

// The tiles of a chunk, and what belongs to its tokens.
template <int kQk, int kV>
struct Stage {
  alignas(16) bf16 q[kRows * kQk];
  alignas(16) bf16 k[kRows * kQk];
  alignas(16) bf16 v[kRows * kV];
  alignas(16) bf16 g[kRows * kV];
};

// log2(e) · A of a token less that of the first one of its chunk, in two parts; and where its document starts there.
struct TokenDecay {
  float high;
  bf16 low;
  uint16_t start;
};

// Two blocks of a head of 128 and 64 fill the memory of a multiprocessor to the last byte.
template <int kQk, int kV>
struct Shared {
  Stage<kQk, kV> stages[2];
  alignas(16) bf16 state[kQk * kV];
  TokenDecay decay[kRows];  // of the chunk at hand, as the factors
  float in[kRows], out[kRows];
};

// What a thread of the first kRows loads for its token of a chunk, and all for the chunk.
struct TokenValues {
  double decay, first_decay;
  float in, out, through;
  int start;
};

// Where a block is.
struct Place {
  int batch, head, heads, segment, segments;
  int64_t row;  // of the tables: (batch, head)

  __device__ Place()
      : batch(static_cast<int>(blockIdx.z)),
        head(static_cast<int>(blockIdx.y)),
        heads(static_cast<int>(gridDim.y)),
        segment(static_cast<int>(blockIdx.x)),
        segments(static_cast<int>(gridDim.x)),
        row(static_cast<int64_t>(batch) * heads + head) {}
  __device__ int first_chunk(const Walk& m) const { return segment * m.segment_chunks; }
  __device__ int end_chunk(const Walk& m) const { return min(m.chunks, (segment + 1) * m.segment_chunks); }
  __device__ int64_t state(const Walk& m) const {
    return (row * segments + segment) * static_cast<int64_t>(m.qk_dim) * m.v_dim;
  }
};

template <int kDim>
__device__ void load_tile(bf16* to, const Heads<bf16>& x, const Place& place, int chunk, int length, int dim) {
  const Tile<kDim> tile{to};
  const bf16* const from = x.row(place.batch, static_cast<int64_t>(chunk) * kRows, place.head);
  const int valid = length - chunk * kRows;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * Tile<kDim>::kVectors; i += kThreads) {
    const int row = i / Tile<kDim>::kVectors, vector = i % Tile<kDim>::kVectors;
    const bool inside = row < valid && vector * 8 < dim;
    copy_async(tile.at(row, vector), inside ? from + row * x.token + vector * 8 : x.data, inside);
  }
}

__device__ TokenValues load_values(const Walk& m, const Place& place, int chunk) {
  TokenValues values{0, 0, 1, 1, 1, 0};
  const int begin = chunk * kRows, token = min(begin + static_cast<int>(threadIdx.x), m.length - 1);
  const int64_t at = place.row * m.length + token;
  if (m.through != nullptr) values.through = m.through[place.row * m.chunks + chunk];
  if (threadIdx.x >= kRows) return values;
  if (m.decay != nullptr) {
    values.decay = m.decay[at];
    values.first_decay = m.decay[place.row * m.length + begin];
  }
  if (m.in != nullptr) {
    values.in = m.in[at];
    values.out = m.out_factors[at];
  }
  if (m.starts != nullptr) values.start = m.starts[static_cast<int64_t>(place.batch) * m.length + token] - begin;
  return values;
}

template <class Memory>
__device__ void keep_values(const TokenValues& values, Memory& memory) {
  if (threadIdx.x >= kRows) return;
  const double x = (values.decay - values.first_decay) * 1.4426950408889634;
  const float high = static_cast<float>(x);
  const auto low = static_cast<float>(x - static_cast<double>(high));
  memory.decay[threadIdx.x] = {high, __float2bfloat16_rn(low), static_cast<uint16_t>(values.start)};
  memory.in[threadIdx.x] = values.in;
  memory.out[threadIdx.x] = values.out;
}

// D_ij, or 0 where token j does not reach token i.
__device__ float pair_weight(const TokenDecay& at_i, const TokenDecay& at_j, int i, int j) {
  const float w = fast_exp2((at_i.high - at_j.high) + (__bfloat162float(at_i.low) - __bfloat162float(at_j.low)));
  return j <= i && j >= at_i.start ? w : 0.0f;
}

// A of a product with the tile transposed: rows of the result are dimensions [16·step, +16), and rows [row, row+16) of
// the tile are summed over.
template <int kDim>
__device__ void a_fragment_transposed(uint32_t (&r)[4], const Tile<kDim>& tile, int row, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  load_matrices_transposed(r, tile.at(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
}

// x [16 of this warp] · yᵀ [16 tokens from `row`], over kDim.
template <int kDim>
__device__ void dot_products(float (&to)[2][4], const Tile<kDim>& x, const Tile<kDim>& y, int own, int row) {
#pragma unroll
  for (int e = 0; e < 4; ++e) to[0][e] = to[1][e] = 0;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4], b[4];
    x.a_fragment(a, own, step);
    y.b_fragment(b, row, step);
    mma(to[0], a, b[0], b[1]);
    mma(to[1], a, b[2], b[3]);
  }
}

// to += weights [16 of this warp, 16 tokens from `row`] · y.
template <int kDim>
__device__ void add_weighted(float (&to)[kDim / 8][4], const float (&weights)[2][4], const Tile<kDim>& y, int row) {
  const uint32_t a[4] = {pack(weights[0][0], weights[0][1]), pack(weights[0][2], weights[0][3]),
                         pack(weights[1][0], weights[1][1]), pack(weights[1][2], weights[1][3])};
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t b[4];
    y.b_fragment_transposed(b, row, step);
    mma(to[2 * step], a, b[0], b[1]);
    mma(to[2 * step + 1], a, b[2], b[3]);
  }
}

template <int kDim>
__device__ void scale_rows(float (&x)[kDim / 8][4], float upper, float lower) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    x[n][0] *= upper;
    x[n][1] *= upper;
    x[n][2] *= lower;
    x[n][3] *= lower;
  }
}

// The state, a quarter of its rows in each warp.
template <int kQk, int kV>
struct State {
  static constexpr int kTiles = kQk / 64;  // of 16 rows
  float x[kTiles][kV / 8][4];

  __device__ static int row(int tile) {
    return static_cast<int>(threadIdx.x) / 32 * (kQk / 4) + tile * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ static int column(int n) { return n * 8 + static_cast<int>(threadIdx.x) % 4 * 2; }

  __device__ void load(const Walk& m, const float* from) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < kV / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row(i) + e / 2 * 8, c = column(n) + e % 2;
          x[i][n][e] = from != nullptr && r < m.qk_dim && c < m.v_dim ? from[r * m.v_dim + c] : 0.0f;
        }
  }
  __device__ void store(const Walk& m, float* to) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < kV / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row(i) + e / 2 * 8, c = column(n) + e % 2;
          if (r < m.qk_dim && c < m.v_dim) to[r * m.v_dim + c] = x[i][n][e];
        }
  }
  // As bf16, for all warps.
  __device__ void share(bf16* to) const {
    const Tile<kV> tile{to};
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < kV / 8; ++n) {
        const int of_vector = static_cast<int>(threadIdx.x) % 4 * 2;
        *reinterpret_cast<uint32_t*>(tile.at(row(i), n) + of_vector) = pack(x[i][n][0], x[i][n][1]);
        *reinterpret_cast<uint32_t*>(tile.at(row(i) + 8, n) + of_vector) = pack(x[i][n][2], x[i][n][3]);
      }
  }
  // x ← through · x + Σ_t factor_t a_t b_tᵀ over the tokens of a chunk.
  __device__ void advance(const Tile<kQk>& a, const Tile<kV>& b, const float* factors, float factor, float through) {
    const int t = static_cast<int>(threadIdx.x) % 4 * 2, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) scale_rows<kV>(x[i], through, through);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float* const own = factors + group * 16 + t;
      const uint32_t low = pack(factor * own[0], factor * own[1]), high = pack(factor * own[8], factor * own[9]);
      uint32_t rows[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        a_fragment_transposed(rows[i], a, group * 16, warp * kTiles + i);
        rows[i][0] = multiply_pairs(rows[i][0], low);
        rows[i][1] = multiply_pairs(rows[i][1], low);
        rows[i][2] = multiply_pairs(rows[i][2], high);
        rows[i][3] = multiply_pairs(rows[i][3], high);
      }
#pragma unroll
      for (int step = 0; step < kV / 16; ++step) {
        uint32_t columns[4];
        b.b_fragment_transposed(columns, group * 16, step);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          mma(x[i][2 * step], rows[i], columns[0], columns[1]);
          mma(x[i][2 * step + 1], rows[i], columns[2], columns[3]);
        }
      }
    }
  }
};

// Writes 16 tokens of this warp, through its rows of a tile that nobody reads any more.
template <int kDim>
__device__ void write_rows(const float (&x)[kDim / 8][4], bf16* staging, const Heads<bf16>& to, const Place& place,
                           int token, int length, int dim) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Tile<kDim> tile{staging};
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    *reinterpret_cast<uint32_t*>(tile.at(lane / 4, n) + lane % 4 * 2) = pack(x[n][0], x[n][1]);
    *reinterpret_cast<uint32_t*>(tile.at(lane / 4 + 8, n) + lane % 4 * 2) = pack(x[n][2], x[n][3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * Tile<kDim>::kVectors; i += 32) {
    const int row = i / Tile<kDim>::kVectors, vector = i % Tile<kDim>::kVectors;
    if (token + row >= length || vector * 8 >= dim) continue;
    *reinterpret_cast<uint4*>(to.row(place.batch, token + row, place.head) + vector * 8) =
        *reinterpret_cast<const uint4*>(tile.at(row, vector));
  }
}

// x·dx of every row, which is the gradient of A but for its sign.
template <int kDim>
__device__ void write_decay(const float (&dx)[kDim / 8][4], const Tile<kDim>& x, int own, float sign, double* to,
                            int valid) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float upper = 0, lower = 0;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const float2 a = unpack(*reinterpret_cast<const uint32_t*>(x.at(own + lane / 4, n) + lane % 4 * 2));
    const float2 b = unpack(*reinterpret_cast<const uint32_t*>(x.at(own + lane / 4 + 8, n) + lane % 4 * 2));
    upper = fmaf(a.x, dx[n][0], fmaf(a.y, dx[n][1], upper));
    lower = fmaf(b.x, dx[n][2], fmaf(b.y, dx[n][3], lower));
  }
  upper = quad_sum(upper);
  lower = quad_sum(lower);
  if (lane % 4 != 0) return;
  if (own + lane / 4 < valid) to[own + lane / 4] = static_cast<double>(sign * upper);
  if (own + lane / 4 + 8 < valid) to[own + lane / 4 + 8] = static_cast<double>(sign * lower);
}

enum class Pass { sums, forward, query, key };  // of the walk; sums: the state alone

// Loads the tiles of a chunk that a pass reads. `reverse` sums are those of (q, g).
template <Pass kPass, int kQk, int kV>
__device__ void load_chunk(Stage<kQk, kV>& stage, const Walk& m, const Place& place, int chunk, bool reverse) {
  const bool sums = kPass == Pass::sums;
  if (!sums || reverse) load_tile<kQk>(stage.q, m.q, place, chunk, m.length, m.qk_dim);
  if (!sums || !reverse) load_tile<kQk>(stage.k, m.k, place, chunk, m.length, m.qk_dim);
  if (!sums || !reverse) load_tile<kV>(stage.v, m.v, place, chunk, m.length, m.v_dim);
  if (sums ? reverse : kPass != Pass::forward) load_tile<kV>(stage.g, m.g, place, chunk, m.length, m.v_dim);
}

// x [16 of this warp] times the state, where x is of qk_dim, or the state transposed, where it is of v_dim.
template <bool kQueries, int kQk, int kV>
__device__ void multiply_state(float (&sum)[(kQueries ? kV : kQk) / 8][4], const Tile<kQueries ? kQk : kV>& x, int own,
                               const Shared<kQk, kV>& memory) {
  constexpr int kX = kQueries ? kQk : kV, kOut = kQueries ? kV : kQk;
  const Tile<kV> state{const_cast<bf16*>(memory.state)};
#pragma unroll
  for (int n = 0; n < kOut / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[n][e] = 0;
#pragma unroll
  for (int step = 0; step < kX / 16; ++step) {
    uint32_t a[4];
    x.a_fragment(a, own, step);
#pragma unroll
    for (int column = 0; column < kOut / 16; ++column) {
      uint32_t b[4];
      if constexpr (kQueries)
        state.b_fragment_transposed(b, step * 16, column);
      else
        state.b_fragment(b, column * 16, step);
      mma(sum[2 * column], a, b[0], b[1]);
      mma(sum[2 * column + 1], a, b[2], b[3]);
    }
  }
}

// Queries of a chunk: the result, or with kGradient dq. Both are s (Σ_j D_ij (x_i·y_j) z_j + in_i S x_i).
template <bool kGradient, int kQk, int kV>
__device__ void run_queries(const Walk& m, const Place& place, int chunk, Stage<kQk, kV>& stage,
                            const Shared<kQk, kV>& memory) {
  constexpr int kX = kGradient ? kV : kQk, kOut = kGradient ? kQk : kV;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = static_cast<int>(threadIdx.x) / 32 * 16;
  const Tile<kX> x{kGradient ? stage.g : stage.q}, y{kGradient ? stage.v : stage.k};
  const Tile<kOut> z{kGradient ? stage.k : stage.v};
  const int rows[2] = {own + lane / 4, own + lane / 4 + 8};
  float sum[kOut / 8][4];
  multiply_state<!kGradient, kQk, kV>(sum, x, own, memory);
  scale_rows<kOut>(sum, m.scale * memory.in[rows[0]], m.scale * memory.in[rows[1]]);
  const TokenDecay decays[2] = {memory.decay[rows[0]], memory.decay[rows[1]]};
#pragma unroll 1
  for (int first = 0; first <= own; first += 16) {
    float products[2][4];
    dot_products<kX>(products, x, y, own, first);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = first + n * 8 + lane % 4 * 2 + e % 2;
        products[n][e] *= m.scale * pair_weight(decays[e / 2], memory.decay[j], rows[e / 2], j);
      }
    add_weighted<kOut>(sum, products, z, first);
  }
  const int token = chunk * kRows;
  if constexpr (kGradient) {
    if (m.row_decay != nullptr)
      write_decay<kQk>(sum, Tile<kQk>{stage.q}, own, 1.0f, m.row_decay + place.row * m.length + token,
                       m.length - token);
    write_rows<kQk>(sum, stage.q + own * kQk, m.dq, place, token + own, m.length, m.qk_dim);
  } else {
    write_rows<kV>(sum, stage.g + own * kV, m.out, place, token + own, m.length, m.v_dim);  // no g in this pass
  }
}

// Keys of a chunk: dk, or with kValues dv. Both are s Σ_i D_ij (x_j·y_i) z_i + out_j T x_j.
template <bool kValues, int kQk, int kV>
__device__ void sum_keys(float (&sum)[(kValues ? kV : kQk) / 8][4], float scale, Stage<kQk, kV>& stage,
                         const Shared<kQk, kV>& memory) {
  constexpr int kX = kValues ? kQk : kV, kOut = kValues ? kV : kQk;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = static_cast<int>(threadIdx.x) / 32 * 16;
  const Tile<kX> x{kValues ? stage.k : stage.v}, y{kValues ? stage.q : stage.g};
  const Tile<kOut> z{kValues ? stage.g : stage.q};
  const int rows[2] = {own + lane / 4, own + lane / 4 + 8};
  multiply_state<kValues, kQk, kV>(sum, x, own, memory);
  scale_rows<kOut>(sum, memory.out[rows[0]], memory.out[rows[1]]);
  const TokenDecay decays[2] = {memory.decay[rows[0]], memory.decay[rows[1]]};
#pragma unroll 1
  for (int first = own; first < kRows; first += 16) {
    float products[2][4];
    dot_products<kX>(products, x, y, own, first);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = first + n * 8 + lane % 4 * 2 + e % 2;
        products[n][e] *= scale * pair_weight(memory.decay[i], decays[e / 2], i, rows[e / 2]);
      }
    add_weighted<kOut>(sum, products, z, first);
  }
}

template <int kQk, int kV>
__device__ void run_keys(const Walk& m, const Place& place, int chunk, Stage<kQk, kV>& stage,
                         const Shared<kQk, kV>& memory) {
  const int own = static_cast<int>(threadIdx.x) / 32 * 16, token = chunk * kRows;
  float dv[kV / 8][4], dk[kQk / 8][4];
  sum_keys<true>(dv, m.scale, stage, memory);
  sum_keys<false>(dk, m.scale, stage, memory);
  if (m.key_decay != nullptr)
    write_decay<kQk>(dk, Tile<kQk>{stage.k}, own, -1.0f, m.key_decay + place.row * m.length + token, m.length - token);
  write_rows<kQk>(dk, stage.k + own * kQk, m.dk, place, token + own, m.length, m.qk_dim);
  write_rows<kV>(dv, stage.v + own * kV, m.dv, place, token + own, m.length, m.v_dim);
}

template <Pass kPass, int kQk, int kV>
__global__ void __launch_bounds__(kThreads, kQk + kV > 128 ? 2 : 3) walk_kernel(const Walk m, const bool reverse) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared<kQk, kV>& memory = *reinterpret_cast<Shared<kQk, kV>*>(bytes);
  const Place place;
  const int first = place.first_chunk(m), count = place.end_chunk(m) - first;
  // Nothing enters a segment behind the last one of the walk.
  if (kPass == Pass::sums && place.segment == (reverse ? 0 : place.segments - 1)) return;
  const auto chunk_of = [&](int i) { return first + (reverse ? count - 1 - i : i); };
  State<kQk, kV> state;
  state.load(m, m.first != nullptr && kPass != Pass::sums ? m.first + place.state(m) : nullptr);
  TokenValues next = load_values(m, place, chunk_of(0));
  load_chunk<kPass>(memory.stages[0], m, place, chunk_of(0), reverse);
  commit_copies();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    Stage<kQk, kV>& stage = memory.stages[i % 2];
    const TokenValues values = next;
    keep_values(values, memory);
    if (kPass != Pass::sums) state.share(memory.state);
    if (i + 1 < count) {
      load_chunk<kPass>(memory.stages[(i + 1) % 2], m, place, chunk_of(i + 1), reverse);
      next = load_values(m, place, chunk_of(i + 1));
    }
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    const Tile<kQk> q{stage.q}, k{stage.k};
    const Tile<kV> v{stage.v}, g{stage.g};
    if (reverse)
      state.advance(q, g, memory.in, m.scale, values.through);
    else
      state.advance(k, v, memory.out, 1.0f, values.through);
    if constexpr (kPass == Pass::forward) run_queries<false>(m, place, chunk_of(i), stage, memory);
    if constexpr (kPass == Pass::query) run_queries<true>(m, place, chunk_of(i), stage, memory);
    if constexpr (kPass == Pass::key) run_keys(m, place, chunk_of(i), stage, memory);
    __syncthreads();
  }
  if (m.last != nullptr) state.store(m, m.last + place.state(m));
}

// sums [batch, heads, segments, size]: of each segment alone but the last of the walk → what enters each. `initial`:
// what enters the first. Blocks of kEnterThreads; shared memory for a number of each segment.
constexpr int kEnterThreads = 256;
__global__ void enter_kernel(float* sums, const float* initial, const float* through, int chunks, int segments,
                             int segment_chunks, int size, bool reverse) {
  extern __shared__ float left[];  // what of a state that enters a segment leaves it
  const int64_t row = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int segment = static_cast<int>(threadIdx.x) / 32; segment < segments; segment += kEnterThreads / 32) {
    const int end = min(chunks, (segment + 1) * segment_chunks);
    float product = 1;
    for (int c = segment * segment_chunks + lane; through != nullptr && c < end; c += 32)
      product *= through[row * chunks + c];
    for (int offset = 16; offset > 0; offset /= 2) product *= __shfl_xor_sync(0xFFFFFFFFu, product, offset);
    if (lane == 0) left[segment] = product;
  }
  __syncthreads();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= size) return;
  float state = initial != nullptr ? initial[row * size + i] : 0.0f;
  constexpr int kAhead = 8;  // reads at the same time
  for (int first = 0; first < segments; first += kAhead) {
    const auto segment_of = [&](int n) { return reverse ? segments - 1 - (first + n) : first + n; };
    float own[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (first + n < segments - 1) own[n] = sums[(row * segments + segment_of(n)) * size + i];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (first + n >= segments) break;
      sums[(row * segments + segment_of(n)) * size + i] = state;
      if (first + n < segments - 1) state = fmaf(left[segment_of(n)], state, own[n]);
    }
  }
}

template <class Run>
void with_widths(const MixerShape& shape, Run&& run) {
  const bool wide_qk = shape.qk_dim > 64, wide_v = shape.v_dim > 64;
  if (wide_qk && wide_v)
    run.template operator()<128, 128>();
  else if (wide_qk)
    run.template operator()<128, 64>();
  else if (wide_v)
    run.template operator()<64, 128>();
  else
    run.template operator()<64, 64>();
}

// A call with its tables for chunks of kRows, and the segments of a head.
class Call {
 public:
  Call(const MixerCall& call, const TokenTables& tokens)
      : call_(call),
        tables_(chunk_tables({call.spec, call.shape, call.inputs, call.segments, kRows, call.result}, tokens)) {
    const MixerShape& shape = call.shape;
    walk.q = heads_of<bfloat16>(call.inputs.q, shape.heads);
    walk.k = heads_of<bfloat16>(call.inputs.k, shape.heads);
    walk.v = heads_of<bfloat16>(call.inputs.v, shape.heads);
    walk.decay = doubles(tokens.decay);
    walk.starts = tokens.starts ? tables_.within.starts.data<int32_t>() : nullptr;
    walk.in = floats(tables_.in);
    walk.out_factors = floats(tables_.out);
    walk.through = floats(tables_.through);
    walk.length = static_cast<int>(shape.length);
    walk.chunks = static_cast<int>((shape.length + kRows - 1) / kRows);
    walk.qk_dim = static_cast<int>(shape.qk_dim);
    walk.v_dim = static_cast<int>(shape.v_dim);
    walk.scale = shape.scale;
    const int64_t segments = best_segments();
    walk.segment_chunks = static_cast<int>((walk.chunks + segments - 1) / segments);
    segments_ = (walk.chunks + walk.segment_chunks - 1) / walk.segment_chunks;
  }

  // How many segments of a head take the least time. A block takes as long as its chunks; a multiprocessor runs a few
  // at a time. The sums of segments are a pass of their own.
  int64_t best_segments() const {
    constexpr int64_t kShortest = 16;
    constexpr double kPass = 1.4;
    const int64_t all = call_.shape.batch * call_.shape.heads, chunks = walk.chunks;
    const int64_t at_once = multiprocessors() * (std::max(walk.qk_dim, 64) + std::max(walk.v_dim, 64) > 128 ? 2 : 3);
    const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    int64_t best = 1;
    auto least = static_cast<double>(parts(all, at_once) * chunks);
    for (int64_t segments = 2; segments <= std::min(chunks / kShortest, at_once); ++segments) {
      const double time = kPass * static_cast<double>(parts(all * segments, at_once) * parts(chunks, segments));
      if (time >= least) continue;
      least = time;
      best = segments;
    }
    return best;
  }

  // The state that enters every segment; undefined where there is one segment. `known`: what an earlier call returned.
  Tensor enter(const Tensor& initial, bool reverse, const Tensor& known = {}) {
    const MixerShape& shape = call_.shape;
    if (segments_ == 1) {
      walk.first = floats(initial);
      return {};
    }
    const Shape states{shape.batch, shape.heads, segments_, shape.qk_dim, shape.v_dim};
    if (known && known.dtype() == DType::f32 && known.shape() == states) {
      walk.first = known.data<float>();
      return known;
    }
    sums_ = Tensor::empty(states, DType::f32, device());
    walk.first = nullptr;
    walk.last = sums_.data<float>();
    run<Pass::sums>(reverse);
    walk.last = nullptr;
    const auto size = static_cast<int>(shape.qk_dim * shape.v_dim);
    const dim3 grid(blocks_for(size, kEnterThreads), static_cast<unsigned>(shape.batch * shape.heads));
    enter_kernel<<<grid, kEnterThreads, static_cast<size_t>(segments_) * sizeof(float), stream(device())>>>(
        sums_.data<float>(), floats(initial), walk.through, walk.chunks, static_cast<int>(segments_),
        walk.segment_chunks, size, reverse);
    check_launch("mixer: states between segments");
    walk.first = sums_.data<float>();
    return sums_;
  }
  // Where the pass leaves the states of all segments; the one that leaves the head goes to `to` with copy_last().
  void keep_last() {
    const MixerShape& shape = call_.shape;
    lasts_ = Tensor::empty({shape.batch, shape.heads, segments_, shape.qk_dim, shape.v_dim}, DType::f32, device());
    walk.last = lasts_.data<float>();
  }
  void copy_last(const Tensor& to, bool reverse) const {
    furious::copy(to, lasts_.select(2, reverse ? 0 : segments_ - 1));
  }

  template <Pass kPass>
  void run(bool reverse) const {
    with_widths(call_.shape, [&]<int kQk, int kV>() {
      constexpr auto kernel = walk_kernel<kPass, kQk, kV>;
      constexpr size_t bytes = sizeof(Shared<kQk, kV>);
      allow_shared_memory(kernel, bytes);
      const dim3 grid(static_cast<unsigned>(segments_), static_cast<unsigned>(call_.shape.heads),
                      static_cast<unsigned>(call_.shape.batch));
      kernel<<<grid, kThreads, bytes, stream(device())>>>(walk, reverse);
    });
    check_launch("mixer: walk over chunks");
  }

  Walk walk = {};

 private:
  Device device() const { return call_.inputs.q.device(); }

  const MixerCall& call_;
  ChunkTables tables_;
  int64_t segments_ = 1;
  Tensor sums_, lasts_;
};

bool fits_in_shared_memory(const MixerShape& shape, Device device) {
  (void)stream(device);  // makes it current
  bool fits = false;
  with_widths(shape,
              [&]<int kQk, int kV>() { fits = sizeof(Shared<kQk, kV>) <= static_cast<size_t>(most_shared_memory()); });
  return fits;
}

}  // namespace

bool walk_supports(const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const std::string_view forced = forced_kernel();
  const auto fits = [](int64_t dim) { return dim % 8 == 0 && dim <= kLargestWalkDim; };
  // With wider values the states of chunks are faster (chunk_states.h).
  const bool chosen = shape.v_dim <= 64;
  return (forced == "walk" || (forced.empty() && chosen)) && call.inputs.q.dtype() == DType::bf16 &&
         call.precision == MixerPrecision::automatic && call.spec.score == Score::linear &&
         call.spec.norm == Norm::none && !call.spec.signed_decay && fits(shape.qk_dim) && fits(shape.v_dim) &&
         shape.first_query == 0 && rows_are_wide(call.inputs.q) && rows_are_wide(call.inputs.k) &&
         rows_are_wide(call.inputs.v) && shape.length <= (int64_t{1} << 30) &&
         fits_in_shared_memory(shape, call.inputs.q.device());
}

Tensor walk_forward(const MixerCall& call, const TokenTables& tokens) {
  Call walk(call, tokens);
  const Tensor states = walk.enter(call.inputs.initial_state, false);
  walk.walk.out = heads_of<bfloat16>(call.result.out, call.shape.heads);
  if (call.result.final_state) walk.keep_last();
  walk.run<Pass::forward>(false);
  if (call.result.final_state) walk.copy_last(call.result.final_state, false);
  return states;
}

void walk_backward(const MixerCall& call, const TokenTables& tokens, const Tensor& out_gradient,
                   const HeadGradients& gradients, const Tensor& initial_state_gradient) {
  const int64_t heads = call.shape.heads;
  Tensor g = out_gradient;
  if (!rows_are_wide(g)) {
    g = Tensor::empty(g.shape(), g.dtype(), g.device());
    furious::copy(g, out_gradient);
  }
  Call walk(call, tokens);
  walk.walk.g = heads_of<bfloat16>(g, heads);
  walk.walk.dq = heads_of<bfloat16>(gradients.q, heads);
  walk.walk.dk = heads_of<bfloat16>(gradients.k, heads);
  walk.walk.dv = heads_of<bfloat16>(gradients.v, heads);
  walk.walk.row_decay = doubles(gradients.row_decay);
  walk.walk.key_decay = doubles(gradients.key_decay);
  walk.enter(call.inputs.initial_state, false, call.result.states);
  walk.run<Pass::query>(false);
  walk.enter({}, true);
  if (initial_state_gradient) walk.keep_last();
  walk.run<Pass::key>(true);
  if (initial_state_gradient) walk.copy_last(initial_state_gradient, true);
}

}  // namespace furious::cuda
