// What the walk over chunks (walk_cuda.cu) is made of: the tiles of a chunk, what decay makes of its tokens, products
// of 16 tokens of a warp, and the state.
#pragma once

#include "gpu/mma.cuh"
#include "ops/mixer/gpu/heads.cuh"

namespace furious::cuda::walks {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 64;  // tokens of a chunk
constexpr int kGroups = kRows / 16;
static_assert(kGroups == kWarps);

// Blocks of a multiprocessor, as shared memory and registers allow on a device with 227 KB.
constexpr int blocks_at_once(int qk, int v) {
  return qk + v > 128 ? 2 : qk + v > 64 ? 3 : 5;
}

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

__device__ inline TokenValues load_values(const Walk& m, const Place& place, int chunk) {
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

// exp(A_i − A_j)
__device__ inline float decay_between(const TokenDecay& at_i, const TokenDecay& at_j) {
  return fast_exp2((at_i.high - at_j.high) + (__bfloat162float(at_i.low) - __bfloat162float(at_j.low)));
}
// D_ij, or 0 where token j does not reach token i.
__device__ inline float pair_weight(const TokenDecay& at_i, const TokenDecay& at_j, int i, int j) {
  const float w = decay_between(at_i, at_j);
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

template <int kBlocks>
__device__ void scale_rows(float (&x)[kBlocks][4], float upper, float lower) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    x[n][0] *= upper;
    x[n][1] *= upper;
    x[n][2] *= lower;
    x[n][3] *= lower;
  }
}

// The state, a quarter of it in each warp: of its rows, or where there are fewer than 64, of its rows and columns.
template <int kQk, int kV>
struct State {
  static constexpr int kRowParts = kQk < 64 ? kQk / 16 : kWarps;
  static constexpr int kTiles = kQk / 16 / kRowParts;                // of 16 rows
  static constexpr int kColumnSteps = kV * kRowParts / kWarps / 16;  // of 16 columns
  static_assert(kWarps % kRowParts == 0 && kTiles > 0 && kColumnSteps > 0);
  float x[kTiles][2 * kColumnSteps][4];

  __device__ static int first_tile() { return static_cast<int>(threadIdx.x) / 32 % kRowParts * kTiles; }
  __device__ static int first_step() { return static_cast<int>(threadIdx.x) / 32 / kRowParts * kColumnSteps; }
  __device__ static int row(int tile) { return (first_tile() + tile) * 16 + static_cast<int>(threadIdx.x) % 32 / 4; }
  __device__ static int column(int n) { return first_step() * 16 + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2; }

  __device__ void load(const Walk& m, const float* from) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kColumnSteps; ++n)
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
      for (int n = 0; n < 2 * kColumnSteps; ++n)
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
      for (int n = 0; n < 2 * kColumnSteps; ++n) {
        const int of_vector = static_cast<int>(threadIdx.x) % 4 * 2;
        *reinterpret_cast<uint32_t*>(tile.at(row(i), 2 * first_step() + n) + of_vector) = pack(x[i][n][0], x[i][n][1]);
        *reinterpret_cast<uint32_t*>(tile.at(row(i) + 8, 2 * first_step() + n) + of_vector) =
            pack(x[i][n][2], x[i][n][3]);
      }
  }
  // x ← through · x + Σ_t factor_t a_t b_tᵀ over the tokens of a chunk.
  __device__ void advance(const Tile<kQk>& a, const Tile<kV>& b, const float* factors, float factor, float through) {
    const int t = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) scale_rows(x[i], through, through);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float* const own = factors + group * 16 + t;
      const uint32_t low = pack(factor * own[0], factor * own[1]), high = pack(factor * own[8], factor * own[9]);
      uint32_t rows[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        a_fragment_transposed(rows[i], a, group * 16, first_tile() + i);
        rows[i][0] = multiply_pairs(rows[i][0], low);
        rows[i][1] = multiply_pairs(rows[i][1], low);
        rows[i][2] = multiply_pairs(rows[i][2], high);
        rows[i][3] = multiply_pairs(rows[i][3], high);
      }
#pragma unroll
      for (int step = 0; step < kColumnSteps; ++step) {
        uint32_t columns[4];
        b.b_fragment_transposed(columns, group * 16, first_step() + step);
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

}  // namespace furious::cuda::walks
