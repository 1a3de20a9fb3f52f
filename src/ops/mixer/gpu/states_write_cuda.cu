// The state before every chunk: S ← through · S + Σ_j w_j φ(x_j) u_jᵀ, with (k, v) from the first chunk to the last, or
// for its gradient with (q, g) from the last to the first; the weights then contain 1/n.
//
// For a squared score a block owns a few of a head's tiles (36 for a head of 64) and walks over all tokens; the state
// never leaves the registers of its two warpgroups but for the copies in bf16 that go into memory before each chunk.
// The operand A, 64 rows (a, b) × 16 tokens, is made in registers: x_b, by ldmatrix, times w·x_a, which helping warps
// have transposed.
#include "gpu/device.h"
#include "ops/mixer/gpu/states_write.cuh"

namespace furious::cuda {
// Not in an unnamed namespace: where the compiler works for other devices, it would call most of this unused.
namespace shares {

// How the tiles of a head are divided among the two warpgroups of a number of blocks. Each has one or two tiles, the
// second also a piece of one: some of its columns. Of the last tiles and pieces several blocks may compute the same.
struct Owned {
  int block, a;  // B, and the first a
  bool corner;
};
struct Piece {
  Owned of;
  int column;  // its first
};

// Two tiles each, those with the same eight a, in the order of B, then a; the pieces are of corners.
template <int kPieceCount>
struct ShareOfTwo {
  static constexpr int kTiles = 2, kPieces = kPieceCount, kColumns = 64 / kPieceCount, kStages = 4;
  static constexpr bool kCornerPieces = true;

  __host__ __device__ static int parts(int blocks) { return (blocks * blocks + 1) / 2; }
  __device__ static Owned owned(int part, int group, int blocks) {
    const int i = min(2 * part + group, blocks * blocks - 1);
    int block = 0;
    while (i >= (block + 1) * (block + 1)) ++block;
    return {block, 8 * (i - block * block), false};
  }
  __device__ static Piece piece(int part, int blocks) {
    const int i = min(part, blocks * kPieces - 1), block = i / kPieces;
    return {{block, 16 * block + 8, true}, i % kPieces * kColumns};
  }
};

// One tile each, where heads of 64 are so few that else multiprocessors would have no block. Of B = 2 and 3 the first
// two tiles are the pieces, four of each, for warpgroups that have others of the same B.
struct ShareOfOne {
  static constexpr int kTiles = 1, kColumns = 16, kStages = 8;
  static constexpr bool kCornerPieces = false;

  __host__ __device__ static int parts(int) { return 16; }
  __device__ static Owned owned(int part, int group, int) {
    if (group == 1) return {3 - part / 8, 4 * (2 + part % 8), false};
    // The i-th of `count` tiles from an a on and the corner.
    const auto after = [](int block, int first, int i, int count) -> Owned {
      return i < count ? Owned{block, first + 4 * i, false} : Owned{block, 16 * block + 8, true};
    };
    if (part < 5) return after(3, 40, part, 4);
    if (part < 6) return {2, 40, true};
    return part < 13 ? after(1, 0, part - 6, 6) : after(0, 0, part - 13, 2);
  }
  __device__ static Piece piece(int part, int) {
    return {{3 - part / 8, part % 8 / 4 * 4, false}, part % 4 * kColumns};
  }
};

}  // namespace shares

namespace {

using namespace shares;

constexpr int kConsumers = 2;  // warpgroups
// Eight a each, which belong to tiles of the one, the other, and the piece.
constexpr int kOctets = 3;
// Warps behind the consumers: each of the helpers scales 16 tokens of a tile; one is for copies and one for factors.
constexpr int kHelpers = 4;
constexpr int kCopying = 4 * kConsumers + kHelpers, kFactoring = kCopying + 1;

constexpr int kUpdateThreads = 128 * (kConsumers + 2);
static_assert(kFactoring < kUpdateThreads / 32);
constexpr int kUpdateRegisters = 216, kHelperRegisters = 40;
static_assert(registers_suffice(kConsumers, kUpdateRegisters, kHelperRegisters, 2));

// kPanels: 64 columns of x each.
template <int kPanels, int kStageCount>
struct UpdateShared {
  static constexpr int kStages = kStageCount;
  unsigned char x[kStages][kPanels][kPanelBytes], u[kStages][kPanelBytes];
  unsigned char out[5][kPanelBytes];
  uint4 scaled[kStages][8 * kOctets][12];  // w·x_a of 64 tokens; rows of 128 bytes, 192 apart
  float factors[kStages][kPanelRows];
  Barrier full[kStages], ready[kStages], empty[kStages];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The tiles of a chunk's tokens of which decay lets anything reach the state: [begin, end). That rises along the
// chunk, in a reverse walk it falls. A lane of the warp looks up the largest of one tile, a chunk ahead.
struct Kept {
  int begin, end;

