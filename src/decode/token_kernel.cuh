// The kernel of a TokenProgram, and the description of the work that it is given.
#pragma once

#include "decode/token_linear.cuh"
#include "ops/mixer/gpu/recurrent.cuh"
#include "ops/mixer/polynomial.h"

namespace furious::cuda {

inline constexpr int kPieceSlots = 8;  // pieces whose descriptions are in shared memory
inline constexpr int kMostGroups = 4;  // of eight rows of weights, in a piece
inline constexpr int kDescriptionBytes = 512;
inline constexpr int kChunkTokens = 64;  // of a long window, that are copied and used together
inline constexpr int kMostStages = 4;    // of chunks in shared memory
inline constexpr int kFewestRows = 64;   // of a state, in a piece
inline constexpr int kMostStateRows = 512;
inline constexpr int kLargestHead = 128;
static_assert(8 * kMostGroups == 32);
inline constexpr int kStateCycles = 62;         // for 1 KiB of a state or of the window beside it
inline constexpr int kCopies = 4;               // of a buffer for words that all blocks read
inline constexpr int64_t kCopyBytes = 1 << 20;  // between a word and its next copy

// Units are eight neighbouring columns, 16 bytes. Rows of weights are padded so that eight of them fall into different
// banks.
__host__ __device__ inline int row_units(int k) {
  return (k + 31) / 32 * 4 + 1;
}

struct EmbeddingCall {
  const float* table;
  uint32_t* out;  // tagged words [rows, dim]
  int rows, dim;
};

// Where the words of a value lie: heads of one row follow each other.
struct TaggedRows {
  const uint32_t* data;
  int row_stride;
  int sharers;  // heads of the mixer that share a head of this value
};

// A step of a mixer's cache. The blocks of a head (of one row) each have some rows of its state and some tokens of its
// window, and write what they come to: [rows, heads, blocks, partial_width], which is y, n, and under softmax the
// largest exponent. Then each adds up some columns.
struct StepCall {
  Cache cache;
  Polynomial polynomial;  // the score, if it is not exponential
  bool softmax, halves;   // halves: pairs that rotary positions turn
  TaggedRows q, k, v;
  const uint64_t *log_decay, *dt;  // [rows, heads], f32 under a tag; null without
  const float* d;                  // [heads, v_dim]; null without
  const double* turns;             // of each pair of q and k for each position; null without rotary positions
  int inputs_from;                 // the operation that writes all of these inputs
  int heads;                       // of all rows
  int blocks, rows, columns;       // of a head, and for each the rows of the state and the columns that it adds up
  int first_tokens;                // of a block's tokens, that come with the first rows of the state
  int chunk_tokens, stages;        // the others come in chunks, into so many places in turn
  int window_cycles;               // for 1 KiB of a window: how fast it is copied
  int rows_at_once;                // that a warp reads, with four columns to a lane
  int part_of_row;                 // 2^16 times the part of a row that those are
  int partial_width;
  uint64_t* partials;
  uint32_t* out;  // tagged words [rows, heads * v_dim]
};

// Bytes of some tokens of a window in shared memory: k, v, and with decay f64 sums of the log-decays.
__host__ __device__ inline int window_bytes(const Cache& cache, int tokens) {
  return tokens * ((cache.qk_dim + cache.v_dim) * 2 + (cache.decay ? 8 : 0));
}
// Bytes of a row of a state with its normalizer.
__host__ __device__ inline int state_row_bytes(const Cache& cache) {
  return padded(cache.v_dim) * 4 + 4;
}

// Some tiles of eight rows of a product, or some rows of a state and the tokens of a window.
struct TokenPiece {
  enum class Kind : uint8_t { embedding, linear, step };
  int needs;  // pieces that must have been used before this one is fetched; the fetching warps rely on its place here
  Kind kind;
  bool first, last;                      // of its operation
  bool final;                            // of the last operation
  int operation;                         // its number
  int at;                                // byte of the ring
  int begin, count;                      // tiles or rows of each block's share: the first, and how many
  int share;                             // tiles of a block
  int x_from, gate_from, residual_from;  // the operations that write what a product reads
  const uint32_t* residual;              // tagged words, as its output
  union {
    EmbeddingCall embedding;
    LinearCall linear;
    StepCall step;
  };
};
static_assert(sizeof(TokenPiece) <= kDescriptionBytes && alignof(TokenPiece) <= 16);

// What all blocks do for a token.
struct TokenWork {
  const uint4* pieces;  // each of kDescriptionBytes
  int count;
  unsigned* tags;             // of each block: the first of this token
  SlotRecord* const* caches;  // records of every mixer's slots
  int cache_count;
  const int32_t* slots;  // of the rows
  int rows;
  int warp_activations;  // units of shared memory of each warp
  int sums;              // bytes of it; the ring follows
  int operations;
  int weight_cycles;   // for 1 KiB of weights: how fast they are copied
  const int32_t* ids;  // of the tokens
  int id_stride;
};

// How a block's dynamic shared memory is divided, in bytes.
struct SharedMemoryPlan {
  static constexpr int kBehind = 256;  // that may be read behind a piece's weights, without effect
  int warp_activations, sums, ring;
  int all;  // the same for all programs: it is set for the kernel, not for a launch

  SharedMemoryPlan(int64_t rows, int64_t widest);
  int largest() const { return ring / 2 - kBehind; }  // piece: while one is used another is fetched
};

// Blocks that the current device can run at once, each with so many bytes of shared memory.
int resident_token_blocks(int bytes);
// Whether the current device has the kernel's code, and runs a block of it on every multiprocessor at once.
bool has_token_kernel();
// In the order of the device's other work. `bytes`: SharedMemoryPlan::all.
// False, with nothing launched, where the blocks do not all fit on the device at once.
bool run_token_kernel(Device device, const TokenWork& work, int bytes);

}  // namespace furious::cuda
