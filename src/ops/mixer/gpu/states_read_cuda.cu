// What the states give to the tokens of their chunks, and to their gradients:
//
//   y_i = f_i φ(x_i)ᵀ S                        with (q, S), and with (k, dS) for dv
//   dx_i = f_i ∂/∂x_i φ(x_i)ᵀ (S u_i + e_i Z)  with (q, g/n, −δ/n, S) for dq, and with (k, v, 1, dS) for dk
//
// Blocks stay on their multiprocessor and take 256 tokens of a chunk after another (for dx of wider heads 128); one
// warp has the tiles of their state stream through shared memory. For y a warpgroup has 64 tokens; the operand A,
// tokens × 16 rows (a, b) of the state, is x_b times x_a of its row, made in registers, for 64 values at a time. For
// dx, t_ab = Σ_v u_v S_ab,v is a product, and dx_b += x_a t_ab (and dx_a += x_b t_ab where only one of the two is kept)
// follow on the other units; a warpgroup has two sets of 64 tokens (wider heads: one), and one set's products run while
// it computes with those of the other.
#include <type_traits>

#include "gpu/device.h"
#include "ops/mixer/gpu/states_read.cuh"

namespace furious::cuda {
namespace {

// What a block has in shared memory: tiles of a state, and its rows of x and u, kX and kU times 64 columns. kGroups:
// warpgroups that multiply, kSets times 64 rows each.
template <int kXPanels, int kUPanels, int kGroupCount, int kSetCount, int kStageCount>
struct Stream {
  static constexpr int kX = kXPanels, kU = kUPanels, kGroups = kGroupCount, kSets = kSetCount, kStages = kStageCount;
  static constexpr int kRows = kGroups * kSets * kPanelRows, kThreads = 128 * (kGroups + 1);
  static constexpr int kRegisters = kGroups == 4 ? 112 : 232, kCopyRegisters = kGroups == 4 ? 32 : 40;
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  unsigned char tiles[kStages][kPanelBytes];
  unsigned char rows[2][kGroups * kSets][kX + kU][kPanelBytes];
  float factors[2][kRows], shifts[2][kRows];  // of the rows, for dx
  Barrier full[kStages], empty[kStages], x_full[2], x_empty[2];
};
template <int kBlocks>
using ReadShared = Stream<(kBlocks + 3) / 4, 0, 4, 1, kBlocks <= 4 ? 16 : 8>;
template <int kBlocks, int kUPanels>
using ContractShared = std::conditional_t<kBlocks <= 4, Stream<1, kUPanels, 2, 2, 8>, Stream<2, kUPanels, 2, 1, 8>>;
constexpr int kMostRows = 256;  // of a block: chunks consist of as many
// Of the states of a squared score with heads of more than 64, and again of their gradients.
constexpr int64_t kMostWideBytes = int64_t{8} << 30;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// kRows tokens of a chunk and, of `panels` times 64 values, one.
template <int kRows>
struct Item {
  int head, chunk, token, panel;  // head of all; the first token

  __device__ Item(const Reading& m, int item, int panels) {
    const int per_chunk = m.chunk / kRows, chunks = item / per_chunk / panels;
    head = chunks / m.chunks;
    chunk = chunks % m.chunks;
    panel = item / per_chunk % panels;
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
template <int kRows, class F>
__device__ void each_item(const Reading& m, int panels, F&& f) {
  const int items = m.batch * m.heads * m.chunks * panels * (m.chunk / kRows), step = static_cast<int>(gridDim.x);
  int i = static_cast<int>(blockIdx.x);
  bool next = Item<kRows>(m, i, panels).erased(m);
  for (; i < items; i += step) {
    const bool erased = next;
    next = Item<kRows>(m, min(i + step, items - 1), panels).erased(m);
    const Item<kRows> item(m, i, panels);
    if (item.token < m.length) f(item, erased);
  }
}

template <bool kFilled, class Shared>
__device__ void init_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4 * Shared::kGroups);
    }
    for (int i = 0; i < 2; ++i) {
      shared.x_full[i].init(kFilled ? 1 + 32 : 1);
      shared.x_empty[i].init(4 * Shared::kGroups);
    }
    fence_barriers();
  }
  __syncthreads();
}

