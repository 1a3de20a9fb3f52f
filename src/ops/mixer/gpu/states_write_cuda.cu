// The state before every chunk: S ← through · S + Σ_j w_j φ(x_j) u_jᵀ, with (k, v) from the first chunk to the last, or
// for its gradient with (q, g/n) from the last to the first.
//
// For a squared score a block owns a few of a head's tiles (40 for a head of 64) and walks over all tokens; the state
// never leaves the registers of its two warpgroups but for the copies in bf16 that go into memory before each chunk.
// The operand A, 64 rows (a, b) × 16 tokens, is made in registers: x_b, by ldmatrix, times w·x_a, which helping warps
// have transposed.
#include "gpu/device.h"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/states.cuh"

namespace furious::cuda {
namespace {

struct WalkArguments {
  const float* factors;  // [batch, heads, length]
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

constexpr int kConsumers = 2;  // warpgroups
constexpr int kOctets = 3;     // of 8 a each, the most that the tiles of a block have
// Warps behind the consumers: two for each octet, one for copies and one for factors.
constexpr int kHelpers = 2 * kOctets;
constexpr int kCopying = 4 * kConsumers + kHelpers, kFactoring = kCopying + 1;

// How many tiles a block owns at most: two for one warpgroup and three for the other, with heads of 64; two for each,
// with others; or, where as few heads of 64 leave multiprocessors without a block, one or two for each.
enum class Share : uint8_t { five, four, three };
__host__ __device__ constexpr int parts_of(Share share, int blocks) {
  return share == Share::five ? 8 : share == Share::three ? 16 : blocks * (blocks + 1) / 2;
}
constexpr int kUpdateThreads = 32 * (kFactoring + 1);
constexpr int kUpdateRegisters = 208, kHelperRegisters = 48;
static_assert(registers_suffice(kConsumers, kUpdateRegisters, kHelperRegisters, 2));

// kPanels: 64 columns of x each.
template <int kPanels>
struct UpdateShared {
  static constexpr int kStages = kPanels == 1 ? 8 : 6;
  unsigned char x[kStages][kPanels][kPanelBytes], u[kStages][kPanelBytes];
  unsigned char out[5][kPanelBytes];
  uint4 scaled[kStages][8 * kOctets][12];  // w·x_a of 64 tokens; rows of 128 bytes, 192 apart
  float factors[kStages][kPanelRows];
  Barrier full[kStages], ready[kStages], empty[kStages];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ float weight_of(const WalkArguments& m, int64_t row, int t) {
  if (t >= m.chunks.length) return 0.0f;
  float w = m.constant;
  if (m.factors) w *= m.factors[row + t];
  if (m.extra) w *= m.extra[row + t];
  return w;
}

// The tiles of a chunk's tokens of which decay lets anything reach the state: [begin, end). Factors rise along the
// chunk, in a reverse walk they fall. A lane of the warp looks up the largest of one tile, a chunk ahead.
struct Kept {
  int begin, end;

