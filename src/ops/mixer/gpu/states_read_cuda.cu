// What the states give to the tokens of their chunks, and to their gradients:
//
//   y_i = f_i φ(x_i)ᵀ S                        with (q, S), and with (k, dS) for dv
//   dx_i = f_i ∂/∂x_i φ(x_i)ᵀ (S u_i + e_i Z)  with (q, g/n, −δ/n, S) for dq, and with (k, v, 1, dS) for dk
//
// Blocks stay on their multiprocessor and take 256 tokens of a chunk after another, 64 per warpgroup; one warp has the
// tiles of their state stream through shared memory. For y the operand A, tokens × 16 rows (a, b) of the state, is x_b
// times x_a of its row, made in registers. For dx, t_ab = Σ_v u_v S_ab,v is a product, and dx_b += x_a t_ab (and dx_a
// += x_b t_ab where only one of the two is kept) follow on the other units.
#include "gpu/device.h"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/states.cuh"

namespace furious::cuda {
namespace {

struct Reading {
  const bf16* states;
  const float* factors;  // [batch, heads, length]
  const float* shift;    // [batch, heads, length]: −e, where e is not 1
  Heads<bf16> out;
  float* normalizer;  // [batch, heads, length]
  int out_dim;
  int length, chunk, chunks, heads, batch, x_group, u_group, tiles;
  int empty;   // the chunk that no state enters, or −1
  bool falls;  // factors within a chunk, which else rise
  float constant;
  bool sum_norm;
  // Gradients of decays, [batch, heads, length], or null: what `other`, the queries or keys that `out` is the gradient
  // of, times that gradient gives before it is rounded, times this.
  double* decay;
  Heads<bf16> other;
  float decay_factor;
};

constexpr int kGroups = 4;  // warpgroups that multiply
constexpr int kRows = kGroups * kPanelRows;
constexpr int kThreads = 128 * (kGroups + 1);

// What a block has in shared memory: tiles of a state, and its rows of kInputs tensors.
template <int kInputCount, int kStageCount>
struct Stream {
  static constexpr int kInputs = kInputCount, kStages = kStageCount;
  unsigned char tiles[kStages][kPanelBytes];
  unsigned char x[2][kInputs][kGroups][kPanelBytes];
  Barrier full[kStages], empty[kStages], x_full[2], x_empty[2];
};
using ReadShared = Stream<1, 16>;
using ContractShared = Stream<2, 8>;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ int64_t place_of(const Reading& m, int head, int t) {
  return static_cast<int64_t>(head) * m.length + t;
}
__device__ float factor_of(const Reading& m, int head, int t) {
  return m.factors ? m.constant * m.factors[place_of(m, head, t)] : m.constant;
}

// kRows tokens of a chunk.
struct Item {
  int head, chunk, token;  // head of all; the first token

  __device__ Item(const Reading& m, int item) {
    const int per_chunk = m.chunk / kRows;
    head = item / per_chunk / m.chunks;
    chunk = item / per_chunk % m.chunks;
    token = chunk * m.chunk + item % per_chunk * kRows;
  }
  // Whether nothing reaches its tokens: no state enters, or decay has erased it.
  __device__ bool erased(const Reading& m) const {
    if (chunk == m.empty || !m.factors || token >= m.length) return chunk == m.empty;
    const int largest = m.falls ? token : min(token + kRows, m.length) - 1;
    return m.factors[place_of(m, head, largest)] == 0.0f;
  }
};

// A block's work: f(item, whether it is erased). That of the next item is looked up while f computes the current one.
template <class F>
__device__ void each_item(const Reading& m, F&& f) {
  const int items = m.batch * m.heads * m.chunks * (m.chunk / kRows), step = static_cast<int>(gridDim.x);
  int i = static_cast<int>(blockIdx.x);
  bool next = Item(m, i).erased(m);
  for (; i < items; i += step) {
    const bool erased = next;
    next = Item(m, min(i + step, items - 1)).erased(m);
    const Item item(m, i);
    if (item.token < m.length) f(item, erased);
  }
}

template <class Shared>
__device__ void init_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4 * kGroups);
    }
    for (int i = 0; i < 2; ++i) {
      shared.x_full[i].init(1);
      shared.x_empty[i].init(4 * kGroups);
    }
    fence_barriers();
  }
  __syncthreads();
}