// By one thread: has everything copied, in the order in which it is used. An item has the tiles of one of `panels`
// times 64 values; with a single one, those of all values for each (a, b).
template <class Shared>
__device__ void copy_all(Shared& shared, const CUtensorMap& x, const CUtensorMap& u, const Reading& m, int panels,
                         bool normalizer) {
  constexpr int kStages = Shared::kStages, kX = Shared::kX, kU = Shared::kU, kSets = Shared::kGroups * Shared::kSets;
  const int first = m.dims.normalizer_tiles(), pairs = m.dims.pair_tiles();
  uint32_t turn = 0;
  int pass = 0;
  each_item<Shared::kRows>(m, panels, [&](const auto& item, bool erased) {
    if (erased) return;
    const int head = item.head, c = item.chunk, token = item.token;
    const int b = head / m.heads, h = head % m.heads, place = pass % 2;
    if (pass >= 2) shared.x_empty[place].wait(pass / 2 - 1);
    shared.x_full[place].arrive_and_expect((kX + kU) * kSets * kPanelBytes);
    for (int i = 0; i < kSets; ++i) {
      const int t = token + i * kPanelRows;
      for (int panel = 0; panel < kX + kU; ++panel) {
        const bool is_x = panel < kX;
        copy_tile(shared.rows[place][i][panel], is_x ? x : u, shared.x_full[place], 64 * (is_x ? panel : panel - kX), t,
                  h / (is_x ? m.x_group : m.u_group), b);
      }
    }
    ++pass;
    const bf16* const state = m.states + static_cast<int64_t>(head * m.chunks + c) * m.tiles * kTileElements;
    const auto copy = [&](int tile) {
      const uint32_t stage = turn % kStages;
      if (turn >= kStages) shared.empty[stage].wait(turn / kStages - 1);
      shared.full[stage].arrive_and_expect(kPanelBytes);
      copy_bytes(shared.tiles[stage], state + static_cast<int64_t>(tile) * kTileElements, kPanelBytes,
                 shared.full[stage]);
      ++turn;
    };
    for (int tile = normalizer ? 0 : first; tile < first; ++tile) copy(tile);
    const int own = panels > 1 ? item.panel : 0, end = panels > 1 ? own + 1 : m.dims.v_panels();
    for (int tile = 0; tile < pairs; ++tile)
      for (int panel = own; panel < end; ++panel) copy(first + panel * pairs + tile);
  });
}

// By one warp: what belongs to the rows of x. (The kernel for y reads its factors itself, which takes fewer registers.)
template <class Shared>
__device__ void fill_rows(Shared& shared, const Reading& m) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int pass = 0;
  each_item<Shared::kRows>(m, 1, [&](const auto& item, bool erased) {
    if (erased) return;
    const int place = pass % 2;
    if (pass >= 2) shared.x_empty[place].wait(pass / 2 - 1);
    ++pass;
#pragma unroll 2
    for (int i = lane; i < Shared::kRows; i += 32) {
      const int row = item.token + i;
      shared.factors[place][i] = row < m.length ? factor_of(m, item.head, row) : 0.0f;
      if (m.shift) shared.shifts[place][i] = row < m.length ? m.shift[place_of(m, item.head, row)] : 0.0f;
    }
    shared.x_full[place].arrive();
  });
}

#endif