  __device__ static float look_up(const WalkArguments& m, int64_t head, int i) {
    const int c = m.chunks.at(min(i, m.chunks.chunks - 1)), tiles = m.chunks.tiles(c);
    const int lane = static_cast<int>(threadIdx.x) % 32, from = c * m.chunks.chunk + lane * kPanelRows;
    if (!m.reach || tiles > 32) return 1.0f;  // of chunks that long, nothing is left out
    const int largest = m.chunks.reverse ? from : from + kPanelRows - 1;
    return m.reach[head * m.chunks.length + min(largest, m.chunks.length - 1)];
  }
  __device__ Kept(const WalkArguments& m, int c, float largest) {
    const int tiles = m.chunks.tiles(c), lane = static_cast<int>(threadIdx.x) % 32;
    const int kept = tiles > 32 ? tiles : __popc(__ballot_sync(0xFFFFFFFFu, lane < tiles && largest != 0.0f));
    begin = m.chunks.reverse ? 0 : tiles - kept;
    end = m.chunks.reverse ? kept : tiles;
  }
};

__device__ const unsigned char* bytes_of(const void* at) {
  return static_cast<const unsigned char*>(at);
}

// One warpgroup, for the values from 64·panel on: kTiles from `owned` on, and kColumns columns of `piece`, a corner or
// a tile of the same B. `slot` and `piece_slot` are their places among the octets.
template <int kTiles, int kColumns, bool kCorner, class Shared>
__device__ void accumulate(Shared& shared, const WalkArguments& m, const Owned& owned, int slot, const Piece& piece,
                           int piece_slot, int panel, int64_t head) {
  constexpr int kStages = Shared::kStages;
  const int block = owned.block, piece_block = piece.of.block;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const Chunks& chunks = m.chunks;
  unsigned char* const out = shared.out[2 * slot];
  const Tile<64> piece_out = panel_of(shared.out[2 * piece_slot]);
  float acc[kTiles + 1][8][4] = {};  // one more, since there are no arrays of 0
  float acc_piece[kColumns > 0 ? kColumns / 8 : 1][4] = {};
  // Calls f(value, a, b, column) for all that this thread holds.
  const auto each = [&](auto&& f) {
    const int column0 = 64 * panel + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          f(acc[i][j][e], owned.a + 4 * i + warp, 16 * block + lane / 4 + e / 2 * 8, column0 + 8 * j + e % 2);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        f(acc_piece[j][e], piece.of.a + (kCorner ? 2 * warp + e / 2 : warp),
          16 * piece_block + lane / 4 + (kCorner ? 8 : e / 2 * 8), column0 + piece.column + 8 * j + e % 2);
  };
  if (m.first)
    each([&](float& x, int a, int b, int column) {
      const int64_t place = column < m.dims.v ? m.place(head, a, b, column) : -1;
      if (place >= 0) x = m.first[place] * (a == b ? 1.0f : 1 / kPairFactor);
    });
  // What the operand A of half a tile of tokens is made of, two steps of 16: x_b and w·x_a of each; and the operand.
  // Where registers suffice, both halves of a tile are loaded at once, else the second when the first has been made.
  constexpr bool kAhead = kTiles < 2;
  struct Parts {
    uint32_t x[2][4], x_corner[4];
    uint4 scaled[kTiles + 1], of_piece[2];
  } parts[kAhead ? 2 : 1];
  uint32_t f[2][2][kTiles + 1][4], f_piece[2][2][4];
  // Where this thread's rows begin in the first stage; constants lead on from there.
  const auto* const x0 =
      bytes_of(panel_of(shared.x[0][block / 4]).at(lane % 8 + lane / 16 * 8, block % 4 * 2 + lane / 8 % 2));
  const auto* const corner0 = bytes_of(panel_of(shared.x[0][piece_block / 4]).at(lane, 2 * (piece_block % 4) + 1));
  const auto* const scaled0 = bytes_of(&shared.scaled[0][8 * slot + owned.a % 8 + warp][lane % 4]);
  const auto* const of_piece0 =
      bytes_of(&shared.scaled[0][8 * piece_slot + piece.of.a % 8 + (kCorner ? 2 : 1) * warp][lane % 4]);
  const auto load = [&](const Pipe<kStages>& at, int half) {
    constexpr int kRow = sizeof(shared.scaled[0][0]);
    Parts& to = parts[kAhead ? half : 0];
    const int x_stage = at.stage * static_cast<int>(sizeof(shared.x[0]));
    const int scaled_stage = at.stage * static_cast<int>(sizeof(shared.scaled[0])) + half * 64;
    if constexpr (kTiles > 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) load_matrices_transposed(to.x[i], x0 + x_stage + (2 * half + i) * 16 * 128);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      to.scaled[t] = *reinterpret_cast<const uint4*>(scaled0 + scaled_stage + 4 * t * kRow);
    if constexpr (kColumns > 0) {
      if constexpr (kCorner) load_matrices_transposed(to.x_corner, corner0 + x_stage + half * 32 * 128);
#pragma unroll
      for (int i = 0; i < (kCorner ? 2 : 1); ++i)
        to.of_piece[i] = *reinterpret_cast<const uint4*>(of_piece0 + scaled_stage + i * kRow);
    }
  };
  const auto make = [&](int half) {
    const Parts& from = parts[kAhead ? half : 0];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // w·x_a of the step's first eight tokens, and of the others.
      const auto first = [&](const uint4& w) { return i == 0 ? w.x : w.z; };
      const auto second = [&](const uint4& w) { return i == 0 ? w.y : w.w; };
      const auto scale = [&](uint32_t(&to)[4], const uint4& w) {
        to[0] = multiply_pairs(from.x[i][0], first(w));
        to[1] = multiply_pairs(from.x[i][1], first(w));
        to[2] = multiply_pairs(from.x[i][2], second(w));
        to[3] = multiply_pairs(from.x[i][3], second(w));
      };
#pragma unroll
      for (int t = 0; t < kTiles; ++t) scale(f[half][i][t], from.scaled[t]);
      if constexpr (kColumns > 0 && kCorner) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          f_piece[half][i][a] = multiply_pairs(from.x_corner[2 * i], first(from.of_piece[a]));
          f_piece[half][i][2 + a] = multiply_pairs(from.x_corner[2 * i + 1], second(from.of_piece[a]));
        }
      } else if constexpr (kColumns > 0) {
        scale(f_piece[half][i], from.of_piece[0]);
      }
    }
  };
  const uint64_t values0 = operand_transposed(shared.u[0], 0);
  const auto multiply = [&](const Pipe<kStages>& at, int half) {
    const int first = at.stage * 4 + 2 * half;  // of the steps of 16 tokens in all stages
    fence_products();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) wgmma<1>(acc[t], f[half][i][t], rows_at(values0, first + i), 1);
      if constexpr (kColumns > 0)
        wgmma<1>(acc_piece, f_piece[half][i], rows_at(values0 + piece.column / 8, first + i), 1);
    }
    commit_products();
  };
  // The state before the first chunk: where this thread's vectors of its tiles begin, and the piece.
  bf16* const head_states = m.states + head * chunks.chunks * m.tiles * kTileElements;
  const int64_t tile = m.dims.tile_of(owned.a, block, panel);
  bf16* const states0 = head_states + tile * kTileElements + 1024 * warp + 8 * lane;
  const int64_t tile_stride = (m.dims.tile_of(owned.a + 4, block, panel) - tile) * kTileElements;
  bf16* const piece_states =
      head_states + static_cast<int64_t>(kCorner ? m.dims.corner_of(piece_block, panel)
                                                 : m.dims.tile_of(piece.of.a, piece_block, panel)) *
                        kTileElements;
  Pipe<kStages> pipe;
  // The second half of a tile is made while its first is multiplied, and the first half of the tile after it while the
  // second is; what they are made of arrives meanwhile. (The assembler lets products run into the next turn of a loop
  // only where some already run into the first.)
  const auto begin_loads = [&] {
    shared.ready[pipe.stage].wait(pipe.phase);
    load(pipe, 0);
    if (kAhead) load(pipe, 1);
  };
  const auto begin = [&] {
    make(0);
    if (!kAhead) load(pipe, 1);
  };
  const auto release = [&](const Pipe<kStages>& at) {
    if (lane == 0) shared.empty[at.stage].arrive();
  };
  const auto multiply_and_begin = [&](const Pipe<kStages>& at, const Pipe<kStages>& after) {
    shared.ready[after.stage].wait(after.phase);
    make(1);
    multiply(at, 1);
    load(after, 0);
    if (kAhead) load(after, 1);
    wait_for_products<1>();
    make(0);
    if (!kAhead) load(after, 1);
    multiply(after, 0);
    wait_for_products<1>();
    release(at);
  };
  const auto end = [&](const Pipe<kStages>& at) {
    make(1);
    multiply(at, 1);
    wait_for_products<0>();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) settle(acc[t]);
    settle(acc_piece);
    release(at);
  };
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
    if (adds) begin_loads();
    if (i > 0 || m.first) {
      // A warp's rows are rounded to shared memory, and go from there in vectors.
      __syncwarp();
      const auto round_to = [&](const Tile<64>& to, const float(&low)[4], const float(&high)[4], int column) {
        uint32_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float(&x)[4] = e < 2 ? low : high;
          pairs[e] = pack(x[e % 2 * 2], x[e % 2 * 2 + 1]);
        }
        store_matrices(to.at(16 * warp + lane % 16, column / 8 + lane / 16), pairs);
      };
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int j = 0; j < 8; j += 2)
          round_to(panel_of(out + tile * kPanelBytes), acc[tile][j], acc[tile][j + 1], 8 * j);
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2)
        round_to(piece_out, acc_piece[j], acc_piece[j + 1], piece.column + 8 * j);
      __syncwarp();
      bf16* const state = states0 + static_cast<int64_t>(c) * m.tiles * kTileElements;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int v = 0; v < 4; ++v)
          *reinterpret_cast<uint4*>(state + tile * tile_stride + 256 * v) =
              *reinterpret_cast<const uint4*>(out + tile * kPanelBytes + 2048 * warp + 16 * lane + 512 * v);
      if constexpr (kColumns > 0) {
        constexpr int kVectors = kColumns / 8;  // of a row
#pragma unroll
        for (int v = lane; v < 16 * kVectors; v += 32) {
          const bf16* const from = piece_out.at(16 * warp + v / kVectors, piece.column / 8 + v % kVectors);
          *reinterpret_cast<uint4*>(piece_states + static_cast<int64_t>(c) * m.tiles * kTileElements +
                                    (from - piece_out.data)) = *reinterpret_cast<const uint4*>(from);
        }
      }
      each([&](float& x, int, int, int) { x *= through; });
    }
    if (adds) begin();
    for (int tile = kept.begin; adds && tile < kept.end;) {
      if (tile > kept.begin) {
        begin_loads();
        begin();
      }
      // From the first stage on all places are constants.
      if (pipe.stage == 0 && kept.end - tile >= kStages) {
        multiply(pipe, 0);
#pragma unroll
        for (int stage = 0; stage + 1 < kStages; ++stage)
          multiply_and_begin({stage, pipe.phase}, {stage + 1, pipe.phase});
        end({kStages - 1, pipe.phase});
        ++pipe.phase;
        tile += kStages;
      } else {
        const int count = min(kept.end - tile, kStages - pipe.stage);
        multiply(pipe, 0);
        for (int i = 1; i < count; ++i, ++pipe.stage) multiply_and_begin(pipe, {pipe.stage + 1, pipe.phase});
        end(pipe);
        pipe.next();
        tile += count;
      }
    }
  }
  if (m.last)
    each([&](float& x, int a, int b, int column) {
      const int64_t place = a <= b && column < m.dims.v ? m.place(head, a, b, column) : -1;
      if (place >= 0) m.last[place] = x * (a == b ? 1.0f : kPairFactor);
    });
}