// By one thread: has everything copied, in the order in which it is used.
template <class Shared>
__device__ void copy_all(Shared& shared, const CUtensorMap& x, const CUtensorMap& u, const Reading& m, int first_tile) {
  constexpr int kStages = Shared::kStages, kInputs = Shared::kInputs;
  int turn = 0, pass = 0;
  each_item(m, [&](const Item& item, bool erased) {
    if (erased) return;
    const int head = item.head, c = item.chunk, token = item.token;
    const int b = head / m.heads, h = head % m.heads, place = pass % 2;
    if (pass >= 2) shared.x_empty[place].wait(pass / 2 - 1);
    shared.x_full[place].arrive_and_expect(kInputs * kGroups * kPanelBytes);
    for (int i = 0; i < kGroups; ++i) {
      const int t = token + i * kPanelRows;
      copy_tile(shared.x[place][0][i], x, shared.x_full[place], 0, t, h / m.x_group, b);
      if constexpr (kInputs == 2) copy_tile(shared.x[place][1][i], u, shared.x_full[place], 0, t, h / m.u_group, b);
    }
    ++pass;
    const bf16* const state = m.states + static_cast<int64_t>(head * m.chunks + c) * m.tiles * kTileElements;
    for (int tile = first_tile; tile < m.tiles; ++tile, ++turn) {
      const int stage = turn % kStages;
      if (turn >= kStages) shared.empty[stage].wait(turn / kStages - 1);
      shared.full[stage].arrive_and_expect(kPanelBytes);
      copy_bytes(shared.tiles[stage], state + static_cast<int64_t>(tile) * kTileElements, kPanelBytes,
                 shared.full[stage]);
    }
  });
}

// A warp's 16 rows of results, rounded, times a factor for each of a thread's two rows, through its rows in
// `through`.
template <int kPanels>
__device__ void write_rows(const Reading& m, int head, int row, const float (&acc)[kPanels][8][4],
                           const float (&factor)[2], const Tile<64>& through) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  if (m.decay)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = row + lane / 4 + 8 * i;
      float product = 0;
      if (own < m.length) {
        const uint32_t* const other =
            reinterpret_cast<const uint32_t*>(m.other.row(head / m.heads, own, head % m.heads)) + lane % 4;
        uint32_t words[8 * kPanels] = {};
#pragma unroll
        for (int j = 0; j < 8 * kPanels; ++j)
          if (8 * j < m.out_dim) words[j] = other[j * 4];
#pragma unroll
        for (int j = 0; j < 8 * kPanels; ++j)
          product += low_of(words[j]) * acc[j / 8][j % 8][2 * i] + high_of(words[j]) * acc[j / 8][j % 8][2 * i + 1];
      }
      product = quad_sum(product) * factor[i] * m.decay_factor;
      if (own < m.length && lane % 4 == 0) m.decay[place_of(m, head, own)] = static_cast<double>(product);
    }
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    if (panel > 0) __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<uint32_t*>(through.at(warp * 16 + lane / 4 + 8 * i, j) + lane % 4 * 2) =
            pack(acc[panel][j][2 * i] * factor[i], acc[panel][j][2 * i + 1] * factor[i]);
    __syncwarp();
    const int vector = 8 * panel + lane % 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = 4 * i + lane / 8;
      if (row + own < m.length && 8 * vector < m.out_dim)
        *(reinterpret_cast<uint4*>(m.out.row(head / m.heads, row + own, head % m.heads)) + vector) =
            *reinterpret_cast<const uint4*>(through.at(warp * 16 + own, lane % 8));
    }
  }
}
__device__ void write_zeros(const Reading& m, int head, int row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int own = lane / 8; own < 16; own += 4)
    if (row + own < m.length) {
      for (int vector = lane % 8; 8 * vector < m.out_dim; vector += 8)
        *(reinterpret_cast<uint4*>(m.out.row(head / m.heads, row + own, head % m.heads)) + vector) = uint4{};
      if (m.decay && lane % 8 == 0) m.decay[place_of(m, head, row + own)] = 0;
    }
}