template <int kBlocks>
__global__ void __launch_bounds__(ReadShared<kBlocks>::kThreads, 1)
    read_kernel(const __grid_constant__ CUtensorMap map, const Reading m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = ReadShared<kBlocks>;
  constexpr int kX = Shared::kX;
  constexpr bool kKept = kX == 1;  // x in registers
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  init_barriers<false>(shared);
  const int group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, panels = m.dims.v_panels();
  const bool sums = m.normalizer != nullptr;
  if (group == Shared::kGroups) {
    decrease_registers<Shared::kCopyRegisters>();
    if (warp == 0 && lane == 0) copy_all(shared, map, map, m, panels, sums);
    return;
  }
  begin_later(group, 1200);
  increase_registers<Shared::kRegisters>();
  uint32_t turn = 0;
  int pass = 0;
  each_item<Shared::kRows>(m, panels, [&](const auto& item, bool erased) {
    const int head = item.head, first = item.token + group * kPanelRows + warp * 16, row = first + lane / 4;
    const bool writes_sums = sums && item.panel == 0 && lane % 4 == 0;
    if (erased) {
      if (item.panel == 0) write_zeros(m, head, first);
      if (writes_sums)
        for (int i = 0; i < 2; ++i)
          if (row + 8 * i < m.length) m.normalizer[place_of(m, head, row + 8 * i)] = 0;
      return;
    }
    const int place = pass % 2;
    shared.x_full[place].wait(pass / 2);
    ++pass;
    const auto x_panel = [&](int i) { return panel_of(shared.rows[place][group][i]); };
    [[maybe_unused]] uint32_t kept[4][4];
    if constexpr (kKept)
#pragma unroll
      for (int i = 0; i < 4; ++i) x_panel(0).a_fragment(kept[i], warp * 16, i);
    // The i-th 16 columns of x as an operand A.
    const auto x_fragment = [&](uint32_t(&to)[4], int i) {
      if constexpr (kKept) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = kept[i][e];
      } else {
        x_panel(i / 4).a_fragment(to, warp * 16, i % 4);
      }
    };
    float results[1][8][4];
    float(&acc)[8][4] = results[0];
    const auto begin = [&](const uint32_t(&f)[4][4], auto transposed, int add) {
      const uint32_t stage = turn % Shared::kStages;
      shared.full[stage].wait(turn / Shared::kStages);
      ++turn;
      constexpr bool kTransposed = decltype(transposed)::value;
      const uint64_t rows = kTransposed ? operand_transposed(shared.tiles[stage], 0) : operand(shared.tiles[stage], 0);
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma<kTransposed>(acc, f[i], kTransposed ? rows_at(rows, i) : columns_at(rows, i), i > 0 || add);
      commit_products();
    };
    // Lets go of a tile; `after` more have begun since.
    const auto release = [&](int after) {
      if (lane == 0) shared.empty[(turn - 1 - after) % Shared::kStages].arrive();
    };
    float n[2] = {};
    if (sums) {
#pragma unroll
      for (int to = 0; to < kX; ++to) {
#pragma unroll
        for (int from = 0; from < kX; ++from) {
          uint32_t f[4][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x_fragment(f[i], 4 * from + i);
          begin(f, std::false_type(), from > 0);
          wait_for_products<0>();
          settle(acc);
          release(0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t f[4];
          x_fragment(f, 4 * to + i);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const uint32_t pair = f[e / 2];  // of row e / 2 % 2
            n[e / 2 % 2] += acc[2 * i + e / 4][e % 4] * (e % 2 == 0 ? low_of(pair) : high_of(pair));
          }
        }
      }
      n[0] = quad_sum(n[0]);
      n[1] = quad_sum(n[1]);
    }
    // A product runs into the next tile. Heads of up to 64 have no loop here, so it need not end for the next four a.
    constexpr int kUnroll = kBlocks <= 4 ? 4 : 1;
    uint32_t f[2][4][4];
    int tiles = 0;  // since a product ran alone; a constant where the loops are unrolled
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll kUnroll
      for (int four = 0; four < 4; ++four) {
        uint32_t scalars[4][2];  // x_a twice, for each of the thread's rows
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 pairs = *reinterpret_cast<const uint2*>(
              x_panel(block / 4).at(warp * 16 + lane / 4 + 8 * i, block % 4 * 2 + four / 2) + four % 2 * 4);
          scalars[0][i] = twice_low(pairs.x);
          scalars[1][i] = twice_high(pairs.x);
          scalars[2][i] = twice_low(pairs.y);
          scalars[3][i] = twice_high(pairs.y);
        }
        if (kUnroll == 1) tiles = 0;
#pragma unroll
        for (int other = block; other < kBlocks; ++other, ++tiles) {
          const bool last = other + 1 == kBlocks && (kUnroll == 1 || (block + 1 == kBlocks && four == 3));
          uint32_t(&now)[4][4] = f[tiles % 2];
          uint32_t x[4];
          x_fragment(x, other);
          if (other == block + 1)  // these tiles count twice
#pragma unroll
            for (int a = 0; a < 4; ++a)
#pragma unroll
              for (int i = 0; i < 2; ++i) scalars[a][i] = multiply_pairs(scalars[a][i], pack(2, 2));
#pragma unroll
          for (int a = 0; a < 4; ++a)
#pragma unroll
            for (int i = 0; i < 4; ++i) now[a][i] = multiply_pairs(x[i], scalars[a][i % 2]);
          begin(now, std::true_type(), block + other > 0 || four > 0);
          if (last)
            wait_for_products<0>();
          else
            wait_for_products<1>();
          if (tiles > 0) release(1);
          if (!last) continue;
          settle(acc);
          release(0);
        }
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
      if (there && writes_sums) m.normalizer[place_of(m, head, row + 8 * i)] = factor[i] > 0 ? total : 0.0f;
    }
    write_rows(m, head, first, results, factor, x_panel(0), item.panel, nullptr);
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) shared.x_empty[place].arrive();
  });
