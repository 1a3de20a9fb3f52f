// The building blocks of the general kernels of the parallel form ("tiles"): any score and decay, f32 or bf16 inputs,
// heads of up to 256, and products in any MixerPrecision. The kernels of tiles_*_cuda.cu are made of them.
//
// A block of four warps owns kRows rows (queries, or keys for dk and dv) and walks over tiles of kTile rows of the
// other side. All operands of products lie in shared memory, f32 or bf16 as the product reads them. A product is one of
// two kinds: `scores` contracts over a head's dimension (q·k, g·v), `sums` over the rows of the walked tile (w·v, dS·k,
// …), with the weights still in the registers that `scores` left them in.
//
// Far tiles are those that lie before all queries of the block, or behind all keys of the block. There a decay that
// does not grow is a product of two factors of at most 1: with r the first of these queries, or the last of these keys,
// exp(A_i − A_j) = exp(A_i − A_r)·exp(A_r − A_j). That of the walked token is made once for all rows; that of the
// block's row, and what else is constant, multiplies its sums once, when the far tiles are done. So far tiles come
// first. Elsewhere, and for exponentials, decay takes an exponential per pair of tokens.
//
// In registers every product has the layout of mma.sync: with g = lane/4 and t = lane%4, element e of an 8-column block
// is row g + 8·(e/2), column 2t + e%2. Contractions may visit their index in any order as long as both operands agree;
// `sums` over f32 tiles use that to need no shuffles behind `scores`.
#pragma once

#include "gpu/mma.cuh"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/gpu/score.cuh"

namespace furious::cuda::tiles {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// kDim: the larger of the two dimensions of a head, rounded up to 64, 128 or 256.
template <int kDim>
struct Layout {
  static constexpr int kM = kDim == 64 ? 2 : 1;  // blocks of 16 rows per warp: as many as registers hold
  static constexpr int kWarpRows = 16 * kM;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kTile = kDim == 64 ? 64 : kDim == 128 ? 32 : 16;
  static constexpr int kGroup = kTile < 32 ? kTile : 32;  // rows of a tile whose scores are in registers at a time
  // Of shared memory, for the two tensors of the block's rows and of the walked tile, and what is known of the latter.
  static constexpr int kMostBytes = 2 * (kRows + kTile) * kDim * 4 + 32 * kTile;
};

__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % 32;
}

// A tensor [batch, length, heads or a divisor, dim] of f32 or bf16. `wide`: every row is aligned to 16 bytes, and its
// dimension is a multiple of 8.
struct TokenRows {
  Heads<char> heads;  // strides in bytes
  int dim;
  bool bf16, wide;
};

// The rows of one head of it. Eight columns are read and a run of columns is written at a time.
struct HeadRows {
  const TokenRows& tensor;  // a parameter of the kernel: what is not needed in registers stays there
  char* data;

  __device__ HeadRows(const TokenRows& of, int64_t b, int64_t h) : tensor(of), data(of.heads.row(b, 0, h)) {}