#endif

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) read_kernel(const __grid_constant__ CUtensorMap map, const Reading m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = ReadShared;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  init_barriers(shared);
  const int group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool sums = m.normalizer != nullptr;
  if (group == kGroups) {
    decrease_registers<32>();
    if (warp == 0 && lane == 0) copy_all(shared, map, map, m, sums ? 0 : 1);
    return;
  }
  increase_registers<112>();
  int turn = 0, pass = 0;
  each_item(m, [&](const Item& item, bool erased) {
    const int head = item.head, first = item.token + group * kPanelRows + warp * 16, row = first + lane / 4;
    if (erased) {
      write_zeros(m, head, first);
      if (sums && lane % 4 == 0)
        for (int i = 0; i < 2; ++i)
          if (row + 8 * i < m.length) m.normalizer[place_of(m, head, row + 8 * i)] = 0;
      return;
    }
    const int place = pass % 2;
    shared.x_full[place].wait(pass / 2);
    ++pass;
    const Tile<64> x = panel_of(shared.x[place][0][group]);
    uint32_t own[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x.a_fragment(own[i], warp * 16, i);
    float results[1][8][4];
    float(&acc)[8][4] = results[0];
    const auto begin = [&](const uint32_t(&f)[4][4], auto transposed, int add) {
      const int stage = turn % Shared::kStages;
      shared.full[stage].wait(turn / Shared::kStages);
      ++turn;
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (decltype(transposed)::value)
          wgmma<1>(acc, f[i], operand_transposed(shared.tiles[stage], i), i > 0 || add);
        else
          wgmma<0>(acc, f[i], operand(shared.tiles[stage], i), i > 0 || add);
      commit_products();
    };
    // Lets go of a tile; `after` more have begun since.
    const auto release = [&](int after) {
      if (lane == 0) shared.empty[(turn - 1 - after) % Shared::kStages].arrive();
    };
    float n[2] = {};
    if (sums) {
      begin(own, std::false_type(), 0);
      wait_for_products<0>();
      settle(acc);
      release(0);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t pair = own[j / 2][j % 2 * 2 + e / 2];
          n[e / 2] += acc[j][e] * (e % 2 == 0 ? low_of(pair) : high_of(pair));
        }
      n[0] = quad_sum(n[0]);
      n[1] = quad_sum(n[1]);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll 1
      for (int four = 0; four < 4; ++four) {
        uint32_t scalars[4][2];  // x_a twice, for each of the thread's rows
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 pairs =
              *reinterpret_cast<const uint2*>(x.at(warp * 16 + lane / 4 + 8 * i, 2 * block + four / 2) + four % 2 * 4);
          scalars[0][i] = twice_low(pairs.x);
          scalars[1][i] = twice_high(pairs.x);
          scalars[2][i] = twice_low(pairs.y);
          scalars[3][i] = twice_high(pairs.y);
        }
        uint32_t f[2][4][4];
#pragma unroll
        for (int other = block; other < kBlocks; ++other) {
          uint32_t(&now)[4][4] = f[(other - block) % 2];
#pragma unroll
          for (int a = 0; a < 4; ++a)
#pragma unroll
            for (int i = 0; i < 4; ++i) now[a][i] = multiply_pairs(own[other][i], scalars[a][i % 2]);
          begin(now, std::true_type(), block + other > 0 || four > 0);
          if (other + 1 < kBlocks)
            wait_for_products<1>();
          else
            wait_for_products<0>();
          if (other > block) release(1);
        }
        settle(acc);
        release(0);
      }
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = row + 8 * i < m.length;
      factor[i] = there ? factor_of(m, head, row + 8 * i) : 0.0f;
      if (!sums) continue;
      // Rounding may have made a sum of squares negative.
      const float total = fmaxf(n[i], 0.0f) * factor[i];
      factor[i] = total < kSmallestNormalizer ? 0.0f : 1 / n[i];
      if (there && lane % 4 == 0) m.normalizer[place_of(m, head, row + 8 * i)] = factor[i] > 0 ? total : 0.0f;
    }
    write_rows(m, head, first, results, factor, x);
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) shared.x_empty[place].arrive();
  });