#endif
}

template <int kBlocks, int kUPanels>
__global__ void __launch_bounds__(ContractShared<kBlocks, kUPanels>::kThreads, 1)
    contract_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap u_map,
                    const Reading m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = ContractShared<kBlocks, kUPanels>;
  constexpr int kX = Shared::kX, kU = Shared::kU;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  init_barriers<true>(shared);
  const int group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (group == Shared::kGroups) {
    decrease_registers<Shared::kCopyRegisters>();
    if (warp == 0 && lane == 0) copy_all(shared, x_map, u_map, m, 1, m.sum_norm);
    if (warp == 1) fill_rows(shared, m);
    return;
  }
  begin_later(group, 2500);
  increase_registers<Shared::kRegisters>();
  constexpr int kSets = Shared::kSets;
  uint32_t turn = 0;
  int pass = 0;
  each_item<Shared::kRows>(m, 1, [&](const auto& item, bool erased) {
    const int head = item.head;
    const auto first_of = [&](int set) { return item.token + (group * kSets + set) * kPanelRows + warp * 16; };
    if (erased) {
      for (int set = 0; set < kSets; ++set) write_zeros(m, head, first_of(set));
      return;
    }
    float results[kSets][kX][8][4] = {};
    const int place = pass % 2;
    shared.x_full[place].wait(pass / 2);
    ++pass;
    // Of x, then of u.
    const auto panel = [&](int set, int i) { return panel_of(shared.rows[place][group * kSets + set][i]); };
    uint32_t own[kSets][kU][4][4];
    float t[kSets][8][4];
    // Waits for the next tiles.
    const auto wait = [&](int tiles) {
#pragma unroll
      for (int i = 0; i < tiles; ++i) shared.full[(turn + i) % Shared::kStages].wait((turn + i) / Shared::kStages);
    };
    // t of a set = `add` · t + its rows · the rows of the tile `ahead` of the next.
    const auto begin = [&](int set, const uint32_t(&rows)[4][4], int ahead, int add) {
      const uint64_t tile = operand(shared.tiles[(turn + ahead) % Shared::kStages], 0);
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma<0>(t[set], rows[i], columns_at(tile, i), i > 0 || add);
      commit_products();
    };
    // The next kU tiles, the last set of which goes on to those behind them.
    const auto begin_pairs = [&](int set) {
#pragma unroll
      for (int p = 0; p < kU; ++p) begin(set, own[set][p], p, p > 0);
      if (set + 1 == kSets) turn += kU;
    };
    // Lets go of the last tiles before the next.
    const auto release = [&](int tiles) {
#pragma unroll
      for (int i = 1; i <= tiles; ++i)
        if (lane == 0) shared.empty[(turn - i) % Shared::kStages].arrive();
    };
    if (m.sum_norm) {
      float e[kSets][2];
#pragma unroll
      for (int set = 0; set < kSets; ++set)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          e[set][i] = m.shift ? -shared.shifts[place][first_of(set) - item.token + lane / 4 + 8 * i] : 1.0f;
#pragma unroll
      for (int to = 0; to < kX; ++to) {
#pragma unroll
        for (int from = 0; from < kX; ++from) {
          wait(1);
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            uint32_t(&rows)[4][4] = own[set][0];
#pragma unroll
            for (int i = 0; i < 4; ++i) panel(set, from).a_fragment(rows[i], warp * 16, i);
            begin(set, rows, 0, from > 0);
          }
          wait_for_products<0>();
#pragma unroll
          for (int set = 0; set < kSets; ++set) settle(t[set]);
          ++turn;
          release(1);
        }
#pragma unroll
        for (int set = 0; set < kSets; ++set)
#pragma unroll
          for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) results[set][to][j][i] = t[set][j][i] * e[set][i / 2];
      }
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set)
#pragma unroll
      for (int p = 0; p < kU; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i) panel(set, kX + p).a_fragment(own[set][p][i], warp * 16, i);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll 1
      for (int four = 0; four < 4; ++four) {
        float sums[kSets][4][2] = {}, scalars[kSets][4][2];  // x_a of the thread's rows
        wait(kU);
        begin_pairs(0);
#pragma unroll
        for (int set = 0; set < kSets; ++set)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint2 pairs = *reinterpret_cast<const uint2*>(
                panel(set, block / 4).at(warp * 16 + lane / 4 + 8 * i, block % 4 * 2 + four / 2) + four % 2 * 4);
            scalars[set][0][i] = low_of(pairs.x);
            scalars[set][1][i] = high_of(pairs.x);
            scalars[set][2][i] = low_of(pairs.y);
            scalars[set][3][i] = high_of(pairs.y);
          }
