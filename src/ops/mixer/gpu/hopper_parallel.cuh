// What the kernels of the parallel form on Hopper share.
//
// A block owns rows (queries, or keys) of one head. Its warpgroups multiply, 64 rows each; the first warp of one more
// has tiles of the other side copied ahead and works out their decay factors. Tiles far from the block's own rows take
// their factors relative to A at the block's edge, and sums over them are kept relative to it; tiles beside the own
// rows take theirs relative to their own edge, times a factor per row; only the diagonal tile has an exponential per
// element. All factors are at most 1.
#pragma once

#include "gpu/hopper.cuh"
#include "gpu/tensor_map.h"
#include "ops/mixer/gpu/parallel-inl.cuh"

namespace furious::cuda {

// Where a tile lies relative to a warpgroup's rows, and whether documents end in it.
enum class Place { far, near, near_documents, diagonal };
template <Place kPlace>
using PlaceConstant = std::integral_constant<Place, kPlace>;

// Calls f with the place as a constant.
template <class F>
__device__ void with_place(bool diagonal, bool documents, bool near, F&& f) {
  if (diagonal)
    f(PlaceConstant<Place::diagonal>());
  else if (documents)
    f(PlaceConstant<Place::near_documents>());
  else if (near)
    f(PlaceConstant<Place::near>());
  else
    f(PlaceConstant<Place::far>());
}

// The warp's 16 rows of 64 as operand A. Kernels load them anew for every tile: the assembler of CUDA 13.0 takes the
// registers of an operand that stays the same through a loop for other things (seen: wrong results from the second turn
// on).
template <int kSteps>
__device__ void load_rows(uint32_t (&rows)[kSteps][4], unsigned char (&panels)[kSteps / 4][kPanelBytes]) {
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) panel_of(panels[step / 4]).a_fragment(rows[step], row, step % 4);
}

// Operands of a tile of kDim columns: of the product with the tile transposed, and with the tile as it is.
__device__ inline uint64_t columns_at(uint64_t tile, int step) {
  return tile + (step / 4 * kPanelBytes + step % 4 * 32) / 16;
}
__device__ inline uint64_t rows_at(uint64_t tile, int step) {
  return tile + step * 2048 / 16;
}

// The rows of a block: blocks of a chunk (or of the whole length) follow each other, the longest work first. They begin
// with a tile, so the first of them may have rows before the first query, which are zeros and are not stored.
struct RowBlock {
  int row0, end;
};
template <int kRows, bool kLastFirst>
__device__ RowBlock row_block(const Parallel& m) {
  const int length = static_cast<int>(m.length), chunk = m.chunk ? m.chunk : length;
  const int begin = m.first / kTile * kTile;
  const int blocks = (min(chunk, length) - begin + kRows - 1) / kRows;
  const int c = static_cast<int>(blockIdx.x) / blocks, i = static_cast<int>(blockIdx.x) % blocks;
  const int row0 = begin + c * chunk + (kLastFirst ? blocks - 1 - i : i) * kRows;
  return {row0, min(min(row0 + kRows, (c + 1) * chunk), length)};
}
template <int kRows>
dim3 row_blocks(const MixerShape& shape, int64_t chunk) {
  const int64_t own = chunk ? chunk : shape.length;
  const int64_t begin = shape.first_query / kTile * kTile;
  const int64_t blocks = blocks_for(std::min(own, shape.length) - begin, kRows) * blocks_for(shape.length, own);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(shape.heads), static_cast<unsigned>(shape.batch));
}

// The stages of the tiles in shared memory, one after the other, and how often they were used.
template <int kStages>
struct Pipe {
  int stage = 0, phase = 0;

  __device__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    ++phase;
  }
};

// Of tiles `first` + step·i, i < count, how many decay has erased; they come first in that order. By a warp.
template <class Erased>
__device__ int count_erased_by_warp(int count, Erased&& erased) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int total = 0;
  for (int found = 32; found == 32; total += found)
    found = __popc(__ballot_sync(0xFFFFFFFFu, total + lane < count && erased(total + lane)));
  return total;
}

// By all threads, before anything else uses the barriers: every thread of the warp that copies fills a stage, and every
// thread of `readers` warpgroups lets go of it, so that each of them has said so of its own reads and writes. The
// block's own rows are ready when the copies have come and the warp that issued them has arrived once more.
template <class Shared>
__device__ void init_barriers(Shared& shared, int readers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      shared.full[i].init(32);
      shared.empty[i].init(128 * readers);
    }
    shared.ready.init(2);
    fence_barriers();
  }
  __syncthreads();
}

// By one warp: has tiles of keys and values copied, with the decay of their columns, for the queries of `rows`.
template <Score kScore, class Shared>
__device__ void copy_keys(Shared& shared, const CUtensorMap& k, const CUtensorMap& v, const Parallel& m,
                          const RowBlock& rows) {
  constexpr bool kExponential = kScore == Score::exponential;
  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32, length = static_cast<int>(m.length);
  const double* const a = m.decay_of(b, h);
  const float scale = score_scale<kScore>(m.scale);
  const double reference = a ? a[rows.row0] : 0.0;
  int first = m.starts ? m.starts[b * m.length + rows.row0] : 0;
  if (m.chunk) first = max(first, rows.row0 / m.chunk * m.chunk);
  first /= kTile;
  if (a)
    first += count_erased_by_warp(rows.row0 / kTile - first, [&](int i) {
      return static_cast<float>(reference - a[(first + i) * kTile + kTile - 1]) < static_cast<float>(kErased);
    });
  if (lane == 0) {
    shared.first_tile = first;
    shared.ready.arrive();
  }
  Pipe<Shared::kStages> pipe;
  for (int tile = first; tile <= (rows.end - 1) / kTile; ++tile, pipe.next()) {
    const int stage = pipe.stage, key0 = tile * kTile;
    const double base = a && key0 >= rows.row0 ? a[min(key0 + kTile, length) - 1] : reference;
    float column[2], local[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      column[i] = kExponential ? 0.0f : scale;
      local[i] = 0;
      if (!a) continue;
      const double own = a[min(key0 + i * 32 + lane, length - 1)];
      local[i] = static_cast<float>(own - reference) * kLog2e;
      column[i] = kExponential ? -local[i] : scale * fast_exp2(static_cast<float>(base - own) * kLog2e);
    }
    if (pipe.phase > 0) shared.empty[stage].wait(pipe.phase - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.columns[stage][i * 32 + lane] = column[i];
      shared.locals[stage][i * 32 + lane] = local[i];
    }
    if (lane > 0) shared.full[stage].arrive();
    if (lane == 0) {
      shared.full[stage].arrive_and_expect(2 * Shared::kPanels * kPanelBytes);
      for (int panel = 0; panel < Shared::kPanels; ++panel) {
        copy_tile(shared.keys[stage][panel], k, shared.full[stage], panel * 64, key0, h / m.k.group, b);
        copy_tile(shared.values[stage][panel], v, shared.full[stage], panel * 64, key0, h / m.v.group, b);
      }
    }
    __syncwarp();
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

template <int kN>
__device__ void clear(float (&acc)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i][e] = 0;
}

// The column of a tile that element e of group n of a result belongs to, less that of the lane's first: a constant.
__device__ constexpr int column_of(int n, int e) {
  return n * 8 + e % 2;
}

}  // namespace furious::cuda
