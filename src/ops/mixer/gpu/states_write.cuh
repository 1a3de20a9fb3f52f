// What the kernels share that write states.
#pragma once

#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/states.cuh"

namespace furious::cuda {

struct WalkArguments {
  const float* factors;  // [batch, heads, length]
  const float* reach;    // the same: where this is 0, so are they
  const float* extra;    // [batch, heads, length], a further factor
  const float* through;  // [batch, heads, chunks]
  const float* first;    // the state that comes in, f32 as in mixer.h
  float* last;           // that which goes out
  bf16* states;
  float* sums;  // of each chunk alone, f32 [batch, heads, chunks, tiles of the sum, 64, 64]
  Chunks chunks;
  StateDims dims;
  int heads, x_group, u_group;
  int rows, columns;          // of a state outside
  int tiles;                  // of a state here
  int summed, summed_across;  // tiles of a sum, and of them those of the same rows
  float constant;

  // The place of (a, b, column) in the state of a squared score outside; −1 where it has none.
  __device__ int64_t place(int64_t head, int a, int b, int column) const {
    if (a >= dims.qk || b >= dims.qk || column >= columns) return -1;
    return (head * rows + pair_index(dims.qk, min(a, b), max(a, b))) * columns + column;
  }
};

// Writes the first tiles of every state: of a linear score all of it, of a squared one the normalizer's, with x for u.
void carry_sums(const MixerCall& call, const CUtensorMap& x, const CUtensorMap& u, const WalkArguments& m);

}  // namespace furious::cuda