  __device__ void load(float (&x)[8], int token, int column) const {
    const char* const row = data + token * tensor.heads.token;
    if (tensor.bf16) {
      const __nv_bfloat16* const from = reinterpret_cast<const __nv_bfloat16*>(row) + column;
      if (tensor.wide) {
        const uint4 pairs = *reinterpret_cast<const uint4*>(from);
        const uint32_t each[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[2 * i] = __uint_as_float(each[i] << 16);
          x[2 * i + 1] = __uint_as_float(each[i] & 0xFFFF0000u);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = column + i < tensor.dim ? to_float(from[i]) : 0.0f;
      }
    } else {
      const float* const from = reinterpret_cast<const float*>(row) + column;
      if (tensor.wide) {
        const float4 first = *reinterpret_cast<const float4*>(from),
                     second = *reinterpret_cast<const float4*>(from + 4);
        x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
        x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = column + i < tensor.dim ? from[i] : 0.0f;
      }
    }
  }

  template <int kRun>
  __device__ void store(const float (&x)[kRun], int token, int column) const {
    static_assert(kRun == 2 || kRun == 8);
    char* const row = data + token * tensor.heads.token;
    if (tensor.bf16) {
      __nv_bfloat16* const to = reinterpret_cast<__nv_bfloat16*>(row) + column;
      if (!tensor.wide) {
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          if (column + i < tensor.dim) to[i] = from_float<__nv_bfloat16>(x[i]);
      } else if constexpr (kRun == 2) {
        *reinterpret_cast<uint32_t*>(to) = pack(x[0], x[1]);
      } else {
        *reinterpret_cast<uint4*>(to) =
            make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
      }
    } else {
      float* const to = reinterpret_cast<float*>(row) + column;
      if (!tensor.wide) {
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          if (column + i < tensor.dim) to[i] = x[i];
      } else if constexpr (kRun == 2) {
        *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
      } else {
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        *reinterpret_cast<float4*>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
      }
    }
  }
};

inline TokenRows token_rows(const Tensor& x, int64_t heads) {
  const int64_t size = x.dtype() == DType::bf16 ? 2 : 4;
  const Heads<char> rows{static_cast<char*>(x.raw()), x.stride(0) * size, x.stride(1) * size, x.stride(2) * size,
                         static_cast<int>(heads / x.size(2))};
  const bool wide =
      x.size(3) % 8 == 0 && (rows.batch | rows.token | rows.head | reinterpret_cast<int64_t>(x.raw())) % 16 == 0;
  return {rows, static_cast<int>(x.size(3)), x.dtype() == DType::bf16, wide};
}

struct Call {
  TokenRows q, k, v, out, g, dq, dk, dv;
  const double* decay;  // A, [batch, heads, length]
  const int *starts, *ends;
  const float* past;  // [batch, heads, length, past_columns()]: what a state adds to each token
  float *normalizer, *maximum;
  float* delta;  // [batch, heads, length]: δ_i = g_i·o_i under the sum norm
  double *row_decay, *key_decay;
  int64_t heads;
  int length, qk_dim, v_dim;
  int first;  // the first query; q, out, normalizer and maximum begin with it. 0 backward and with a past
  bool sum_norm, may_erase;
  ScoreFunction f;

  __device__ float inverse_normalizer(float n) const {
    return !sum_norm ? 1.0f : fabsf(n) < kSmallestNormalizer ? 0.0f : 1 / n;
  }
};

// A cumulative log-decay less a reference of the block, as a sum of two f32: differences are exact to f32 even where
// decays are strong and the sums are large.
struct LogDecay {
  float high, low;

  __device__ float minus(const LogDecay& other) const { return (high - other.high) + (low - other.low); }
  // exp of it times `sign`. It is a factor of many pairs, so it is exact to f32 however small.
  __device__ float factor(float sign) const { return expf(sign * high) * fmaf(sign, low, 1.0f); }
};
__device__ inline LogDecay log_decay(double a) {
  const float high = static_cast<float>(a);
  return {high, static_cast<float>(a - static_cast<double>(high))};
}

// Rows of kDim f32 in shared memory, in vectors of 16 bytes. Vector p of row r lies at place p ^ s(r % 8) within its
// group of 8 vectors; s is such that the reads of `scores` (a vector of 8 rows, or rows g and vectors t) and of `sums`
// (rows 2t or 2t + 1, vectors g) have no bank conflicts.
template <int kDim, bool kRounded>
struct WideTile {
  static constexpr int kElementBytes = 4;
  float* data;