#pragma unroll
        for (int other = block; other < kBlocks; ++other)
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            // Products of the other set run meanwhile.
            const bool last = set + 1 == kSets && other + 1 == kBlocks;
            if (set + 1 < kSets) {
              begin_pairs(set + 1);
            } else if (kSets > 1 && !last) {
              wait(kU);
              begin_pairs(0);
            }
            uint32_t of_b[4];  // x_b of the thread's rows
            if (other > block) panel(set, other / 4).a_fragment(of_b, warp * 16, other % 4);
            if (kSets > 1 && !last)
              wait_for_products<1>();
            else
              wait_for_products<0>();
            settle(t[set]);
            if (set + 1 == kSets) release(kU);
            // Column 8j + … of t is a = j/2 and b = 8(j%2) + ….
            float(&dx)[8][4] = results[set][other / 4];
            if (other == block) {
#pragma unroll
              for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  float& to = dx[other % 4 * 2 + j % 2][i];
                  to = fmaf(scalars[set][j / 2][i / 2], t[set][j][i], to);
                }
            } else {
#pragma unroll
              for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const uint32_t pair = of_b[j % 2 * 2 + i / 2];
                  float& to = dx[other % 4 * 2 + j % 2][i];
                  to = fmaf(scalars[set][j / 2][i / 2], t[set][j][i], to);
                  float& sum = sums[set][j / 2][i / 2];
                  sum = fmaf(i % 2 == 0 ? low_of(pair) : high_of(pair), t[set][j][i], sum);
                }
            }
            if (kSets == 1 && !last) {
              wait(kU);
              begin_pairs(0);
            }
          }
        if (block + 1 == kBlocks) continue;
          // dx_a: two of the four a belong to a lane, in the half of the four lanes that holds these columns.
#pragma unroll
        for (int set = 0; set < kSets; ++set)
#pragma unroll
          for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float low = sums[set][a][i], high = sums[set][a + 2][i];
              low += __shfl_xor_sync(0xFFFFFFFFu, low, 2);
              high += __shfl_xor_sync(0xFFFFFFFFu, high, 2);
              const bool odd = lane % 2 != 0, here = lane % 4 / 2 == four % 2;
              const float sum = (odd ? high : low) + __shfl_xor_sync(0xFFFFFFFFu, odd ? low : high, 1);
              float(&dx)[8][4] = results[set][block / 4];
              dx[block % 4 * 2][2 * i + a] += here && four < 2 ? sum : 0.0f;
              dx[block % 4 * 2 + 1][2 * i + a] += here && four >= 2 ? sum : 0.0f;
            }
      }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const float* const of_rows = shared.factors[place] + (first_of(set) - item.token) + lane / 4;
      const float factor[2] = {2 * of_rows[0], 2 * of_rows[8]};  // the gradient of a square
      // Results are gradients of x.
      write_rows(m, head, first_of(set), results[set], factor, panel(set, 0), 0, [&](int own, int j) {
        return *reinterpret_cast<const uint32_t*>(panel(set, j / 8).at(warp * 16 + own, j % 8) + lane % 4 * 2);
      });
    }
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) shared.x_empty[place].arrive();
  });
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
  m.dims = dims_of(shape);
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