#endif
}

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 1)
    contract_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap u_map,
                    const Reading m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = ContractShared;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  init_barriers(shared);
  const int group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (group == kGroups) {
    decrease_registers<32>();
    if (warp == 0 && lane == 0) copy_all(shared, x_map, u_map, m, m.sum_norm ? 0 : 1);
    return;
  }
  increase_registers<112>();
  int turn = 0, pass = 0;
  each_item(m, [&](const Item& item, bool erased) {
    const int head = item.head, first = item.token + group * kPanelRows + warp * 16, row = first + lane / 4;
    float results[1][8][4] = {};
    float(&dx)[8][4] = results[0];
    if (erased) return write_zeros(m, head, first);
    const int place = pass % 2;
    shared.x_full[place].wait(pass / 2);
    ++pass;
    const Tile<64> x = panel_of(shared.x[place][0][group]);
    uint32_t own[4][4];
    float t[8][4];
    // t = own · the rows of the next tile.
    const auto multiply = [&] {
      const int stage = turn % Shared::kStages;
      shared.full[stage].wait(turn / Shared::kStages);
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma<0>(t, own[i], operand(shared.tiles[stage], i), i > 0);
      commit_products();
      wait_for_products<0>();
      settle(t);
      if (lane == 0) shared.empty[stage].arrive();
      ++turn;
    };
    if (m.sum_norm) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x.a_fragment(own[i], warp * 16, i);
      multiply();
      float e[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        e[i] = !m.shift ? 2.0f : row + 8 * i < m.length ? -2.0f * m.shift[place_of(m, head, row + 8 * i)] : 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) dx[j][i] = t[j][i] * e[i / 2];
    }
    const Tile<64> u = panel_of(shared.x[place][1][group]);
#pragma unroll
    for (int i = 0; i < 4; ++i) u.a_fragment(own[i], warp * 16, i);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll 1
      for (int four = 0; four < 4; ++four) {
        float scalars[4][2], sums[4][2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 pairs =
              *reinterpret_cast<const uint2*>(x.at(warp * 16 + lane / 4 + 8 * i, 2 * block + four / 2) + four % 2 * 4);
          scalars[0][i] = low_of(pairs.x);
          scalars[1][i] = high_of(pairs.x);
          scalars[2][i] = low_of(pairs.y);
          scalars[3][i] = high_of(pairs.y);
        }
#pragma unroll
        for (int other = block; other < kBlocks; ++other) {
          multiply();
          // Column 8j + … of t is a = j/2 and b = 8(j%2) + ….
          if (other == block) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                dx[2 * other + j % 2][i] = fmaf(2 * scalars[j / 2][i / 2], t[j][i], dx[2 * other + j % 2][i]);
          } else {
            uint32_t pairs[4];
            x.a_fragment(pairs, warp * 16, other);
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const uint32_t pair = pairs[j % 2 * 2 + i / 2];
                dx[2 * other + j % 2][i] = fmaf(scalars[j / 2][i / 2], t[j][i], dx[2 * other + j % 2][i]);
                sums[j / 2][i / 2] = fmaf(i % 2 == 0 ? low_of(pair) : high_of(pair), t[j][i], sums[j / 2][i / 2]);
              }
          }
        }
        if (block + 1 == kBlocks) continue;
          // dx_a: held by one lane of the four.
#pragma unroll
        for (int a = 0; a < 4; ++a)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float sum = quad_sum(sums[a][i]);
            if (lane % 4 != four % 2 * 2 + a / 2) sum = 0;
            dx[2 * block][2 * i + a % 2] += four < 2 ? sum : 0.0f;
            dx[2 * block + 1][2 * i + a % 2] += four < 2 ? 0.0f : sum;
          }
      }
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = row + 8 * i < m.length ? factor_of(m, head, row + 8 * i) : 0.0f;
    write_rows(m, head, first, results, factor, x);
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) shared.x_empty[place].arrive();
  });
#endif
}