#endif

template <int kPanels, class Share>
__global__ void __launch_bounds__(kUpdateThreads, 1)
    update_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap u, const WalkArguments m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = UpdateShared<kPanels, Share::kStages>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  constexpr int kStages = Shared::kStages;
  const int blocks = m.dims.blocks(), parts = Share::parts(blocks);
  const int part = static_cast<int>(blockIdx.x) % parts, panel = static_cast<int>(blockIdx.x) / parts;
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int64_t head = static_cast<int64_t>(b) * m.heads + h;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(m.factors ? 33 : 1);
      shared.ready[i].init(kHelpers);
      shared.empty[i].init(4 * kConsumers);
    }
    fence_barriers();
  }
  __syncthreads();
  const Owned first = Share::owned(part, 0, blocks), second = Share::owned(part, 1, blocks);
  const Piece piece = Share::piece(part, blocks);
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
    const auto whole = [&] { accumulate<Share::kTiles, 0, false>(shared, m, first, 0, {first, 0}, 0, panel, head); };
    if constexpr (Share::kTiles == 1) {
      if (first.corner)
        accumulate<0, 64, true>(shared, m, first, 0, {first, 0}, 0, panel, head);
      else
        whole();
    } else {
      whole();
    }
  } else if (warp < 8) {
    increase_registers<kUpdateRegisters>();
    accumulate<Share::kTiles, Share::kColumns, Share::kCornerPieces>(shared, m, second, 1, piece, 2, panel, head);
  } else {
    decrease_registers<kHelperRegisters>();
    if (warp < kCopying) {
      const int quarter = warp % 4;
      const int octets[kOctets] = {first.a / 8, second.a / 8, piece.of.a / 8};
      each_tile([&](int stage, int phase, int) {
        shared.full[stage].wait(phase);
        uint32_t r[kOctets][2];
#pragma unroll
        for (int own = 0; own < kOctets; ++own)
          load_two_transposed(r[own][0], r[own][1],
                              panel_of(shared.x[stage][octets[own] / 8]).at(16 * quarter + lane % 16, octets[own] % 8));
        float2 w[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          w[i] = make_float2(1, 1);
          if (m.factors)
            w[i] = *reinterpret_cast<const float2*>(shared.factors[stage] + 16 * quarter + 8 * i + lane % 4 * 2);
        }
#pragma unroll
        for (int own = 0; own < kOctets; ++own) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t& x = r[own][i];
            x = pack(low_of(x) * w[i].x * m.constant, high_of(x) * w[i].y * m.constant);
          }
          uint4& to = shared.scaled[stage][own * 8 + lane / 4][quarter / 2 * 4 + lane % 4];
          reinterpret_cast<uint2*>(&to)[quarter % 2] = make_uint2(r[own][0], r[own][1]);
        }
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

void update(const MixerCall& call, const CUtensorMap& x, const CUtensorMap& u, const WalkArguments& m) {
  const int64_t heads = call.shape.batch * call.shape.heads;
  const int blocks = m.dims.blocks();
  const auto launch = [&]<int kPanels, class Share>() {
    constexpr auto kernel = update_kernel<kPanels, Share>;
    constexpr size_t bytes = sizeof(UpdateShared<kPanels, Share::kStages>);
    allow_shared_memory(kernel, bytes);
    const dim3 grid(static_cast<unsigned>(Share::parts(blocks) * m.dims.v_panels()), static_cast<unsigned>(m.heads),
                    static_cast<unsigned>(call.shape.batch));
    kernel<<<grid, kUpdateThreads, bytes, stream(call.inputs.q.device())>>>(x, u, m);
  };
  if (blocks == 8)
    launch.template operator()<2, ShareOfTwo<4>>();
  else if (blocks > 4)
    launch.template operator()<2, ShareOfTwo<2>>();
  else if (blocks < 4)
    launch.template operator()<1, ShareOfTwo<1>>();
  else if (ShareOfOne::parts(blocks) * heads <= multiprocessors())
    launch.template operator()<1, ShareOfOne>();
  else
    launch.template operator()<1, ShareOfTwo<2>>();
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
  m.reach = floats(walk.reach);
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
  const Tensor sums = Tensor::empty({shape.batch, shape.heads, tables.chunks, panels, 64, 64}, DType::f32, device);
  m.sums = floats(sums);
  carry_sums(call, x, squared ? x : u, m);
  return states;
}

Tensor chunk_states(const MixerCall& call, const ChunkTables& tables) {
  return walk_states(call, tables,
                     {call.inputs.k,
                      call.inputs.v,
                      tables.out,
                      tables.out,
                      {},
                      call.inputs.initial_state,
                      call.result.final_state,
                      1.0f,
                      false});
}

}  // namespace furious::cuda
