// The state before every chunk: S ← through · S + Σ_j w_j φ(x_j) u_jᵀ, with (k, v) from the first chunk to the last, or
// for its gradient with (q, g/n) from the last to the first.
//
// For a squared score a block owns 5 of the 40 tiles of a head and walks over all tokens; the state never leaves the
// registers of its two warpgroups but for the copies in bf16 that go into memory before each chunk. The operand A, 64
// rows (a, b) × 16 tokens, is made in registers: x_b, by ldmatrix, times w·x_a, which helping warps have transposed.
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
  float* sums;  // of each chunk alone, f32 [batch, heads, chunks, 64, 64]
  Chunks chunks;
  int heads, x_group, u_group, columns, tiles;
  float constant;
};

constexpr int kConsumers = 2;
constexpr int kHelpers = 3;  // warps
constexpr int kUpdateThreads = 128 * kConsumers + 32 * (kHelpers + 1);

struct UpdateShared {
  static constexpr int kStages = 8;
  unsigned char x[kStages][kPanelBytes], u[kStages][kPanelBytes];
  unsigned char out[5][kPanelBytes];
  uint4 scaled[kStages][8 * kHelpers][12];  // w·x_a of 64 tokens for 8 a per helper; rows of 128 bytes, 192 apart
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

// One warpgroup: kTiles tiles of block B, from `first_a` on; its rows of `scaled` begin with a = first_a / 8 · 8.
template <int kGroup, int kTiles>
__device__ void accumulate(UpdateShared& shared, const WalkArguments& m, int block, int first_a, int scaled_row,
                           unsigned char* out, int64_t head) {
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
          f(acc[i][j][e], first_a + 4 * i + warp, 16 * block + lane / 4 + e / 2 * 8, 8 * j + lane % 4 * 2 + e % 2);
  };
  if (m.first)
    each([&](float& x, int a, int b, int column) {
      x = m.first[(head * kPairs + pair_row(a, b)) * m.columns + column] * (a == b ? 1.0f : 1 / kPairFactor);
    });
  int turn = 0;
  float next = Kept::look_up(m, head, 0);
  for (int i = 0; i < chunks.chunks; ++i) {
    const int c = chunks.at(i);
    const Kept kept(m, c, next);
    next = Kept::look_up(m, head, i + 1);
    if (i > 0 || m.first) {
      if (threadIdx.x % 128 == 0) wait_for_reads_of_stores();
      warpgroup_barrier<kGroup>();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float factor = (first_a + 4 * tile) / 16 < block ? 2.0f : 1.0f;
        unsigned char* const to = out + tile * kPanelBytes;
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int j = 0; j < 8; ++j)
            *reinterpret_cast<uint32_t*>(panel_of(to).at(16 * warp + lane / 4 + 8 * u, j) + lane % 4 * 2) =
                pack(acc[tile][j][2 * u] * factor, acc[tile][j][2 * u + 1] * factor);
      }
      fence_shared_writes();
      warpgroup_barrier<kGroup>();
      if (threadIdx.x % 128 == 0) {
        bf16* const state = m.states + (head * chunks.chunks + c) * m.tiles * kTileElements;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int a = first_a + 4 * tile, own = a / 16;
          const int index = first_tile_of(own) + a % 16 / 4 * (4 - own) + block - own;
          store_bytes(state + static_cast<int64_t>(index) * kTileElements, out + tile * kPanelBytes, kPanelBytes);
        }
        commit_stores();
      }
      const float through = m.through ? m.through[head * chunks.chunks + c] : 1.0f;
      each([&](float& x, int, int, int) { x *= through; });
    }
    if (i == chunks.chunks - 1 && !m.last) break;
    for (int tile = kept.begin; tile < kept.end; ++tile, ++turn) {
      const int stage = turn % UpdateShared::kStages, phase = turn / UpdateShared::kStages;
      const Tile<64> x = panel_of(shared.x[stage]);
      shared.full[stage].wait(phase);
      shared.ready[stage].wait(phase);
      uint32_t f[4][kTiles][4];
      uint4 scaled[kTiles];
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step % 2 == 0)
#pragma unroll
          for (int t = 0; t < kTiles; ++t)
            scaled[t] = shared.scaled[stage][scaled_row + 4 * t + warp][step / 2 * 4 + lane % 4];
        uint32_t own[4];
        load_matrices_transposed(own, x.at(16 * step + lane % 8 + lane / 16 * 8, 2 * block + lane / 8 % 2));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint32_t low = step % 2 == 0 ? scaled[t].x : scaled[t].z;
          const uint32_t high = step % 2 == 0 ? scaled[t].y : scaled[t].w;
          f[step][t][0] = multiply_pairs(own[0], low);
          f[step][t][1] = multiply_pairs(own[1], low);
          f[step][t][2] = multiply_pairs(own[2], high);
          f[step][t][3] = multiply_pairs(own[3], high);
        }
        fence_products();
        const uint64_t values = operand_transposed(shared.u[stage], step);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) wgmma<1>(acc[t], f[step][t], values, 1);
        commit_products();
      }
      wait_for_products<0>();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) settle(acc[t]);
      if (lane == 0) shared.empty[stage].arrive();
    }
  }
  if (m.last)
    each([&](float& x, int a, int b, int column) {
      if (a <= b) m.last[(head * kPairs + pair_row(a, b)) * m.columns + column] = x * (a == b ? 1.0f : kPairFactor);
    });
  if (threadIdx.x % 128 == 0) wait_for_stores();
}