  static __device__ int swizzle(int row) { return ((row ^ (row >> 1)) & 1) << 2 | (row >> 2 & 1) << 1 | (row & 1); }
  // `row` counts from row8, a multiple of 8.
  __device__ float4* at(int row8, int row, int vector) const {
    return reinterpret_cast<float4*>(data + (row8 + row) * kDim) + ((vector & ~7) | ((vector ^ swizzle(row)) & 7));
  }
  __device__ void put(int row, int eight, const float (&x)[8]) const {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = kRounded ? __uint_as_float(round_to_tf32(x[i])) : x[i];
    *at(row & ~7, row & 7, 2 * eight) = make_float4(y[0], y[1], y[2], y[3]);
    *at(row & ~7, row & 7, 2 * eight + 1) = make_float4(y[4], y[5], y[6], y[7]);
  }
  // For mma_tf32, already in its order, which spares moving registers: A of rows [row, row+16) and columns [8·step,
  // +8); B, transposed, of rows [row, row+8) and columns [16·step, +16), r0 and r1 of the first eight.
  __device__ void a_fragment(uint32_t (&r)[4], int row, int step) const {
    const int lane = lane_index();
    load_matrices(r, at(row + lane / 8 % 2 * 8, lane % 8, 2 * step + lane / 16));
  }
  __device__ void b_fragments(uint32_t (&r)[4], int row, int step) const {
    const int lane = lane_index();
    load_matrices(r, at(row, lane % 8, 4 * step + lane / 8));
  }
};

template <int kDim>
struct NarrowTile : Tile<kDim> {
  static constexpr int kElementBytes = 2;

  __device__ void put(int row, int eight, const float (&x)[8]) const {
    *reinterpret_cast<uint4*>(this->at(row, eight)) =
        make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
  }
};

// kCount rows from row0 on; rows at and after `length` and columns at and after `dim` become zeros. By all threads.
template <int kCount, int kDim, class Shared>
__device__ void load_tile(const Shared& tile, const HeadRows& from, int row0, int length, int dim) {
  constexpr int kEights = kDim / 8;
  static_assert(kCount * kEights % kThreads == 0);
#pragma unroll 4
  for (int step = 0; step < kCount * kEights / kThreads; ++step) {
    const int i = step * kThreads + static_cast<int>(threadIdx.x);
    const int row = i / kEights, eight = i % kEights;
    float x[8] = {};
    if (row0 + row < length && eight * 8 < dim) from.load(x, row0 + row, eight * 8);
    tile.put(row, eight, x);
  }
}

// What is known of the tokens of a walked tile: their log-decay, or in far tiles their factors.
template <int kTile>
union TokenDecays {
  LogDecay local[kTile];
  float factor[kTile];
};

// The keys that a block of queries from row0 on walks over.
template <class L>
struct KeyWalk {
  const double* decay;  // A of the head; null without
  const int* starts;    // of this row of the batch; null without documents
  double reference;     // A of row0
  HeadRows k, v;
  int first_tile, last_tile;

  __device__ KeyWalk(const Call& m, int row0)
      : decay(m.decay ? m.decay + (static_cast<int64_t>(blockIdx.z) * m.heads + blockIdx.y) * m.length : nullptr),
        starts(m.starts ? m.starts + static_cast<int64_t>(blockIdx.z) * m.length : nullptr),
        reference(decay ? decay[row0] : 0.0),
        k(m.k, blockIdx.z, blockIdx.y),
        v(m.v, blockIdx.z, blockIdx.y),
        first_tile((starts ? starts[row0] : 0) / L::kTile),
        last_tile((min(row0 + L::kRows, m.length) - 1) / L::kTile) {
    if (!decay || !m.may_erase) return;
    first_tile += count_erased<kThreads>(row0 / L::kTile - first_tile, [&](int i) {
      return reference - decay[(first_tile + i) * L::kTile + L::kTile - 1] < kErased;
    });
  }
  __device__ LogDecay local(int token) const { return log_decay(decay ? decay[token] - reference : 0.0); }

