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
#include "ops/mixer/features.h"
#include "ops/mixer/gpu/states.h"

namespace furious::cuda {

constexpr int kTileElements = kPanelRows * 64;
// Blocks of 16 a and b, in the order of features.h: four tiles for each, after that of the normalizer.
constexpr int kStateBlocks = 4;
constexpr int kSquaredTiles = 1 + 4 * first_pair(kStateBlocks, kStateBlocks);
constexpr int kPairs = first_pair(64, 64);  // rows of the state as features.h orders them

// Of the tiles of a squared score, the first with block A.
__host__ __device__ constexpr int first_tile_of(int block) {
  return 1 + 4 * first_pair(kStateBlocks, block);
}

// The chunks of one head, one after another, in the order that the state goes through them.
struct Chunks {
  int length, chunk, chunks;
  bool reverse;

  __device__ int at(int i) const { return reverse ? chunks - 1 - i : i; }
  __device__ int tiles(int c) const { return (min(chunk, length - c * chunk) + kPanelRows - 1) / kPanelRows; }
};

// The row of a state, as features.h orders them, that holds the pair (a, b).
__device__ inline int pair_row(int a, int b) {
  return pair_index(64, min(a, b), max(a, b));
}

// One walk of a state through the chunks: S ← through · S + Σ_j w_j φ(x_j) [u_j, e_j]ᵀ with w = constant · factors, and
// e = 1 or, where it is defined, −shift.
struct StateWalk {
  Tensor x, u, factors, shift;
  Tensor first, last;  // f32: the state that comes in, and the place for that which goes out
  float constant;
  bool reverse;
};
Tensor walk_states(const MixerCall& call, const ChunkTables& factors, const StateWalk& walk);

}  // namespace furious::cuda
