// The kernel of a TokenProgram, and what it is given to do.
#pragma once

#include "decode/token_program.cuh"

namespace furious::cuda {

inline constexpr int kSlots = 8;       // pieces that are known at once
inline constexpr int kMostGroups = 4;  // of eight rows of weights, in a piece
inline constexpr int kDescriptionBytes = 512;
inline constexpr int kMostTokens = static_cast<int>(kStepTokens);  // of a window, for a block
inline constexpr int kFewestRows = 64;                             // of a state, in a piece
inline constexpr int kMostRows = 512;                              // the same
inline constexpr int kLargestHead = 128;
static_assert(8 * kMostGroups == 32);
inline constexpr int kCopies = 4;               // of what travels from block to block
inline constexpr int64_t kCopyBytes = 1 << 20;  // between a word and its next copy

// Units are eight neighbouring columns, 16 bytes. Rows of weights lie apart so that eight of them fall into different
// banks.
__host__ __device__ inline int row_units(int k) {
  return (k + 31) / 32 * 4 + 1;
}

// Some tiles of eight rows of a product, or some rows of a state.
struct TokenPiece {
  enum class Kind : uint8_t { embedding, linear, step };
  int needs;  // pieces that must have been used before this one is fetched; it comes first
  Kind kind;
  bool first, last;  // of its operation
  bool final;        // of the last operation
  int operation;     // its number
  int at;            // byte of the ring
  int begin, count;  // tiles or rows: of each block's share, from which one and how many
  int share;         // tiles of a block
  int added_to;      // the operation that wrote what this one adds to
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
  unsigned* tags;            // of each block: the first of this token
  SlotRecord* const* slots;  // of the mixers' caches
  int caches;
  const int32_t* slot_of_row;
  int rows;
  int warp_activations;  // units of shared memory of each warp
  int sums;              // bytes of it; the ring follows
  int operations;
  const int32_t* ids;  // of the tokens
  int id_stride;
};

// Bytes of a block's shared memory.
struct TokenRoom {
  static constexpr int kBehind = 256;  // a piece's weights, that may be read and come to nothing
  int warp_activations, sums, ring;
  int all;  // the same for all programs: it is set for the kernel, not for a launch

  TokenRoom(int64_t batch, int64_t widest);
  int largest() const { return ring / 2 - kBehind; }  // piece: while one is used another is fetched
};

// Blocks that the current device can run at once, each with so many bytes of shared memory.
int resident_token_blocks(int bytes);
// Whether the current device has the kernel's code, and room for a block on every multiprocessor.
bool has_token_kernel();
// In the order of the device's other work. `bytes`: TokenRoom::all.
void run_token_kernel(Device device, const TokenWork& work, int bytes);

}  // namespace furious::cuda