  // By all threads; a barrier has to come before and after.
  template <ScoreKind kKind, int kDim, class Operand>
  __device__ void load(const Operand& keys, const Operand& values, TokenDecays<L::kTile>& decays, const Call& m,
                       int tile0, bool far) const {
    load_tile<L::kTile, kDim>(keys, k, tile0, m.length, m.qk_dim);
    load_tile<L::kTile, kDim>(values, v, tile0, m.length, m.v_dim);
    if (threadIdx.x >= L::kTile) return;
    const LogDecay own = local(min(tile0 + static_cast<int>(threadIdx.x), m.length - 1));
    if (far)
      decays.factor[threadIdx.x] = own.factor(-1) * m.f.token_constant<kKind>();
    else
      decays.local[threadIdx.x] = own;
  }
};

// The products. `scores` adds to s[m][n] the products of rows [row_a, +16·kM) of a and rows [row_b, +8·kN) of b over
// the first 32·`steps` columns. `sums` adds to acc the products of the weights p with rows [row_b, +8·kN) of b, in the
// first 64·`panels` columns. `element` is what acc holds at place i of run r of a row, from column `column(r)` on.
template <MixerPrecision kPrecision, int kDim>
struct Product;

template <int kDim>
struct Product<MixerPrecision::bf16, kDim> {
  using Operand = NarrowTile<kDim>;
  static constexpr int kRun = 2;

  static __device__ int column(int run) { return run * 8 + lane_index() % 4 * 2; }
  static __device__ float& element(float (&acc)[kDim / 8][4], int run, int i, int u) { return acc[run][2 * u + i]; }

  template <int kM, int kN>
  static __device__ void scores(float (&s)[kM][kN][4], const Operand& a, int row_a, const Operand& b, int row_b,
                                int steps) {
    add_products(s, a, row_a, b, row_b, 2 * steps);
  }

  template <int kPanel = 0, int kM, int kN>
  static __device__ void sums(float (&acc)[kM][kDim / 8][4], const float (&p)[kM][kN][4], const Operand& b, int row_b,
                              int panels) {
    if (kPanel > 0 && kPanel >= panels) return;
    add_weighted_rows<4 * kPanel, 4 * kPanel + 4>(acc, p, b, row_b);
    if constexpr (kPanel + 1 < kDim / 64) sums<kPanel + 1>(acc, p, b, row_b, panels);
  }
};

// What the products of f32 tiles share. acc[4·i + c] holds of each group i of 32 columns 4·(2t + e) + c: a lane has 8
// columns in a row.
template <int kDim, bool kRounded>
struct WideProduct {
  using Operand = WideTile<kDim, kRounded>;
  static constexpr int kRun = 8;

  static __device__ int column(int run) { return run * 32 + lane_index() % 4 * 8; }
  static __device__ float& element(float (&acc)[kDim / 8][4], int run, int i, int u) {
    return acc[run * 4 + i % 4][2 * u + i / 4];
  }
};

// tf32, or with kThree each operand as the sum of two tf32 and the three larger of the four products.
template <int kDim, bool kThree>
struct Tf32Product : WideProduct<kDim, !kThree> {
  using Operand = typename WideProduct<kDim, !kThree>::Operand;

  // Operands of a single tf32 are rounded when they enter shared memory.
  template <int kCount>
  struct Factor {
    uint32_t big[kCount], small[kThree ? kCount : 1];

    __device__ void set(int i, float x) {
      big[i] = round_to_tf32(x);
      if constexpr (kThree) small[i] = round_to_tf32(x - __uint_as_float(big[i]));
    }
    // Operands from shared memory, as they lie there.
    __device__ void set_operand(int i, uint32_t x) {
      if constexpr (kThree)
        set(i, __uint_as_float(x));
      else
        big[i] = x;
    }
  };
  static __device__ void multiply(float (&d)[4], const Factor<4>& a, const Factor<2>& b) {
    if constexpr (kThree) {
      mma_tf32(d, a.small, b.big[0], b.big[1]);
      mma_tf32(d, a.big, b.small[0], b.small[1]);
    }
    mma_tf32(d, a.big, b.big[0], b.big[1]);
  }