  __device__ static float look_up(const WalkArguments& m, int64_t head, int i) {
    const int c = m.chunks.at(min(i, m.chunks.chunks - 1)), tiles = m.chunks.tiles(c);
    const int lane = static_cast<int>(threadIdx.x) % 32, from = c * m.chunks.chunk + lane * kPanelRows;
    if (!m.factors || tiles > 32) return 1.0f;  // of chunks that long, nothing is left out
    if (lane >= tiles) return 0.0f;
    const int largest = m.chunks.reverse ? from : min(from + kPanelRows, m.chunks.length) - 1;
    return m.factors[head * m.chunks.length + largest];
  }
  __device__ Kept(const WalkArguments& m, int c, float largest) {
    const int tiles = m.chunks.tiles(c), kept = min(tiles, __popc(__ballot_sync(0xFFFFFFFFu, largest != 0.0f)));
    begin = m.chunks.reverse || tiles > 32 ? 0 : tiles - kept;
    end = m.chunks.reverse && tiles <= 32 ? kept : tiles;
  }
};

// Tiles of a warpgroup: of one block B, from this a on.
struct Owned {
  int block, first;
};
// One tile, or two that follow each other, of all in the order of B, then a.
__device__ Owned one_tile(int i) {
  const int block = i < 4 ? 0 : i < 12 ? 1 : i < 24 ? 2 : 3;
  return {block, 4 * (i - 2 * block * (block + 1))};
}
__device__ Owned two_tiles(int i) {
  int block = 0;
  while (i >= (block + 1) * (block + 2)) ++block;
  return {block, 8 * (i - block * (block + 1))};
}
__device__ Owned owned_by(Share share, int part, int group) {
  switch (share) {
    case Share::five:
      if (group == 0) return two_tiles(part < 6 ? part : part + 6);
      return part < 4 ? Owned{2, 12 * part} : Owned{3, 16 + 12 * (part - 4)};
    case Share::four:
      return two_tiles(2 * part + group);
    case Share::three:
      if (part >= 8) return one_tile(2 * part - 8 + group);
      return group == 0 ? one_tile(part) : two_tiles(12 + part);
  }
  return {};
}

// One warpgroup, for the values from 64·panel on; its rows of `scaled` begin with a = owned.first / 8 · 8.
template <int kGroup, int kTiles, class Shared>
__device__ void accumulate(Shared& shared, const WalkArguments& m, const Owned& owned, int panel, unsigned char* out,
                           int64_t head) {
  const int block = owned.block, first_a = owned.first, scaled_row = 8 * kGroup + first_a % 8;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const Chunks& chunks = m.chunks;
  float acc[kTiles][8][4] = {};
  // Calls f(value, a, b, column) for all that this thread holds.
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          f(acc[i][j][e], first_a + 4 * i + warp, 16 * block + lane / 4 + e / 2 * 8,
            64 * panel + 8 * j + lane % 4 * 2 + e % 2);
  };
  if (m.first)
    each([&](float& x, int a, int b, int column) {
      const int64_t place = column < m.dims.v ? m.place(head, a, b, column) : -1;
      if (place >= 0) x = m.first[place] * (a == b ? 1.0f : 1 / kPairFactor);
    });
  // The operand A of half a tile of tokens, two steps of 16, and what it is made of.
  uint32_t f[2][2][kTiles][4], x_b[2][4];
  uint4 scaled[kTiles];
  const auto load = [&](const Pipe<Shared::kStages>& at, int half) {
    const Tile<64> x = panel_of(shared.x[at.stage][block / 4]);
    if (half == 0) shared.full[at.stage].wait(at.phase);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_matrices_transposed(x_b[i],
                               x.at(32 * half + 16 * i + lane % 8 + lane / 16 * 8, block % 4 * 2 + lane / 8 % 2));
    if (half == 0) shared.ready[at.stage].wait(at.phase);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      scaled[t] = shared.scaled[at.stage][scaled_row + 4 * t + warp][half * 4 + lane % 4];
  };
  const auto make = [&](int half) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4& w = scaled[t];
        const uint32_t low = i == 0 ? w.x : w.z, high = i == 0 ? w.y : w.w;
        uint32_t(&to)[4] = f[half][i][t];
        to[0] = multiply_pairs(x_b[i][0], low);
        to[1] = multiply_pairs(x_b[i][1], low);
        to[2] = multiply_pairs(x_b[i][2], high);
        to[3] = multiply_pairs(x_b[i][3], high);
      }
  };
  const auto multiply = [&](const Pipe<Shared::kStages>& at, int half) {
    const uint64_t values = operand_transposed(shared.u[at.stage], 0);
    fence_products();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int t = 0; t < kTiles; ++t) wgmma<1>(acc[t], f[half][i][t], rows_at(values, 2 * half + i), 1);
    commit_products();
  };
  Pipe<Shared::kStages> pipe;
  const auto through_at = [&](int i) {
    return m.through ? m.through[head * chunks.chunks + chunks.at(min(i, chunks.chunks - 1))] : 1.0f;
  };
  float next = Kept::look_up(m, head, 0), next_through = through_at(0);
  for (int i = 0; i < chunks.chunks; ++i) {
    const int c = chunks.at(i);
    const Kept kept(m, c, next);
    const float through = next_through;
    next = Kept::look_up(m, head, i + 1);
    next_through = through_at(i + 1);
    const bool adds = (i < chunks.chunks - 1 || m.last) && kept.begin < kept.end;
    if (adds) {
      load(pipe, 0);
      make(0);
      load(pipe, 1);
    }
    if (i > 0 || m.first) {
      if (threadIdx.x % 128 == 0) wait_for_reads_of_stores();
      warpgroup_barrier<kGroup>();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const Tile<64> to = panel_of(out + tile * kPanelBytes);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t pairs[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float(&x)[4] = acc[tile][j + e / 2];
            pairs[e] = pack(x[e % 2 * 2], x[e % 2 * 2 + 1]);
          }
          store_matrices(to.at(16 * warp + lane % 16, j + lane / 16), pairs);
        }
      }
      fence_shared_writes();
      warpgroup_barrier<kGroup>();
      if (threadIdx.x % 128 == 0) {
        bf16* const state = m.states + (head * chunks.chunks + c) * m.tiles * kTileElements;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int index = m.dims.tile_of(first_a + 4 * tile, block, panel);
          store_bytes(state + static_cast<int64_t>(index) * kTileElements, out + tile * kPanelBytes, kPanelBytes);
        }
        commit_stores();
      }
      each([&](float& x, int, int, int) { x *= through; });
    }
    if (!adds) continue;
    // Products of one half run while the operand of the other is made. The assembler lets products run into the next
    // turn of a loop only where some already run into the first.
    multiply(pipe, 0);
    for (int tile = kept.begin; tile + 1 < kept.end; ++tile) {
      Barrier& empty = shared.empty[pipe.stage];
      make(1);
      multiply(pipe, 1);
      pipe.next();
      load(pipe, 0);
      wait_for_products<1>();
      make(0);
      multiply(pipe, 0);
      load(pipe, 1);
      wait_for_products<1>();
      if (lane == 0) empty.arrive();
    }
    make(1);
    multiply(pipe, 1);
    wait_for_products<0>();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) settle(acc[t]);
    if (lane == 0) shared.empty[pipe.stage].arrive();
    pipe.next();
  }
  if (m.last)
    each([&](float& x, int a, int b, int column) {
      const int64_t place = a <= b && column < m.dims.v ? m.place(head, a, b, column) : -1;
      if (place >= 0) m.last[place] = x * (a == b ? 1.0f : kPairFactor);
    });
  if (threadIdx.x % 128 == 0) wait_for_stores();
}