// A linear score: out = f_i · x_i · S, or with kTransposed f_i · x_i · Sᵀ. A block has 64 tokens. Panels: 64 columns of
// x, and of the results.
template <int kIn, int kOut>
struct LinearShared {
  unsigned char x[kIn][kPanelBytes], state[kIn * kOut][kPanelBytes];
  Barrier full;
};
template <bool kTransposed, int kIn, int kOut>
__global__ void __launch_bounds__(128) linear_kernel(const __grid_constant__ CUtensorMap map, const Reading m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<LinearShared<kIn, kOut>*>(memory);
  const int token = static_cast<int>(blockIdx.x) * kPanelRows, h = static_cast<int>(blockIdx.y);
  const int b = static_cast<int>(blockIdx.z), c = token / m.chunk;
  const int head = b * m.heads + h;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = token + warp * 16, row = first + lane / 4;
  if (c == m.empty) return write_zeros(m, head, first);
  if (threadIdx.x == 0) {
    shared.full.init(1);
    fence_barriers();
    shared.full.arrive_and_expect(kIn * (1 + kOut) * kPanelBytes);
    for (int in = 0; in < kIn; ++in) copy_tile(shared.x[in], map, shared.full, 64 * in, token, h / m.x_group, b);
    copy_bytes(shared.state, m.states + static_cast<int64_t>(head * m.chunks + c) * (kIn * kOut) * kTileElements,
               kIn * kOut * kPanelBytes, shared.full);
  }
  float acc[kOut][8][4] = {}, factor[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) factor[i] = row + 8 * i < m.length ? factor_of(m, head, row + 8 * i) : 0.0f;
  __syncthreads();
  shared.full.wait(0);
  uint32_t own[kIn][4][4];
#pragma unroll
  for (int in = 0; in < kIn; ++in)
#pragma unroll
    for (int i = 0; i < 4; ++i) panel_of(shared.x[in]).a_fragment(own[in][i], warp * 16, i);
  fence_products();
#pragma unroll
  for (int out = 0; out < kOut; ++out)
#pragma unroll
    for (int in = 0; in < kIn; ++in)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (kTransposed)
          wgmma<0>(acc[out], own[in][i], operand(shared.state[out * kIn + in], i), 1);
        else
          wgmma<1>(acc[out], own[in][i], operand_transposed(shared.state[in * kOut + out], i), 1);
  commit_products();
  wait_for_products<0>();
#pragma unroll
  for (int out = 0; out < kOut; ++out) settle(acc[out]);
  write_rows(m, head, first, acc, factor, panel_of(shared.x[0]));
#endif
}

Reading reading_of(const MixerCall& call, const Tensor& states, const Tensor& x, const Tensor& u, const Tensor& factors,
                   bool falls, float constant, int empty, const Tensor& out) {
  const MixerShape& shape = call.shape;
  Reading m = {};
  m.states = pointer<bfloat16>(states);
  m.factors = floats(factors);
  m.out = heads_of<bfloat16>(out, shape.heads);
  m.out_dim = static_cast<int>(out.size(3));
  m.length = static_cast<int>(shape.length);
  m.chunk = static_cast<int>(call.chunk);
  m.chunks = static_cast<int>(states.size(2));
  m.heads = static_cast<int>(shape.heads);
  m.batch = static_cast<int>(shape.batch);
  m.x_group = static_cast<int>(shape.heads / x.size(2));
  m.u_group = static_cast<int>(shape.heads / u.size(2));
  m.tiles = static_cast<int>(states.size(3));
  m.empty = empty;
  m.falls = falls;
  m.constant = constant;
  m.sum_norm = call.spec.norm == Norm::sum;
  return m;
}

dim3 persistent(const Reading& m) {
  const int64_t items = static_cast<int64_t>(m.batch) * m.heads * m.chunks * (m.chunk / kRows);
  return dim3(static_cast<unsigned>(std::min<int64_t>(items, multiprocessors())));
}

void read(const StateDims& dims, const Reading& m, const CUtensorMap& x, cudaStream_t here) {
  with_blocks(dims, [&](auto blocks) {
    constexpr auto kernel = read_kernel<decltype(blocks)::value>;
    allow_shared_memory(kernel, sizeof(ReadShared));
    kernel<<<persistent(m), kThreads, sizeof(ReadShared), here>>>(x, m);
  });
  check_launch("mixer: reading states");
}

void contract(const StateDims& dims, const Reading& m, const CUtensorMap& x, const CUtensorMap& u, cudaStream_t here) {
  with_blocks(dims, [&](auto blocks) {
    constexpr auto kernel = contract_kernel<decltype(blocks)::value>;
    allow_shared_memory(kernel, sizeof(ContractShared));
    kernel<<<persistent(m), kThreads, sizeof(ContractShared), here>>>(x, u, m);
  });
  check_launch("mixer: gradients through states");
}