#endif

__global__ void __launch_bounds__(kUpdateThreads, 1)
    update_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap u, const WalkArguments m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  UpdateShared& shared = *reinterpret_cast<UpdateShared*>(memory);
  constexpr int kStages = UpdateShared::kStages;
  const int part = static_cast<int>(blockIdx.x), h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
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
  // Of the 40 tiles of a head, two for one warpgroup and three for the other: their block B, and the first a.
  const int two_block = part < 2 ? 0 : part < 6 ? 1 : 3, two = 8 * (part - (part < 2 ? 0 : part < 6 ? 2 : 6));
  const int three_block = part < 4 ? 2 : 3, three = part < 4 ? 12 * part : 16 + 12 * (part - 4);
  // Tiles of tokens in the order of the walk.
  const auto each_tile = [&](auto&& f) {
    const int walked = m.chunks.chunks - (m.last ? 0 : 1);
    int turn = 0;
    float next = Kept::look_up(m, head, 0);
    for (int i = 0; i < walked; ++i) {
      const int c = m.chunks.at(i);
      const Kept kept(m, c, next);
      next = Kept::look_up(m, head, i + 1);
      for (int tile = kept.begin; tile < kept.end; ++tile, ++turn) f(turn, c * m.chunks.chunk + tile * kPanelRows);
    }
  };
  if (warp < 4) {
    increase_registers<216>();
    accumulate<0, 2>(shared, m, two_block, two, two % 8, shared.out[0], head);
  } else if (warp < 8) {
    increase_registers<216>();
    accumulate<1, 3>(shared, m, three_block, three, 8 + three % 8, shared.out[2], head);
  } else {
    decrease_registers<72>();
    if (warp < 8 + kHelpers) {
      const int helper = warp - 8;
      const int octet = helper == 0 ? two / 8 : three / 8 + helper - 1;
      each_tile([&](int turn, int) {
        const int stage = turn % kStages;
        shared.full[stage].wait(turn / kStages);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t r[4];
          load_matrices_transposed(r, panel_of(shared.x[stage]).at(32 * half + lane, octet));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float2 w = make_float2(1, 1);
            if (m.factors)
              w = *reinterpret_cast<const float2*>(shared.factors[stage] + 32 * half + 8 * i + lane % 4 * 2);
            r[i] = pack(low_of(r[i]) * w.x * m.constant, high_of(r[i]) * w.y * m.constant);
          }
          shared.scaled[stage][helper * 8 + lane / 4][4 * half + lane % 4] = {r[0], r[1], r[2], r[3]};
        }
        __syncwarp();
        if (lane == 0) shared.ready[stage].arrive();
      });
    } else {
      const float* const factors = m.factors ? m.factors + head * m.chunks.length : nullptr;
      each_tile([&](int turn, int token) {
        const int stage = turn % kStages;
        if (turn >= kStages) shared.empty[stage].wait(turn / kStages - 1);
        if (lane == 0) {
          shared.full[stage].arrive_and_expect(2 * kPanelBytes);
          copy_tile(shared.x[stage], x, shared.full[stage], 0, token, h / m.x_group, b);
          copy_tile(shared.u[stage], u, shared.full[stage], 0, token, h / m.u_group, b);
        }
        if (!factors) return;
        for (int i = lane; i < kPanelRows; i += 32)
          copy_float(&shared.factors[stage][i], factors, token + i, m.chunks.length);
        arrive_after_copies(shared.full[stage]);
      });
    }
  }
#endif
}

// Σ_j w_j x_j u_jᵀ of a single chunk, 64 × 64. With `same`, u is x.
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
  const int c = static_cast<int>(blockIdx.x), h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
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
    copy_tile(shared.x[stage], x, shared.full[stage], 0, token, h / m.x_group, b);
    if (!same) copy_tile(shared.u[stage], u, shared.full[stage], 0, token, h / m.u_group, b);
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
  float* const to = m.sums + (head * m.chunks.chunks + c) * kTileElements;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(to + (16 * warp + lane / 4 + 8 * i) * 64 + 8 * j + lane % 4 * 2) =
          make_float2(acc[j][2 * i], acc[j][2 * i + 1]);