#endif

template <int kPanels, Share kShare>
__global__ void __launch_bounds__(kUpdateThreads, 1)
    update_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap u, const WalkArguments m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = UpdateShared<kPanels>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  constexpr int kStages = Shared::kStages;
  constexpr int kHelping = 2 * (kShare == Share::five ? kOctets : 2);
  const int parts = parts_of(kShare, m.dims.blocks());
  const int part = static_cast<int>(blockIdx.x) % parts, panel = static_cast<int>(blockIdx.x) / parts;
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int64_t head = static_cast<int64_t>(b) * m.heads + h;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(m.factors ? 33 : 1);
      shared.ready[i].init(kHelping);
      shared.empty[i].init(4 * kConsumers);
    }
    fence_barriers();
  }
  __syncthreads();
  const Owned first = owned_by(kShare, part, 0), second = owned_by(kShare, part, 1);
  // Tiles of tokens in the order of the walk.
  const auto each_tile = [&](auto&& f) {
    const int walked = m.chunks.chunks - (m.last ? 0 : 1);
    Pipe<kStages> pipe;
    float next = Kept::look_up(m, head, 0);
    for (int i = 0; i < walked; ++i) {
      const int c = m.chunks.at(i);
      const Kept kept(m, c, next);
      next = Kept::look_up(m, head, i + 1);
      for (int tile = kept.begin; tile < kept.end; ++tile, pipe.next())
        f(pipe.stage, pipe.phase, c * m.chunks.chunk + tile * kPanelRows);
    }
  };
  if (warp < 4) {
    increase_registers<kUpdateRegisters>();
    accumulate<0, kShare == Share::three ? 1 : 2>(shared, m, first, panel, shared.out[0], head);
  } else if (warp < 8) {
    begin_later(1, 2000);
    increase_registers<kUpdateRegisters>();
    if constexpr (kShare == Share::five)
      accumulate<1, 3>(shared, m, second, panel, shared.out[2], head);
    else if (kShare == Share::four || part < 8)
      accumulate<1, 2>(shared, m, second, panel, shared.out[2], head);
    else
      accumulate<1, 1>(shared, m, second, panel, shared.out[2], head);
  } else {
    decrease_registers<kHelperRegisters>();
    if (warp < 4 * kConsumers + kHelping) {
      const int helper = warp - 4 * kConsumers, own = helper / 2, half = helper % 2;
      const int octet = own == 0 ? first.first / 8 : second.first / 8 + own - 1;
      each_tile([&](int stage, int phase, int) {
        shared.full[stage].wait(phase);
        uint32_t r[4];
        load_matrices_transposed(r, panel_of(shared.x[stage][octet / 8]).at(32 * half + lane, octet % 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2 w = make_float2(1, 1);
          if (m.factors) w = *reinterpret_cast<const float2*>(shared.factors[stage] + 32 * half + 8 * i + lane % 4 * 2);
          r[i] = pack(low_of(r[i]) * w.x * m.constant, high_of(r[i]) * w.y * m.constant);
        }
        shared.scaled[stage][own * 8 + lane / 4][4 * half + lane % 4] = {r[0], r[1], r[2], r[3]};
        __syncwarp();
        if (lane == 0) shared.ready[stage].arrive();
      });
    } else if (warp == kCopying) {
      // Two divisions for each tile would take longer than its products.
      const int x_head = h / m.x_group, u_head = h / m.u_group;
      each_tile([&](int stage, int phase, int token) {
        if (phase > 0) shared.empty[stage].wait(phase - 1);
        if (lane > 0) return;
        shared.full[stage].arrive_and_expect((kPanels + 1) * kPanelBytes);
        for (int i = 0; i < kPanels; ++i)
          copy_tile(shared.x[stage][i], x, shared.full[stage], 64 * i, token, x_head, b);
        copy_tile(shared.u[stage], u, shared.full[stage], 64 * panel, token, u_head, b);
      });
    } else if (warp == kFactoring && m.factors) {
      const float* const factors = m.factors + head * m.chunks.length;
      each_tile([&](int stage, int phase, int token) {
        if (phase > 0) shared.empty[stage].wait(phase - 1);
#pragma unroll
        for (int i = 0; i < kPanelRows; i += 32)
          copy_float(&shared.factors[stage][i + lane], factors, token + i + lane, m.chunks.length);
        arrive_after_copies(shared.full[stage]);
      });
    }
  }
#endif
}