template <class Shared>
dim3 persistent(const Reading& m, int panels) {
  const int64_t items = static_cast<int64_t>(m.batch) * m.heads * m.chunks * (m.chunk / Shared::kRows) * panels;
  return dim3(static_cast<unsigned>(std::min<int64_t>(items, multiprocessors())));
}

// Calls f with the blocks of a squared score's heads as a constant.
template <int kBlocks = 1, class F>
void with_blocks(const StateDims& dims, F&& f) {
  if constexpr (kBlocks < 8)
    if (dims.blocks() > kBlocks) return with_blocks<kBlocks + 1>(dims, f);
  f(std::integral_constant<int, kBlocks>());
}

void read(const Reading& m, const CUtensorMap& x, cudaStream_t here) {
  with_blocks(m.dims, [&](auto blocks) {
    using Shared = ReadShared<decltype(blocks)::value>;
    constexpr auto kernel = read_kernel<decltype(blocks)::value>;
    allow_shared_memory(kernel, sizeof(Shared));
    kernel<<<persistent<Shared>(m, m.dims.v_panels()), Shared::kThreads, sizeof(Shared), here>>>(x, m);
  });
  check_launch("mixer: reading states");
}

void contract(const Reading& m, const CUtensorMap& x, const CUtensorMap& u, cudaStream_t here) {
  with_blocks(m.dims, [&](auto blocks) {
    const auto launch = [&]<int kUPanels>() {
      using Shared = ContractShared<decltype(blocks)::value, kUPanels>;
      constexpr auto kernel = contract_kernel<decltype(blocks)::value, kUPanels>;
      allow_shared_memory(kernel, sizeof(Shared));
      kernel<<<persistent<Shared>(m, 1), Shared::kThreads, sizeof(Shared), here>>>(x, u, m);
    };
    if constexpr (blocks() > 4)
      if (m.dims.v_panels() == 2) return launch.template operator()<2>();
    launch.template operator()<1>();
  });
  check_launch("mixer: gradients through states");
}

float score_constant(const MixerCall& call) {
  return call.spec.score == Score::squared ? call.shape.scale * call.shape.scale : call.shape.scale;
}

}  // namespace

bool states_support(const MixerCall& call) {
  const StateDims dims = dims_of(call.shape);
  if (forced_kernel() == "chunk states" || !hopper_supports(call) || call.chunk % kMostRows != 0 ||
      std::max(dims.qk, dims.v) > 128)
    return false;
  if (call.spec.score == Score::linear) return call.spec.norm == Norm::none;
  if (call.spec.score != Score::squared) return false;
  if (dims.qk <= 64) return dims.v <= 64;
  // All states are in memory at once.
  const int64_t chunks = (call.shape.length + call.chunk - 1) / call.chunk;
  return call.shape.batch * call.shape.heads * chunks * dims.squared_tiles() * kPanelBytes <= kMostWideBytes;
}

void read_states(const MixerCall& call, const ChunkTables& tables, const Tensor& states, const Tensor& past,
                 const Tensor& past_n) {
  const Tensor& q = call.inputs.q;
  Reading m =
      reading_of(call, states, q, q, tables.in, true, score_constant(call), call.inputs.initial_state ? -1 : 0, past);
  m.normalizer = floats(past_n);
  const cudaStream_t here = stream(q.device());
  if (call.spec.score == Score::linear) return read_linear(m, tile_map(q), false, here);
  read(m, tile_map(q), here);
}

void state_gradients(const MixerCall& call, const ChunkTables& tables, const Tensor& states,
                     const ScaledGradient& scaled, const HeadGradients& gradients,
                     const Tensor& initial_state_gradient) {
  const Tensor &q = call.inputs.q, &k = call.inputs.k, &v = call.inputs.v;
  const Tensor& g = scaled.g;
  const Tensor delta = call.spec.norm == Norm::sum ? scaled.delta : Tensor();
  const float constant = score_constant(call);
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
    read_linear(dq_of_g, g_map, true, here);
    read_linear(dk_of_v, v_map, true, here);
    read_linear(dv, k_map, false, here);
    return;
  }
  contract(dq, q_map, g_map, here);
  contract(dk, k_map, v_map, here);
  read(dv, k_map, here);
}

}  // namespace furious::cuda
