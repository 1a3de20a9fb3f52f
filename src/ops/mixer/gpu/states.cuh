// What the kernels of the chunked form on Hopper share.
//
// The state of a squared score, S[a, b, :] = Σ_j w_j k_a k_b v_j, is symmetric in a and b. With a and b in blocks of 16
// only the blocks A ≤ B are kept, in tiles of 4 a × 16 b × 64 values (a tile: 64 rows of 64 columns in the layout of
// hopper.cuh). Tiles of A < B count twice, and hold twice the sum. Of one a after another, those with the same four a
// follow each other: A, then the four a in A, then B. Before them lies the tile of the normalizer, Z[a, b] = Σ_j w_j
// k_a k_b, all of it. The state of a linear score is a single tile, S[a, :].
#pragma once

#include "gpu/hopper.cuh"
#include "gpu/tensor_map.h"
#include "ops/mixer/gpu/states.h"

namespace furious::cuda {

using bf16 = __nv_bfloat16;

constexpr int kTileElements = kPieceRows * 64;
constexpr int kSquaredTiles = 41;

// Of the tiles of a squared score, the first with block A.
__host__ __device__ constexpr int first_tile_of(int block) {
  return 1 + 16 * block - 2 * block * (block - 1);
}

// Products of two bf16 each, rounded once.
__device__ inline uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
__device__ inline uint32_t twice_low(uint32_t x) {
  return __byte_perm(x, x, 0x1010);
}
__device__ inline uint32_t twice_high(uint32_t x) {
  return __byte_perm(x, x, 0x3232);
}
__device__ inline float low_of(uint32_t x) {
  return __uint_as_float(x << 16);
}
__device__ inline float high_of(uint32_t x) {
  return __uint_as_float(x & 0xFFFF0000u);
}

// Bytes that follow each other, in multiples of 16, to and from shared memory.
__device__ inline void copy_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier.word))
               : "memory");
}
__device__ inline void store_bytes(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Until the stores have read shared memory, or are done.
__device__ inline void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

// One of `length` floats, or 0 behind the last.
__device__ inline void copy_float(float* to, const float* from, int i, int length) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(to)),
               "l"(from + min(i, length - 1)), "r"(i < length ? 4 : 0));
}
// Arrives when the copies that this thread has begun are done.
__device__ inline void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(&barrier.word))
               : "memory");
}

// The threads of a warpgroup meet.
template <int kGroup>
__device__ inline void meet() {
  asm volatile("bar.sync %0, 128;\n" ::"n"(kGroup + 1) : "memory");
}

// The chunks of one head, one after another, in the order that the state goes through them.
struct Chunks {
  int length, chunk, chunks;
  bool reverse;

  __device__ int at(int i) const { return reverse ? chunks - 1 - i : i; }
  __device__ int tiles(int c) const { return (min(chunk, length - c * chunk) + kPieceRows - 1) / kPieceRows; }
};

// The row of a state (features.h) that holds the pair (a, b).
__device__ inline int pair_row(int a, int b) {
  const int low = min(a, b), high = max(a, b);
  return low * 64 - low * (low - 1) / 2 + high - low;
}

// One walk of a state through the chunks: S ← through · S + Σ_j w_j φ(x_j) [u_j, e_j]ᵀ with w = constant · factors, and
// e = 1 or, where it is there, −shift.
struct StateWalk {
  Tensor x, u, factors, shift;
  Tensor first, last;  // f32: the state that comes in, and the place for that which goes out
  float constant;
  bool reverse;
};
Tensor walk_states(const MixerCall& call, const ChunkTables& factors, const StateWalk& walk);

}  // namespace furious::cuda