// Σ_j w_j x_j u_jᵀ of a single chunk; a block has a tile of it. With `same`, the columns of u are those of x.
constexpr int kOuterStages = 4;
struct OuterShared {
  unsigned char x[kOuterStages][kPanelBytes], u[kOuterStages][kPanelBytes];
  float weights[kOuterStages][kPanelRows];
  Barrier full[kOuterStages];
};
__global__ void __launch_bounds__(128)
    outer_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap u, const WalkArguments m,
                 const bool same) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  OuterShared& shared = *reinterpret_cast<OuterShared*>(memory);
  const int c = static_cast<int>(blockIdx.x) / m.summed, h = static_cast<int>(blockIdx.y);
  const int b = static_cast<int>(blockIdx.z), of_sum = static_cast<int>(blockIdx.x) % m.summed;
  const int x_column = of_sum / m.summed_across * kPanelRows, u_column = of_sum % m.summed_across * kPanelRows;
  const int64_t head = static_cast<int64_t>(b) * m.heads + h;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = c * m.chunks.chunk, tiles = m.chunks.tiles(c);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kOuterStages; ++i) shared.full[i].init(1);
    fence_barriers();
  }
  __syncthreads();
  const auto load = [&](int tile) {
    const int stage = tile % kOuterStages, token = begin + tile * kPanelRows;
    if (threadIdx.x < kPanelRows)
      shared.weights[stage][threadIdx.x] = weight_of(m, head * m.chunks.length, token + static_cast<int>(threadIdx.x));
    if (threadIdx.x != 0) return;
    shared.full[stage].arrive_and_expect((same ? 1 : 2) * kPanelBytes);
    copy_tile(shared.x[stage], x, shared.full[stage], x_column, token, h / m.x_group, b);
    if (!same) copy_tile(shared.u[stage], u, shared.full[stage], u_column, token, h / m.u_group, b);
  };
  for (int tile = 0; tile < min(tiles, kOuterStages - 1); ++tile) load(tile);
  float acc[8][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kOuterStages;
    __syncthreads();  // the tile before is read, and the weights of this one are written
    if (tile + kOuterStages - 1 < tiles) load(tile + kOuterStages - 1);
    shared.full[stage].wait(tile / kOuterStages);
    uint32_t f[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_matrices_transposed(
          f[step], panel_of(shared.x[stage]).at(16 * step + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 w = *reinterpret_cast<const float2*>(shared.weights[stage] + 16 * step + i / 2 * 8 + lane % 4 * 2);
        f[step][i] = pack(low_of(f[step][i]) * w.x, high_of(f[step][i]) * w.y);
      }
    }
    fence_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<1>(acc, f[step], operand_transposed(same ? shared.x[stage] : shared.u[stage], step), 1);
    commit_products();
    wait_for_products<0>();
    settle(acc);
  }
  float* const to = m.sums + ((head * m.chunks.chunks + c) * m.summed + of_sum) * kTileElements;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(to + (16 * warp + lane / 4 + 8 * i) * 64 + 8 * j + lane % 4 * 2) =
          make_float2(acc[j][2 * i], acc[j][2 * i + 1]);
#endif
}