  template <int kM, int kN>
  static __device__ void scores(float (&s)[kM][kN][4], const Operand& a, int row_a, const Operand& b, int row_b,
                                int steps) {
#pragma unroll(kThree ? 1 : 2)
    for (int step = 0; step < 2 * steps; ++step) {  // 16 columns at a time
      Factor<4> x[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t r[4];
          a.a_fragment(r, row_a + m * 16, 2 * step + i);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][i].set_operand(e, r[e]);
        }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        uint32_t r[4];
        b.b_fragments(r, row_b + n * 8, step);
        Factor<2> y[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i / 2].set_operand(i % 2, r[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int m = 0; m < kM; ++m) multiply(s[m][n], x[m][i], y[i]);
      }
    }
  }

  // Of 8 rows of b, row 2t takes part as row t and row 2t + 1 as row t + 4: that is how the weights lie.
  template <int kM, int kN>
  static __device__ void sums(float (&acc)[kM][kDim / 8][4], const float (&p)[kM][kN][4], const Operand& b, int row_b,
                              int panels) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int panel = 0; panel < kDim / 64; ++panel) {
      if (panel > 0 && panel >= panels) break;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        Factor<4> x[kM];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m].set(e % 2 * 2 + e / 2, p[m][n][e]);
#pragma unroll
        for (int i = panel * 2; i < panel * 2 + 2; ++i) {
          const float4 even = *b.at(row_b + n * 8, 2 * t, i * 8 + g), odd = *b.at(row_b + n * 8, 2 * t + 1, i * 8 + g);
          const float evens[4] = {even.x, even.y, even.z, even.w}, odds[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            // A single tf32 is rounded already. Doing it again costs no more than moving it to a neighbouring register.
            Factor<2> y;
            y.set(0, evens[c]);
            y.set(1, odds[c]);
#pragma unroll
            for (int m = 0; m < kM; ++m) multiply(acc[m][i * 4 + c], x[m], y);
          }
        }
      }
    }
  }
};

template <int kDim>
struct Product<MixerPrecision::tf32, kDim> : Tf32Product<kDim, false> {};
template <int kDim>
struct Product<MixerPrecision::tf32x3, kDim> : Tf32Product<kDim, true> {};

// f32 without tensor cores, in the same layout.
template <int kDim>
struct Product<MixerPrecision::f32, kDim> : WideProduct<kDim, false> {
  using Operand = typename WideProduct<kDim, false>::Operand;

  template <int kM, int kN>
  static __device__ void scores(float (&s)[kM][kN][4], const Operand& a, int row_a, const Operand& b, int row_b,
                                int steps) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll 2
    for (int vector = 0; vector < 8 * steps; ++vector) {
      float4 x[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int u = 0; u < 2; ++u) x[m][u] = *a.at(row_a + m * 16 + u * 8, g, vector);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float4 y = *b.at(row_b + n * 8, 2 * t + c, vector);
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int u = 0; u < 2; ++u) {
              float& sum = s[m][n][2 * u + c];
              sum = fmaf(x[m][u].x, y.x, sum);
              sum = fmaf(x[m][u].y, y.y, sum);
              sum = fmaf(x[m][u].z, y.z, sum);
              sum = fmaf(x[m][u].w, y.w, sum);
            }
        }
    }
  }

  // The weights of a row lie with the four lanes that share it.
  template <int kM, int kN>
  static __device__ void sums(float (&acc)[kM][kDim / 8][4], const float (&p)[kM][kN][4], const Operand& b, int row_b,
                              int panels) {
    const int t = lane_index() % 4;
#pragma unroll
    for (int panel = 0; panel < kDim / 64; ++panel) {
      if (panel > 0 && panel >= panels) break;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll 1
          for (int owner = 0; owner < 4; ++owner) {
            float w[kM][2];
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
              for (int u = 0; u < 2; ++u) w[m][u] = __shfl_sync(0xFFFFFFFFu, p[m][n][2 * u + c], owner, 4);
#pragma unroll
            for (int i = panel * 2; i < panel * 2 + 2; ++i)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float4 y = *b.at(row_b + n * 8, 2 * owner + c, i * 8 + 2 * t + e);
#pragma unroll
                for (int m = 0; m < kM; ++m)
#pragma unroll
                  for (int u = 0; u < 2; ++u) {
                    acc[m][i * 4][2 * u + e] = fmaf(w[m][u], y.x, acc[m][i * 4][2 * u + e]);
                    acc[m][i * 4 + 1][2 * u + e] = fmaf(w[m][u], y.y, acc[m][i * 4 + 1][2 * u + e]);
                    acc[m][i * 4 + 2][2 * u + e] = fmaf(w[m][u], y.z, acc[m][i * 4 + 2][2 * u + e]);
                    acc[m][i * 4 + 3][2 * u + e] = fmaf(w[m][u], y.w, acc[m][i * 4 + 3][2 * u + e]);
                  }
              }
          }
    }
  }
};

