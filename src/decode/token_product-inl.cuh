// Products of the token kernel: the warps that multiply, and those that finish what the others have multiplied.
#pragma once

#include "decode/token_memory-inl.cuh"

namespace furious::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Activations of a program, wherever a call speaks of bf16, are words.
__device__ const uint32_t* words(const __nv_bfloat16* x) {
  return reinterpret_cast<const uint32_t*>(x);
}

// The columns of a product that a warp has: units [first, end).
struct Columns {
  int first, end;

  __device__ explicit Columns(int k) {
    const int each = warp_units(k);
    first = warp_of_thread() * each;
    end = min(k / 8, first + each);
  }
};

// The lanes of a row of the batch are a power of two.
__device__ int lane_bits(int batch) {
  return batch == 1 ? 5 : batch == 2 ? 4 : batch <= 4 ? 3 : 2;
}

// Waits for a warp's columns of the input and writes them to its shared memory, with the norm's weight multiplied in;
// zeros up to whole fours. Returns the square sum of those that the lane has loaded.
__device__ float load_input(const LinearCall& call, const Columns& own, const Tagged& awaited,
                            const Tagged& gate_awaited, uint4* activations, int stride) {
  const int bits = lane_bits(call.batch), lanes = 1 << bits, sequence = lane_of_thread() >> bits;
  const bool has_norm = call.norm != nullptr, has_gate = call.gate != nullptr;
  float squares = 0;
  if (sequence < call.batch) {
    int unit = own.first + (lane_of_thread() & (lanes - 1));
    const uint4* x = reinterpret_cast<const uint4*>(words(call.x) + sequence * call.x_stride) + 2 * unit;
    uint4* to = activations + sequence * stride + unit - own.first;
#pragma unroll 1
    for (; unit < (own.end + 3 & ~3); unit += lanes) {
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (unit < own.end) {
        float norm[8] = {1, 1, 1, 1, 1, 1, 1, 1}, factors[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        if (has_norm) load_norm(norm, call.norm, unit);
        if (has_gate)
          gate_factors(factors,
                       gate_awaited.wait_eight(
                           reinterpret_cast<const uint4*>(words(call.gate) + sequence * call.gate_stride) + 2 * unit));
        eight = awaited.wait_eight(x);
        if (has_norm || has_gate) eight = normed(eight, factors, norm, squares);
      }
      *to = eight;
      to += lanes;
      x += 2 * lanes;
    }
  }
  __syncwarp();
  return squares;
}

// The sum over the lanes of a row of the batch, in all of them.
__device__ float sum_of_row(float x, int batch) {
  const int lanes = 1 << lane_bits(batch);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, x, offset);
    x += offset < lanes ? other : 0.0f;
  }
  return x;
}

__device__ float sum_of(const float* warps) {
  const float4* const four = reinterpret_cast<const float4*>(warps);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps / 4; ++i) sum += (four[i].x + four[i].y) + (four[i].z + four[i].w);
  return sum;
}