// Carries the sums through the chunks into the first tiles of each state. `normalizer`: they are the last column of a
// squared score's state; else they are the state of a linear score.
__global__ void carry_kernel(const WalkArguments m, const bool normalizer) {
  const int64_t head = static_cast<int64_t>(blockIdx.z) * m.heads + blockIdx.y;
  const int element = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 2, tile = element / kTileElements;
  const int in_tile = element % kTileElements, tile_row = in_tile / 64, tile_column = in_tile % 64;
  const int row = tile / m.summed_across * 64 + tile_row, column = tile % m.summed_across * 64 + tile_column;
  const Chunks& chunks = m.chunks;
  const auto place = [&](int i) -> int64_t {
    if (normalizer) return m.place(head, row, column + i, m.dims.v);
    return row < m.dims.qk && column + i < m.dims.v ? (head * m.rows + row) * m.columns + column + i : -1;
  };
  const auto factor = [&](int i) { return normalizer && row != column + i ? kPairFactor : 1.0f; };
  float x[2] = {0, 0};
  for (int i = 0; m.first && i < 2; ++i)
    if (place(i) >= 0) x[i] = m.first[place(i)] / factor(i);
  const int64_t stride = static_cast<int64_t>(m.summed) * kTileElements;
  const float* const sums = m.sums + head * chunks.chunks * stride + element;
  bf16* const states = m.states + (head * chunks.chunks * m.tiles + tile) * kTileElements + tile_row * 64 +
                       ((tile_column / 8) ^ (tile_row % 8)) * 8 + tile_column % 8;
  constexpr int kAhead = 8;
  for (int base = 0; base < chunks.chunks; base += kAhead) {
    float2 own[kAhead];
    float through[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int c = chunks.at(min(base + i, chunks.chunks - 1));
      own[i] = *reinterpret_cast<const float2*>(sums + c * stride);
      through[i] = m.through ? m.through[head * chunks.chunks + c] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i >= chunks.chunks) break;
      const int64_t c = chunks.at(base + i);
      *reinterpret_cast<uint32_t*>(states + c * m.tiles * kTileElements) = pack(x[0], x[1]);
      x[0] = through[i] * x[0] + own[i].x;
      x[1] = through[i] * x[1] + own[i].y;
    }
  }
  for (int i = 0; m.last && i < 2; ++i)
    if (place(i) >= 0 && (!normalizer || row <= column + i)) m.last[place(i)] = x[i] * factor(i);
}

