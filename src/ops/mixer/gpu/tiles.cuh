// The building blocks of the general kernels of the parallel form ("tiles"): any score and decay, f32 or bf16 inputs,
// heads of up to 128, and products in any MixerPrecision. tiles_forward_cuda.cu and tiles_backward_cuda.cu are made of
// them.
//
// A block of four warps owns kRows rows (queries, or keys for dk and dv) and walks over tiles of kTile rows of the
// other side. All operands of products lie in shared memory, f32 or bf16 as the product reads them. A product is one of
// two kinds: `scores` contracts over a head's dimension (q·k, g·v), `sums` over the rows of the walked tile (w·v, dS·k,
// …), with the weights still in the registers that `scores` left them in. Decay takes one exponential per pair of
// tokens.
//
// In registers every product has the layout of mma.sync: with g = lane/4 and t = lane%4, element e of an 8-column block
// is row g + 8·(e/2), column 2t + e%2. Contractions may visit their index in any order as long as both operands agree;
// the f32 tiles use that to read 16 bytes at a time and to need no shuffles between `scores` and `sums`.
#pragma once

#include "gpu/mma.cuh"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/gpu/score.cuh"

namespace furious::cuda::tiles {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// kDim: the larger of the two dimensions of a head, rounded up to 64 or 128.
template <int kDim>
struct Layout {
  static constexpr int kM = 128 / kDim;  // blocks of 16 rows per warp: as many as registers hold
  static constexpr int kWarpRows = 16 * kM;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kTile = kDim == 64 ? 64 : 32;
  static constexpr int kGroup = 32;  // rows of a tile whose scores are in registers at a time
};

__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % 32;
}

// A tensor [batch, length, heads or a divisor, dim] of f32 or bf16. `wide`: every row is aligned to 16 bytes.
struct TokenRows {
  Heads<char> heads;  // strides in bytes
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
        for (int i = 0; i < 8; ++i) x[i] = to_float(from[i]);
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
        for (int i = 0; i < 8; ++i) x[i] = from[i];
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
        for (int i = 0; i < kRun; ++i) to[i] = from_float<__nv_bfloat16>(x[i]);
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
        for (int i = 0; i < kRun; ++i) to[i] = x[i];
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
  const bool wide = (rows.batch | rows.token | rows.head | reinterpret_cast<int64_t>(x.raw())) % 16 == 0;
  return {rows, x.dtype() == DType::bf16, wide};
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
};
__device__ inline LogDecay log_decay(double a) {
  const float high = static_cast<float>(a);
  return {high, static_cast<float>(a - static_cast<double>(high))};
}

// Rows of kDim f32 in shared memory, in vectors of 16 bytes. Vector p of row r lies at place p ^ s(r % 8) within its
// group of 8 vectors; s is such that the reads of `scores` (rows g, vectors t) and of `sums` (rows 2t or 2t + 1,
// vectors g) have no bank conflicts.
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

// The products. `scores` adds to s[m][n] the products of rows [row_a, +16·kM) of a and rows [row_b, +8·kN) of b over
// the first 32·`steps` columns. `sums` adds to acc the products of the weights p with rows [row_b, +8·kN) of b, over 64
// or, where `all`, 128 columns. `element` is what acc holds at place i of run r of a row, from column `column(r)` on.
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

  template <int kM, int kN>
  static __device__ void sums(float (&acc)[kM][kDim / 8][4], const float (&p)[kM][kN][4], const Operand& b, int row_b,
                              bool all) {
    add_weighted_rows<0, 4>(acc, p, b, row_b);
    if (all) add_weighted_rows<4, kDim / 16>(acc, p, b, row_b);
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

  // Operands of a single tf32 are rounded when they enter shared memory; weights are rounded by the caller.
  template <int kCount>
  struct Factor {
    uint32_t big[kCount], small[kThree ? kCount : 1];

    __device__ void set(int i, float x) {
      big[i] = kThree ? round_to_tf32(x) : __float_as_uint(x);
      if constexpr (kThree) small[i] = round_to_tf32(x - __uint_as_float(big[i]));
    }
  };
  static __device__ void multiply(float (&d)[4], const Factor<4>& a, const Factor<2>& b) {
    if constexpr (kThree) {
      mma_tf32(d, a.small, b.big[0], b.big[1]);
      mma_tf32(d, a.big, b.small[0], b.small[1]);
    }
    mma_tf32(d, a.big, b.big[0], b.big[1]);
  }

  // 16 columns at a time: of 4t … 4t + 3 that a lane reads, the first product takes the first two as its columns t and
  // t + 4, the second the others.
  template <int kM, int kN>
  static __device__ void scores(float (&s)[kM][kN][4], const Operand& a, int row_a, const Operand& b, int row_b,
                                int steps) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll(kThree ? 1 : 2)
    for (int step = 0; step < 2 * steps; ++step) {
      Factor<4> x[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float4 upper = *a.at(row_a + m * 16, g, 4 * step + t), lower = *a.at(row_a + m * 16 + 8, g, 4 * step + t);
        x[m][0].set(0, upper.x);
        x[m][0].set(1, lower.x);
        x[m][0].set(2, upper.y);
        x[m][0].set(3, lower.y);
        x[m][1].set(0, upper.z);
        x[m][1].set(1, lower.z);
        x[m][1].set(2, upper.w);
        x[m][1].set(3, lower.w);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float4 four = *b.at(row_b + n * 8, g, 4 * step + t);
        Factor<2> y[2];
        y[0].set(0, four.x);
        y[0].set(1, four.y);
        y[1].set(0, four.z);
        y[1].set(1, four.w);
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
                              bool all) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int half = 0; half < kDim / 64; ++half) {
      if (half > 0 && !all) break;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        Factor<4> x[kM];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float w = p[m][n][e];
            x[m].set(e % 2 * 2 + e / 2, kThree ? w : __uint_as_float(round_to_tf32(w)));
          }
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          const float4 even = *b.at(row_b + n * 8, 2 * t, i * 8 + g), odd = *b.at(row_b + n * 8, 2 * t + 1, i * 8 + g);
          const float evens[4] = {even.x, even.y, even.z, even.w}, odds[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
          for (int c = 0; c < 4; ++c) {
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
                              bool all) {
    const int t = lane_index() % 4;
#pragma unroll
    for (int half = 0; half < kDim / 64; ++half) {
      if (half > 0 && !all) break;
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
            for (int i = half * 2; i < half * 2 + 2; ++i)
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

// Row u of a lane (g or g + 8) of an accumulator, times a factor.
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

// Calls f with the precision of the call, the padded dimension and whether the score is exponential, as constants.
template <class F>
void with_constants(const MixerCall& call, F&& f) {
  const auto with_score = [&](auto precision, auto dim) {
    if (call.spec.score == Score::exponential)
      f(precision, dim, std::true_type());
    else
      f(precision, dim, std::false_type());
  };
  const auto with_dim = [&](auto precision) {
    if (std::max(call.shape.qk_dim, call.shape.v_dim) <= 64)
      with_score(precision, std::integral_constant<int, 64>());
    else
      with_score(precision, std::integral_constant<int, 128>());
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