#endif
}

// Carries sums of 64 × 64 through the chunks into the first tile of each state. `normalizer`: they are the last column
// of a squared score's state; else they are the state of a linear score.
__global__ void carry_kernel(const WalkArguments m, const bool normalizer) {
  const int64_t head = blockIdx.y;
  const int element = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 2, row = element / 64,
            column = element % 64;
  const Chunks& chunks = m.chunks;
  const auto place = [&](int i) {
    return normalizer ? (head * kPairs + pair_row(row, column + i)) * m.columns + 64
                      : (head * 64 + row) * m.columns + column + i;
  };
  const auto factor = [&](int i) { return normalizer && row != column + i ? kPairFactor : 1.0f; };
  float x[2] = {0, 0};
  if (m.first)
    for (int i = 0; i < 2; ++i) x[i] = m.first[place(i)] / factor(i);
  const float* const sums = m.sums + head * chunks.chunks * kTileElements + element;
  bf16* const states = m.states + head * chunks.chunks * m.tiles * kTileElements + row * 64 +
                       ((column / 8) ^ (row % 8)) * 8 + column % 8;
  constexpr int kAhead = 8;
  for (int base = 0; base < chunks.chunks; base += kAhead) {
    float2 own[kAhead];
    float through[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int c = chunks.at(min(base + i, chunks.chunks - 1));
      own[i] = *reinterpret_cast<const float2*>(sums + static_cast<int64_t>(c) * kTileElements);
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
  if (!m.last) return;
  for (int i = 0; i < 2; ++i)
    if (!normalizer || row <= column + i) m.last[place(i)] = x[i] * factor(i);
}

template <class Kernel>
void allow_memory(Kernel kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "mixer");
}

}  // namespace

Tensor walk_states(const MixerCall& call, const ChunkTables& tables, const StateWalk& walk) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const bool squared = call.spec.score == Score::squared, sum = call.spec.norm == Norm::sum;
  const int64_t tiles = squared ? kSquaredTiles : 1;
  const Tensor states = Tensor::empty({shape.batch, shape.heads, tables.chunks, tiles, 64, 64}, DType::bf16, device);
  WalkArguments m = {};
  m.factors = floats(walk.factors);
  m.through = floats(tables.through);
  m.first = floats(walk.first);
  m.last = floats(walk.last);
  m.states = pointer<bfloat16>(states);
  m.chunks = {static_cast<int>(shape.length), static_cast<int>(call.chunk), static_cast<int>(tables.chunks),
              walk.reverse};
  m.heads = static_cast<int>(shape.heads);
  m.x_group = static_cast<int>(shape.heads / walk.x.size(2));
  m.u_group = static_cast<int>(shape.heads / walk.u.size(2));
  m.columns = static_cast<int>(shape.state_columns);
  m.tiles = static_cast<int>(tiles);
  m.constant = walk.constant;
  const CUtensorMap x = tile_map(walk.x), u = tile_map(walk.u);
  const auto heads = static_cast<unsigned>(shape.heads), batch = static_cast<unsigned>(shape.batch);
  const cudaStream_t here = stream(device);
  if (squared) {
    allow_memory(update_kernel, sizeof(UpdateShared));
    update_kernel<<<dim3(8, heads, batch), kUpdateThreads, sizeof(UpdateShared), here>>>(x, u, m);
    check_launch("mixer: states of chunks");
    if (!sum) return states;
    m.extra = floats(walk.shift);
    if (walk.shift) m.constant = -m.constant;
  }
  const Tensor sums = Tensor::empty({shape.batch, shape.heads, tables.chunks, 64, 64}, DType::f32, device);
  m.sums = floats(sums);
  allow_memory(outer_kernel, sizeof(OuterShared));
  outer_kernel<<<dim3(static_cast<unsigned>(tables.chunks), heads, batch), 128, sizeof(OuterShared), here>>>(x, u, m,
                                                                                                             squared);
  check_launch("mixer: sums of chunks");
  carry_kernel<<<dim3(kTileElements / 2 / 256, heads * batch), 256, 0, here>>>(m, squared);
  check_launch("mixer: states of chunks");
  return states;
}

Tensor chunk_states(const MixerCall& call, const ChunkTables& tables) {
  return walk_states(
      call, tables,
      {call.inputs.k, call.inputs.v, tables.out, {}, call.inputs.initial_state, call.result.final_state, 1.0f, false});
}

}  // namespace furious::cuda
