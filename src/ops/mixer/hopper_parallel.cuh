// What the kernels of the parallel form on Hopper share.
#pragma once

#include "ops/mixer/hopper.cuh"
#include "ops/mixer/parallel-inl.cuh"
#include "ops/mixer/tensor_map.h"

namespace furious::cuda {

// The warp's 16 rows of 64 as operand A. Kernels load them anew for every tile: the assembler of CUDA 13.0 takes the
// registers of an operand that stays the same through a loop for other things (seen: wrong results from the second turn
// on).
template <int kSteps>
__device__ void load_rows(uint32_t (&rows)[kSteps][4], unsigned char (&pieces)[kSteps / 4][kPieceBytes]) {
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) piece_of(pieces[step / 4]).a_fragment(rows[step], row, step % 4);
}

// The first tile of keys that queries from `row0` on see: their document, their chunk, and what decay has left.
template <int kThreads>
__device__ int first_key_tile(const Parallel& m, const double* a, const int* starts, int row0) {
  int first = starts ? starts[row0] : 0;
  if (m.chunk) first = max(first, row0 / m.chunk * m.chunk);
  first /= kTile;
  if (!a) return first;
  const double reference = a[row0];
  return first + count_erased<kThreads>(row0 / kTile - first, [&](int i) {
           return static_cast<float>(reference - a[(first + i) * kTile + kTile - 1]) < static_cast<float>(kErased);
         });
}

// Two columns' worth of decay per lane: of keys lane and lane + 32 of a tile, for queries from `row0` on. Tiles before
// row0 take their factors relative to A at row0, `reference`, tiles from there on relative to A at their last key: the
// factors, and those of the rows that go with them, are at most 1.
struct KeyFactors {
  float column[2], local[2];

  __device__ void store(float* columns, float* locals) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      columns[i * 32 + lane] = column[i];
      locals[i * 32 + lane] = local[i];
    }
  }
};
template <Score kScore>
__device__ KeyFactors key_factors(const double* a, int key0, int row0, int length, double reference, float scale) {
  constexpr bool kExponential = kScore == Score::exponential;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  KeyFactors f;
  const double base = a && key0 >= row0 ? a[min(key0 + kTile, length) - 1] : reference;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    f.column[i] = kExponential ? 0.0f : scale;
    f.local[i] = 0;
    if (!a) continue;
    const double own = a[min(key0 + i * 32 + lane, length - 1)];
    f.local[i] = static_cast<float>(own - reference);
    f.column[i] = kExponential ? -f.local[i] * kLog2e : scale * __expf(static_cast<float>(base - own));
  }
  return f;
}

// By all threads, before anything else uses the barriers: every warp of `readers` warpgroups lets go of a stage.
template <class Shared>
__device__ void init_barriers(Shared& shared, int readers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4 * readers);
    }
    shared.ready.init(1);
    fence_barriers();
  }
  __syncthreads();
}

// By one warp: has tiles of keys and values copied, with their decay, for queries from `row0` on.
template <Score kScore, class Shared>
__device__ void copy_keys(Shared& shared, const CUtensorMap& k, const CUtensorMap& v, const Parallel& m,
                          const double* a, int first_tile, int last_tile, int row0, double reference, float scale) {
  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  for (int tile = first_tile; tile <= last_tile; ++tile) {
    const int turn = tile - first_tile, stage = turn % Shared::kStages, key0 = tile * kTile;
    const KeyFactors factors = key_factors<kScore>(a, key0, row0, static_cast<int>(m.length), reference, scale);
    if (turn >= Shared::kStages) shared.empty[stage].wait(turn / Shared::kStages - 1);
    factors.store(shared.columns[stage], shared.locals[stage]);
    __syncwarp();
    if (threadIdx.x % 32 != 0) continue;
    shared.full[stage].arrive_and_expect(2 * Shared::kPieces * kPieceBytes);
    for (int piece = 0; piece < Shared::kPieces; ++piece) {
      copy_tile(shared.keys[stage][piece], k, shared.full[stage], piece * 64, key0, h / m.k.group, b);
      copy_tile(shared.values[stage][piece], v, shared.full[stage], piece * 64, key0, h / m.v.group, b);
    }
  }
}

// Results of a product as the operand A of the next: 16 columns each.
template <int kN>
__device__ void pack_rows(uint32_t (&p)[kN / 2][4], const float (&s)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    p[i][0] = pack(s[2 * i][0], s[2 * i][1]);
    p[i][1] = pack(s[2 * i][2], s[2 * i][3]);
    p[i][2] = pack(s[2 * i + 1][0], s[2 * i + 1][1]);
    p[i][3] = pack(s[2 * i + 1][2], s[2 * i + 1][3]);
  }
}

__device__ inline float2 unpack(uint32_t x) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x));
}

}  // namespace furious::cuda
