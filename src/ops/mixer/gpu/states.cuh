// What the kernels of the chunked form on Hopper share.
//
// States are kept in tiles of 64 rows of 64 columns, in the layout of hopper.cuh; what lies outside of narrower heads
// is zero.
//
// That of a squared score, S[a, b, :] = Σ_j w_j k_a k_b v_j, is symmetric in a and b. With a and b in blocks of 16 only
// the blocks A ≤ B are kept, in tiles of 4 a × 16 b × 64 values; of a block A = B, a tile for each four of its first
// eight a, and for its last eight one of 8 a × 8 b, the corner. Who reads them counts twice what is kept once: A < B,
// and in a block A = B the last eight b of the first eight a. Of all tiles those with the same A follow each other:
// first those with B = A, last of them the corner; then of the others those with the same four a; so for each 64
// values. Before them lie the tiles of the normalizer, Z[a, b] = Σ_j w_j k_a k_b, all of it.
//
// That of a linear score, S[a, :], has a tile for each 64 of a, and of the values: a, then values.
#pragma once

#include "gpu/hopper.cuh"
#include "gpu/tensor_map.h"
#include "ops/mixer/features.h"
#include "ops/mixer/gpu/states.h"

namespace furious::cuda {

constexpr int kTileElements = kPanelRows * 64;
constexpr int kMostRows = 256;  // of a block: chunks consist of as many

// Dimensions of a head: of what φ is made of, and of the values.
struct StateDims {
  int qk, v;

  __host__ __device__ int blocks() const { return (qk + 15) / 16; }
  __host__ __device__ int qk_panels() const { return (qk + 63) / 64; }
  __host__ __device__ int v_panels() const { return (v + 63) / 64; }
  // Tiles of a squared score: those of the normalizer, and those for 64 values.
  __host__ __device__ int normalizer_tiles() const { return qk_panels() * qk_panels(); }
  __host__ __device__ int pair_tiles() const { return tiles_before(blocks()); }
  __host__ __device__ int squared_tiles() const { return normalizer_tiles() + v_panels() * pair_tiles(); }
  // Pairs' tiles of the blocks A before this one.
  __host__ __device__ int tiles_before(int block) const { return 4 * first_pair(blocks(), block) - block; }
  // The tile of (a, block B), other than corners, and the corner of a block, of the p-th 64 values.
  __device__ int tile_of(int a, int block, int p) const {
    const int own = a / 16, four = a % 16 / 4;
    const int first = normalizer_tiles() + p * pair_tiles() + tiles_before(own);
    return block == own ? first + four : first + 3 + four * (blocks() - 1 - own) + block - own - 1;
  }
  __device__ int corner_of(int block, int p) const { return tile_of(16 * block, block, p) + 2; }
};
inline StateDims dims_of(const MixerShape& shape) {
  return {static_cast<int>(shape.qk_dim), static_cast<int>(shape.v_dim)};
}

// The chunks of one head, one after another, in the order that the state goes through them.
struct Chunks {
  int length, chunk, chunks;
  bool reverse;

  __device__ int at(int i) const { return reverse ? chunks - 1 - i : i; }
  __device__ int tiles(int c) const { return (min(chunk, length - c * chunk) + kPanelRows - 1) / kPanelRows; }
};

// One walk of a state through the chunks: S ← through · S + Σ_j w_j φ(x_j) [u_j, e_j]ᵀ with w = constant · factors, and
// e = 1 or, where it is defined, −shift. `reach` is the table of `tables` that factors are multiples of.
struct StateWalk {
  Tensor x, u, factors, reach, shift;
  Tensor first, last;  // f32: the state that comes in, and the place for that which goes out
  float constant;
  bool reverse;
};
Tensor walk_states(const MixerCall& call, const ChunkTables& tables, const StateWalk& walk);

}  // namespace furious::cuda