template <bool kTransposed>
void linear(const StateDims& dims, const Reading& m, const CUtensorMap& x, cudaStream_t here) {
  const dim3 grid(blocks_for(m.length, kPanelRows), static_cast<unsigned>(m.heads), static_cast<unsigned>(m.batch));
  const auto launch = [&]<int kIn, int kOut>() {
    constexpr auto kernel = linear_kernel<kTransposed, kIn, kOut>;
    constexpr size_t bytes = sizeof(LinearShared<kIn, kOut>);
    allow_shared_memory(kernel, bytes);
    kernel<<<grid, 128, bytes, here>>>(x, m);
  };
  const bool wide_in = (kTransposed ? dims.v : dims.qk) > 64, wide_out = (kTransposed ? dims.qk : dims.v) > 64;
  if (wide_in && wide_out)
    launch.template operator()<2, 2>();
  else if (wide_in)
    launch.template operator()<2, 1>();
  else if (wide_out)
    launch.template operator()<1, 2>();
  else
    launch.template operator()<1, 1>();
  check_launch("mixer: reading states");
}

float score_constant(const MixerCall& call) {
  return call.spec.score == Score::squared ? call.shape.scale * call.shape.scale : call.shape.scale;
}

}  // namespace

bool states_support(const MixerCall& call) {
  const int64_t dim = std::max(call.shape.qk_dim, call.shape.v_dim);
  const bool linear = call.spec.score == Score::linear && call.spec.norm == Norm::none && dim <= 128;
  const bool squared = call.spec.score == Score::squared && dim <= 64;
  return forced_kernel() != "chunk states" && hopper_supports(call) && call.chunk % kRows == 0 && (squared || linear);
}

void read_states(const MixerCall& call, const ChunkTables& tables, const Tensor& states, const Tensor& past,
                 const Tensor& past_n) {
  const Tensor& q = call.inputs.q;
  Reading m =
      reading_of(call, states, q, q, tables.in, true, score_constant(call), call.inputs.initial_state ? -1 : 0, past);
  m.normalizer = floats(past_n);
  const cudaStream_t here = stream(q.device());
  if (call.spec.score == Score::linear) return linear<false>(dims_of(call.shape), m, tile_map(q), here);
  read(dims_of(call.shape), m, tile_map(q), here);
}

void state_gradients(const MixerCall& call, const ChunkTables& tables, const Tensor& states,
                     const ScaledGradient& scaled, const HeadGradients& gradients,
                     const Tensor& initial_state_gradient) {
  const Tensor &q = call.inputs.q, &k = call.inputs.k, &v = call.inputs.v;
  const Tensor& g = scaled.g;
  const Tensor delta = call.spec.norm == Norm::sum ? scaled.delta : Tensor();
  const float constant = score_constant(call);
  const StateDims dims = dims_of(call.shape);
  const cudaStream_t here = stream(q.device());
  const CUtensorMap q_map = tile_map(q), k_map = tile_map(k), v_map = tile_map(v), g_map = tile_map(g);
  const int first = call.inputs.initial_state ? -1 : 0, last = static_cast<int>(tables.chunks) - 1;
  Reading dq = reading_of(call, states, q, g, tables.in, true, constant, first, gradients.q);
  dq.shift = floats(delta);
  const float degree = call.spec.score == Score::squared ? 2 : 1;
  const auto with_decay = [&](Reading reading, const Tensor& decay, const Tensor& of, float factor) {
    reading.decay = doubles(decay);
    reading.other = heads_of<bfloat16>(of, call.shape.heads);
    reading.decay_factor = factor;
    return reading;
  };
  dq = with_decay(dq, gradients.row_decay, q, 1 / degree);
  const Tensor gradient_states =
      walk_states(call, tables, {q, g, tables.in, delta, {}, initial_state_gradient, constant, true});
  const Reading dk = with_decay(reading_of(call, gradient_states, k, v, tables.out, false, 1.0f, last, gradients.k),
                                gradients.key_decay, k, -1 / degree);
  const Reading dv = reading_of(call, gradient_states, k, k, tables.out, false, 1.0f, last, gradients.v);
  if (call.spec.score == Score::linear) {
    Reading dq_of_g = dq, dk_of_v = dk;
    dq_of_g.x_group = dq.u_group;
    dk_of_v.x_group = dk.u_group;
    linear<true>(dims, dq_of_g, g_map, here);
    linear<true>(dims, dk_of_v, v_map, here);
    linear<false>(dims, dv, k_map, here);
    return;
  }
  contract(dims, dq, q_map, g_map, here);
  contract(dims, dk, k_map, v_map, here);
  read(dims, dv, k_map, here);
}

}  // namespace furious::cuda
