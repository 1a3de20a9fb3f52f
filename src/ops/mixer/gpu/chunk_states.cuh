// What the kernels behind chunk_states.h share.
//
// With the dimensions of a head in blocks of 16, the state of a squared score S[a, b, :] = Σ_j w_j k_a k_b u_j is kept
// for blocks A ≤ B: 16 rows (one for each b of B) for each a of the blocks up to B, ordered by B, then a. What belongs
// to blocks A < B counts twice, and holds twice the sum. The state of a linear score is S[b, :].
//
// A row has kWidth columns: the values, zeros, and in the last eight the normalizer's Z = high + low, both bf16, as
// high, high, low, 0, …. The products that make a state have u = [v, 1, 0, …] or [g, −δ high, −δ low, 0, …]; those that
// read it have [v, 1, 0, 1, 0, …] and [g, −δ high, −δ low, −δ high, 0, …]: δ and Z count to f32's precision nearly,
// since what they belong to are differences. kWidth/8 is odd, so that rows in shared memory fall into different banks.
//
// Values that are wider than accumulators and shared memory allow are computed in slices, each with states of its own.
// What the normalizer gives to dq and dk comes with the first slice.
#pragma once

#include "gpu/mma.cuh"
#include "ops/mixer/features.h"
#include "ops/mixer/gpu/chunk_states.h"
#include "ops/mixer/gpu/heads.cuh"

namespace furious::cuda::mma_states {

// Rows of a state before those of block `block`, in units of 16.
__host__ __device__ constexpr int steps_before(bool squared, int block) {
  return squared ? 8 * block * (block + 1) : block;
}

// What is computed at a time: heads of the batch, so that their states fit in memory, `first` among all of them, and
// columns of the values; by blocks of so many warps, where they read states.
struct HeadRange {
  int64_t first, count;
  int64_t column, columns;
  int warps;
  bool normalizer;  // with that of the sum norm
};
constexpr int kMostWarps = 8;

// The sizes of a call.
struct Sizes {
  HeadRange range;
  int length, chunk, chunks, heads, batch;
  int qk_dim, v_dim;    // v_dim: of the slice
  int column, columns;  // the slice's first one, and those of a state outside (features.h)
  int blocks;           // of 16 dimensions of queries and keys
  int rows, features;   // of a state here, and outside
  bool sum_norm;        // with the normalizer

  // `head` counts from the first of the range for states, from that of the batch for tokens.
  __device__ int64_t state(int64_t own, int c) const { return own * chunks + c; }
  __device__ int64_t token(int64_t head, int t) const { return head * length + t; }
  __device__ int end_of(int c) const { return min((c + 1) * chunk, length); }
};

// Calls f with the score and the width of the states of `columns` columns, up to kMostColumns, as constants.
constexpr int64_t kMostColumns = 128;
template <class F>
void with_constants(const MixerCall& call, int64_t columns, F&& f) {
  const auto with_width = [&](auto squared) {
    if (columns <= 32)
      f(squared, std::integral_constant<int, 40>());
    else if (columns <= 64)
      f(squared, std::integral_constant<int, 72>());
    else if (columns <= 80)
      f(squared, std::integral_constant<int, 88>());
    else if (columns <= 96)
      f(squared, std::integral_constant<int, 104>());
    else
      f(squared, std::integral_constant<int, 136>());
  };
  if (call.spec.score == Score::squared)
    with_width(std::true_type());
  else
    with_width(std::false_type());
}

Sizes sizes_of(const MixerCall& call, const ChunkTables& tables, const HeadRange& range);
inline int blocks_of(const MixerCall& call) {
  return static_cast<int>((call.shape.qk_dim + 15) / 16);
}

// Bytes of shared memory that a block of each kernel needs for so many columns of the call's values.
size_t walk_memory(const MixerCall& call, int64_t columns);
size_t read_memory(const MixerCall& call, int64_t columns, int warps);
size_t contract_memory(const MixerCall& call, int64_t columns, int warps);

// One walk of a state through the chunks: S ← through · S + Σ_j w_j φ(x_j) u_jᵀ, where u ends with 1, or −δ.
struct Walk {
  Tensor x, u, factors, delta;
  Tensor reach;        // undefined, or a table of ChunkTables: where it is 0, so are the factors
  Tensor first, last;  // f32, as features.h orders rows: the state that comes in, and the place for that which goes out
  bool reverse;
};
// The states: bf16 [heads of the range, chunks, rows, width]. That of the first chunk of the walk is not written
// without `first`.
Tensor walk(const MixerCall& call, const ChunkTables& tables, const HeadRange& range, const Walk& walk);

// y_i = f_i φ(x_i)ᵀ S, f = constant · reach.
struct Reading {
  Tensor x, reach, states;
  float constant;
  int empty;     // the chunk whose state is zero and not written, or −1
  bool reverse;  // `reach` rises within a chunk
  // Exactly one of these receives y: f32 as a past; bf16, with its normalizer under the sum norm; bf16 to add to.
  Tensor past = {}, values = {}, normalizer = {}, add_to = {};
};
void read(const MixerCall& call, const ChunkTables& tables, const HeadRange& range, const Reading& reading);

// dx_i += f_i ∂/∂x_i φ(x_i)ᵀ S u_i, where u ends with 1 or −δ, and x·dx/degree · sign to the gradient of the decay.
struct Contraction {
  Tensor x, u, factors, delta, reach, states;
  int empty;
  bool reverse;
  Tensor dx, decay;
  float sign;
};
void contract(const MixerCall& call, const ChunkTables& tables, const HeadRange& range, const Contraction& contraction);

// Whether all factors of tokens [begin, end) are zero; they rise or fall.
__device__ inline bool erased(const float* reach, int64_t begin, int64_t end, bool rises) {
  return reach && reach[rises ? end - 1 : begin] == 0.0f;
}

// 16 × 8 by 8 × 8.
__device__ inline void mma_eight(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

// x as the sum of two bf16: the larger in the lower half.
__device__ inline uint32_t split(float x) {
  const float high = __bfloat162float(__float2bfloat16_rn(x));
  return pack(high, x - high);
}

// The last eight columns of a row of a state.
__device__ inline uint4 last_columns(float z) {
  const uint32_t parts = split(z);
  return make_uint4(twice_low(parts), parts >> 16, 0, 0);
}

// `rows` rows of `vectors` times 8 columns, to rows of `pitch` elements; rows from `valid` on and columns from `dim` on
// become zeros. By all threads of the block.
__device__ inline void copy_rows(bf16* to, int pitch, const Heads<bf16>& from, int64_t b, int64_t h, int first,
                                 int rows, int valid, int column, int vectors, int dim) {
  const bf16* const data = from.row(b, first, h) + column;
  for (int i = static_cast<int>(threadIdx.x); i < rows * vectors; i += static_cast<int>(blockDim.x)) {
    const int row = i / vectors, vector = i - row * vectors;
    const bool inside = row < valid && column + vector * 8 < dim;
    copy_async(to + row * pitch + vector * 8, inside ? data + row * from.token + vector * 8 : from.data, inside);
  }
}

}  // namespace furious::cuda::mma_states
