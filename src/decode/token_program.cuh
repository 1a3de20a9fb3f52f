// Operations of a TokenProgram: what the kernels' launchers hand over while one is made, instead of launching.
#pragma once

#include "decode/token_linear.cuh"
#include "decode/token_program.h"
#include "ops/mixer/gpu/recurrent.cuh"

namespace furious::cuda {

struct EmbeddingCall {
  const float* table;
  __nv_bfloat16* out;  // [batch, dim]
  int batch, dim;
};

// A step of a mixer's cache that has a state.
struct MixerStep {
  Cache cache;
  Token<__nv_bfloat16> q, k, v;
  const float* log_decay;  // [rows, heads]
  const int32_t* rows;     // the slot of each
  int heads;               // of all rows
};

// The same as an operation of the program. The blocks of a head (of one sequence) each take some rows of its state
// and some tokens of its window, and write what they come to: [batch, heads, blocks, v_dim + 1], y and then n. Then
// each adds up some columns.
struct StepCall {
  Cache cache;
  Token<uint32_t> q, k, v;  // as they travel between the blocks of the program
  const float* log_decay;
  const int32_t* slot_of_row;
  int heads;                            // of all rows
  int blocks, rows, tokens;             // of a head, and of the state and the window for each
  int columns;                          // of the result that each adds up
  int q_sharers, k_sharers, v_sharers;  // heads that share one
  int rows_at_once;                     // that a warp reads, with four columns to a lane
  int part_of_row;                      // 2^16 times the part of a row that those are
  int partial_numbers;                  // of a head
  uint64_t* partials;                   // as all f32 numbers travel
  uint32_t* out;                        // [batch, heads * v_dim], as activations do
};

bool recording_program();
void record(const EmbeddingCall& call);
void record(const LinearCall& call);
void record(const MixerStep& step, const Tensor& out);

}  // namespace furious::cuda