// The warps share out the columns, and each reads its own of the input as they come. Weights are the tensor cores'
// first factor, 16 rows of them, and the activations of the batch the second. What rows beyond the last give is not
// read.
__device__ void multiply(const TokenPiece& piece, Barrier& used, const uint4* weights, uint4* activations,
                         WarpSums* sums, unsigned first_tag, ThreadState& state, Memory& memory) {
  const LinearCall& call = piece.linear;
  const Tiles tiles(piece);
  if (tiles.first >= tiles.end) return used.arrive();
  const int lane = lane_of_thread(), batch = call.batch, stride = row_units(call.k);
  const int groups = (tiles.end - tiles.first) * (call.pairs() ? 2 : 1);
  const bool wide = groups > 2;  // more than 16 rows
  const Columns own(call.k);
  const int x_stride = warp_units(call.k) + 1;
  // A lane has the address of a unit of a row of weights: of rows 0 to 7, 8 to 15 and then the same of the next unit;
  // or of a row of the batch. Tiles are 16 rows and four units: of two groups of rows in turn, or of the same rows
  // further on.
  const int row = lane % 8, lower = lane / 8 % 2;
  const uint4* w_even =
      weights + (row + (groups > 1 ? lower * 8 : 0)) * stride + (own.first < own.end ? own.first : 0) + lane / 16;
  const uint4* w_odd = wide ? w_even + (16 - (groups > 3 ? 0 : lower * 8)) * stride : w_even + 4;
  const uint4* x_even = activations + min(row, batch - 1) * x_stride + lane / 8;
  const int further = wide ? 4 : 8, x_odd = wide ? 0 : 4;
  // Where this warp's sums go, and whose they are.
  const unsigned product = state.products++;
  sums += product % 2 * batch;
  const int of = lane % 4 * 2, squares_of = lane >> lane_bits(batch);
  float* const to = in_register(&sums[of].rows[lane / 4][warp_of_thread()]);
  if (product >= 2) memory.finished[product % 2].wait(static_cast<int>(product / 2) - 1);

  constexpr int kTiles = 64 / kWarps;  // that are loaded before the input is waited for
  float products[4][4] = {};
  bool fresh = piece.first, more;
  int unit = own.first;
  do {
    const int left = own.end - unit;
    uint32_t w[kTiles][2][4];
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      load_matrices(w[i][0], w_even);
      load_matrices(w[i][1], w_even + 2);
      load_matrices(w[i + 1][0], w_odd);
      load_matrices(w[i + 1][1], w_odd + 2);
      // A few units behind the last may be read (SharedMemoryPlan::kBehind), but not many: then the first are read
      // again.
      const int step = i % 4 == 0 || (i + 2) / 2 * further < left ? further : -further;
      w_even += step;
      w_odd += step;
    }
    const int next = unit + kTiles / 2 * further;
    more = next < own.end;
    if (!more) used.arrive();
    if (fresh)
      state.squares = load_input(call, own, Tagged(first_tag + piece.x_from), Tagged(first_tag + piece.gate_from),
                                 activations, x_stride);
    fresh = false;
#pragma unroll
    for (int first = 0; first < kTiles; first += 4) {
      if (first / 2 * further >= left) break;
      uint32_t x[4][4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        load_matrices(x[i], x_even);
        load_matrices(x[i + 1], x_even + x_odd);
        x_even += further;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((first + i) / 2 * further + i % 2 * x_odd >= left) break;
        mma(products[i], w[first + i][0], x[i][0], x[i][1]);
        mma(products[i], w[first + i][1], x[i][2], x[i][3]);
      }
    }
    unit = next;
  } while (more);
  constexpr int kEight = 8 * (kWarps + 4), kSequence = sizeof(WarpSums) / sizeof(float);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    products[0][i] += products[2][i];
    products[1][i] += products[3][i];
    if (!wide) products[0][i] += products[1][i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (of + i < batch) {
      to[i * kSequence] = products[0][i];
      to[i * kSequence + kEight] = products[0][2 + i];
      if (wide) {
        to[i * kSequence + 2 * kEight] = products[1][i];
        to[i * kSequence + 3 * kEight] = products[1][2 + i];
      }
    }
  if (call.norm != nullptr) {
    if (piece.first) state.squares = sum_of_row(state.squares, batch);
    if (squares_of < batch) sums[squares_of].squares[warp_of_thread()] = state.squares;
  }
  memory.multiplied[product % 2].arrive();
}

// A warp finishes the results of some rows of the batch: a lane for each element.
__device__ void finish_product(const TokenPiece& piece, Barrier& used, const WarpSums* sums, unsigned first_tag,
                               unsigned& products, Memory& memory) {
  const LinearCall& call = piece.linear;
  const int lane = lane_of_thread(), warp = warp_of_thread() - kWarps;
  const Tiles tiles(piece);
  used.arrive();
  if (tiles.first >= tiles.end) return;
  const unsigned product = products++;
  const bool pairs = call.pairs();
  const int tile = tiles.first + lane / 8;
  // Everything that is known of the operation is loaded before its sums are waited for.
  const LinearPart part = call.part_of(min(tile, tiles.end - 1));
  const bool normed = call.norm != nullptr;
  const float width = static_cast<float>(call.k), eps = call.eps;
  const Tagged written(first_tag + piece.operation), residual(first_tag + piece.residual_from);
  const int row = (tile - part.first_tile) * 8 + lane % 8;
  const bool valid = tile < tiles.end && row < part.rows;
  // The rows of a pair's tile follow each other: eight of the gate, eight of the other factor.
  const int result = pairs ? lane / 8 * 16 + lane % 8 : lane;
  Before next;
  float next_residual = 0;
  const auto load_next = [&](int sequence) {
    if (!valid || sequence >= call.batch) return;
    next = load_before(part, sequence, row);
    if (part.kind == TokenPart::Kind::add)
      next_residual = residual.wait_activation(piece.residual + sequence * part.rows + row);
  };
#pragma unroll 1
  for (int sequence = warp - kFinishers; sequence < call.batch; sequence += kFinishers) {
    const Before before = next;
    const float old = next_residual;
    load_next(sequence + kFinishers);
    if (sequence < 0) continue;
    const WarpSums& all = *in_register(&sums[product % 2 * call.batch + sequence]);
    memory.multiplied[product % 2].wait(static_cast<int>(product / 2));
    if (!valid) continue;
    float sum = sum_of(all.rows[result]), other = pairs ? sum_of(all.rows[result + 8]) : 0;
    if (normed) {
      const float scale = rsqrtf(__fdividef(sum_of(all.squares), width) + eps);
      sum *= scale;
      other *= scale;
    }
    finish(part, sequence, row, sum, other, old, before, written);
  }
  memory.multiplied[product % 2].wait(static_cast<int>(product / 2));  // where a warp has no row
  memory.finished[product % 2].arrive();
}

#endif

}  // namespace
}  // namespace furious::cuda
