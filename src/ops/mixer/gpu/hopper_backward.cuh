// What the backward kernels of the parallel form on Hopper share.
#pragma once

#include "ops/mixer/gpu/hopper_parallel.cuh"

namespace furious::cuda {

// What is left of c_ij's factors, besides decay: f' of the squared score gives 2, an exponential's scale comes last.
template <Score kScore>
__host__ __device__ float last_factor(float scale) {
  return kScore == Score::squared ? 2.0f : kScore == Score::exponential ? scale : 1.0f;
}

// The lane's columns 8d and up of a row of a tile that the copy engine wrote.
template <int kPanels>
__device__ float2 pair_at(const unsigned char (&panels)[kPanels][kPanelBytes], int row, int d) {
  const int place = row * 128 + (d % 8 ^ row % 8) * 16 + static_cast<int>(threadIdx.x) % 4 * 4;
  return unpack(*reinterpret_cast<const uint32_t*>(panels[d / 8] + place));
}

// The lane's columns of a row of a result, in pairs; `dim`: columns of the row, a multiple of 8. Those of all rows are
// to be read before the first is stored, behind which they would wait one by one.
template <int kDim>
__device__ void load_row(uint32_t (&to)[kDim / 8], const bf16* row, int dim) {
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(row) + threadIdx.x % 4;
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d)
    if (d * 8 < dim) to[d] = words[d * 4];
}

// One row of a result, added to what the row holds. Returns `product` and the lane's part of row · other, of what is
// new; `other` is row `other_row` of a tile.
template <int kDim>
__device__ float finish_row(const float (&acc)[kDim / 8][4], int u, float factor, const uint32_t (&before)[kDim / 8],
                            bf16* to, const unsigned char (*other)[kDim / 64][kPanelBytes], int other_row, int dim,
                            float product = 0) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(to) + threadIdx.x % 4;
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    const float2 x = {acc[d][u * 2] * factor, acc[d][u * 2 + 1] * factor};
    if (other) {
      const float2 y = pair_at(*other, other_row, d);
      product += x.x * y.x + x.y * y.y;
    }
    const float2 z = unpack(before[d]);
    if (d * 8 < dim) words[d * 4] = pack(x.x + z.x, x.y + z.y);
  }
  return product;
}

// The last tile of queries that sees a block of keys up to last_key. It falls nowhere from a block to the next, so
// that the keys which reach a tile of queries follow each other. By a warp.
__device__ inline int last_tile_of(const Parallel& m, const Work& work, int last_key) {
  const double* const a = m.decay_of(work.batch, work.head);
  int end = m.ends ? m.ends[work.batch * m.length + last_key] : static_cast<int>(m.length);
  if (m.chunk) end = min(end, (last_key / m.chunk + 1) * m.chunk);
  const int last_tile = (end - 1) / kTile;
  if (!a) return last_tile;
  const double reference = a[last_key];
  return last_tile - count_erased_by_warp(last_tile - last_key / kTile, [&](int i) {
           return static_cast<float>(a[(last_tile - i) * kTile] - reference) < static_cast<float>(kErased);
         });
}

// By one warp: has tiles of queries and gradients copied, with what belongs to their columns, for the keys of `work`.
template <Score kScore, class Shared, class First>
__device__ void copy_queries(Shared& shared, Pipe<Shared::kStages>& pipe, const CUtensorMap& q, const CUtensorMap& g,
                             const Parallel& m, const Work& work, First&& first_is) {
  constexpr bool kExponential = kScore == Score::exponential;
  const int lane = static_cast<int>(threadIdx.x) % 32, length = static_cast<int>(m.length), last_key = work.end - 1;
  const double* const a = m.decay_of(work.batch, work.head);
  const int64_t head_row = (static_cast<int64_t>(work.batch) * m.heads + work.head) * m.length;
  const float scale = score_scale<kScore>(m.scale);
  const double reference = a ? a[last_key] : 0.0;
  const int last_tile = last_tile_of(m, work, last_key);
  first_is(last_tile);
  // Read one tile ahead.
  double decay[2] = {};
  float delta[2] = {}, row_factor[2] = {1, 1};  // 1/n, or log2 of n for exponentials
  int begin[2] = {};
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(max(tile, 0) * kTile + i * 32 + lane, length - 1);
      if (a) decay[i] = a[row];
      delta[i] = m.delta[head_row + row];
      if (kExponential)
        row_factor[i] = m.log_sum[head_row + row];
      else if (m.inverse)
        row_factor[i] = m.inverse[head_row + row];
      if (m.starts) begin[i] = m.starts[work.batch * m.length + row];
    }
  };
  load(last_tile);
  const int q_head = work.head / m.q.group;
  for (int tile = last_tile; tile >= work.row0 / kTile; --tile, pipe.next()) {
    const int stage = pipe.stage, row0 = tile * kTile;
    Barrier& full = shared.sync.full[stage];
    if (pipe.phase > 0) shared.sync.empty[stage].wait(pipe.phase - 1);
    if (lane == 0) {
      full.arrive_and_expect(2 * Shared::kPanels * kPanelBytes);
      for (int panel = 0; panel < Shared::kPanels; ++panel) {
        copy_tile(shared.queries[stage][panel], q, full, panel * 64, row0, q_head, work.batch);
        copy_tile(shared.gradients[stage][panel], g, full, panel * 64, row0, work.head, work.batch);
      }
    }
    __syncwarp();
    const double first = __shfl_sync(0xFFFFFFFFu, decay[0], 0);
    const double base = row0 <= last_key ? first : reference;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = i * 32 + lane;
      const bool valid = row0 + row < length;
      const float local = static_cast<float>(decay[i] - reference) * kLog2e;
      const float factor = kExponential ? 1.0f : scale * row_factor[i];
      const float column =
          kExponential ? local - row_factor[i] : factor * fast_exp2(static_cast<float>(decay[i] - base) * kLog2e);
      shared.columns[stage][row] = valid ? column : kExponential ? -INFINITY : 0.0f;
      shared.locals[stage][row] = local;
      shared.scales[stage][row] = valid ? factor : 0.0f;
      shared.deltas[stage][row] = valid ? delta[i] : 0.0f;
      shared.begins[stage][row] = valid ? begin[i] : 0;
    }
    load(tile - 1);
    full.arrive();
  }
}

}  // namespace furious::cuda