// Multiplies row u of a lane (g or g + 8) of an accumulator.
template <int kBlocks>
__device__ void scale_row(float (&acc)[kBlocks][4], int u, float factor) {
#pragma unroll
  for (int d = 0; d < kBlocks; ++d) {
    acc[d][2 * u] *= factor;
    acc[d][2 * u + 1] *= factor;
  }
}

// Writes such a row, times a factor.
template <class P, int kBlocks>
__device__ void store_row(const HeadRows& to, int token, int dim, float (&acc)[kBlocks][4], int u, float factor) {
#pragma unroll
  for (int run = 0; run < 2 * kBlocks / P::kRun; ++run) {
    const int column = P::column(run);
    float x[P::kRun];
#pragma unroll
    for (int i = 0; i < P::kRun; ++i) x[i] = P::element(acc, run, i, u) * factor;
    if (column < dim) to.store(x, token, column);
  }
}

Call call_of(const MixerCall& call, const TokenTables& tables);

template <MixerPrecision kPrecision>
using PrecisionConstant = std::integral_constant<MixerPrecision, kPrecision>;

// Calls f with the precision of the call, the padded dimension and what is known of the score, as constants.
template <class F>
void with_constants(const MixerCall& call, F&& f) {
  const auto with_score = [&]<MixerPrecision kPrecision>(PrecisionConstant<kPrecision> precision, auto dim) {
    constexpr bool kTf32 = kPrecision == MixerPrecision::tf32 || kPrecision == MixerPrecision::tf32x3;
    const auto with_kind = [&]<ScoreKind kKind>() { f(precision, dim, std::integral_constant<ScoreKind, kKind>()); };
    if (call.spec.score == Score::exponential) return with_kind.template operator()<ScoreKind::exponential>();
    if constexpr (kTf32) {  // for others it would save little
      if (call.spec.score == Score::squared && !call.spec.signed_decay)
        return with_kind.template operator()<ScoreKind::squared>();
    }
    with_kind.template operator()<ScoreKind::polynomial>();
  };
  const auto with_dim = [&](auto precision) {
    const int64_t dim = std::max(call.shape.qk_dim, call.shape.v_dim);
    if (dim <= 64)
      with_score(precision, std::integral_constant<int, 64>());
    else if (dim <= 128)
      with_score(precision, std::integral_constant<int, 128>());
    else
      with_score(precision, std::integral_constant<int, 256>());
  };
  switch (product_precision(call)) {
    case MixerPrecision::bf16:
      return with_dim(PrecisionConstant<MixerPrecision::bf16>());
    case MixerPrecision::tf32:
      return with_dim(PrecisionConstant<MixerPrecision::tf32>());
    case MixerPrecision::tf32x3:
      return with_dim(PrecisionConstant<MixerPrecision::tf32x3>());
    case MixerPrecision::f32:
    case MixerPrecision::automatic:  // product_precision() has replaced it
      return with_dim(PrecisionConstant<MixerPrecision::f32>());
  }
}

inline dim3 grid_of(const MixerShape& shape, int rows) {
  return dim3(blocks_for(shape.queries(), rows), static_cast<unsigned>(shape.heads),
              static_cast<unsigned>(shape.batch));
}

}  // namespace furious::cuda::tiles