void update(const MixerCall& call, const CUtensorMap& x, const CUtensorMap& u, const WalkArguments& m) {
  const int64_t heads = call.shape.batch * call.shape.heads;
  const int blocks = m.dims.blocks();
  const auto launch = [&]<int kPanels, Share kShare>() {
    constexpr auto kernel = update_kernel<kPanels, kShare>;
    constexpr size_t bytes = sizeof(UpdateShared<kPanels>);
    allow_shared_memory(kernel, bytes);
    const dim3 grid(static_cast<unsigned>(parts_of(kShare, blocks) * m.dims.v_panels()), static_cast<unsigned>(m.heads),
                    static_cast<unsigned>(call.shape.batch));
    kernel<<<grid, kUpdateThreads, bytes, stream(call.inputs.q.device())>>>(x, u, m);
  };
  if (blocks > 4)
    launch.template operator()<2, Share::four>();
  else if (blocks < 4)
    launch.template operator()<1, Share::four>();
  else if (parts_of(Share::three, blocks) * heads <= multiprocessors())
    launch.template operator()<1, Share::three>();
  else
    launch.template operator()<1, Share::five>();
  check_launch("mixer: states of chunks");
}

}  // namespace

Tensor walk_states(const MixerCall& call, const ChunkTables& tables, const StateWalk& walk) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const bool squared = call.spec.score == Score::squared, sum = call.spec.norm == Norm::sum;
  const StateDims dims = dims_of(shape);
  const int across = squared ? dims.qk_panels() : dims.v_panels(), panels = dims.qk_panels() * across;
  const int64_t tiles = squared ? dims.squared_tiles() : panels;
  const Tensor states = Tensor::empty({shape.batch, shape.heads, tables.chunks, tiles, 64, 64}, DType::bf16, device);
  WalkArguments m = {};
  m.factors = floats(walk.factors);
  m.through = floats(tables.through);
  m.first = floats(walk.first);
  m.last = floats(walk.last);
  m.states = pointer<bfloat16>(states);
  m.chunks = {static_cast<int>(shape.length), static_cast<int>(call.chunk), static_cast<int>(tables.chunks),
              walk.reverse};
  m.dims = dims;
  m.heads = static_cast<int>(shape.heads);
  m.x_group = static_cast<int>(shape.heads / walk.x.size(2));
  m.u_group = static_cast<int>(shape.heads / walk.u.size(2));
  m.rows = static_cast<int>(shape.state_rows);
  m.columns = static_cast<int>(shape.state_columns);
  m.tiles = static_cast<int>(tiles);
  m.summed = panels;
  m.summed_across = across;
  m.constant = walk.constant;
  const CUtensorMap x = tile_map(walk.x), u = tile_map(walk.u);
  if (squared) {
    update(call, x, u, m);
    if (!sum) return states;
    m.u_group = m.x_group;
    m.extra = floats(walk.shift);
    if (walk.shift) m.constant = -m.constant;
  }
  const auto heads = static_cast<unsigned>(shape.heads), batch = static_cast<unsigned>(shape.batch);
  const Tensor sums = Tensor::empty({shape.batch, shape.heads, tables.chunks, panels, 64, 64}, DType::f32, device);
  m.sums = floats(sums);
  allow_shared_memory(outer_kernel, sizeof(OuterShared));
  outer_kernel<<<dim3(static_cast<unsigned>(tables.chunks * panels), heads, batch), 128, sizeof(OuterShared),
                 stream(device)>>>(x, squared ? x : u, m, squared && panels == 1);
  check_launch("mixer: sums of chunks");
  const dim3 grid(static_cast<unsigned>(panels * kTileElements / 2 / 256), heads, batch);
  carry_kernel<<<grid, 256, 0, stream(device)>>>(m, squared);
  check_launch("mixer: states of chunks");
  return states;
}

Tensor chunk_states(const MixerCall& call, const ChunkTables& tables) {
  return walk_states(
      call, tables,
      {call.inputs.k, call.inputs.v, tables.out, {}, call.inputs.initial_state, call.result.final_state, 1.0f, false});
}

}  // namespace furious::cuda
