// What the kernels share through which tiles of states stream. Blocks stay on their multiprocessor and take some tokens
// of a chunk after others; one warp has the tiles of their state copied to shared memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gpu/device.h"
#include "ops/mixer/gpu/states_read.cuh"

namespace furious::cuda {

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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// kRows tokens of a chunk and, of `panels` times 64 values, one. Those of chunks that no state enters come last: blocks
// have nearly nothing to do for them.
template <int kRows>
struct Item {
  int head, chunk, token, panel;  // head of all; the first token

  __device__ Item(const Reading& m, int item, int panels) {
    const int per_chunk = m.chunk / kRows, of_chunk = per_chunk * panels;
    const int entered = m.chunks - (m.empty >= 0 ? 1 : 0), first_empty = m.batch * m.heads * entered * of_chunk;
    if (item < first_empty) {
      head = item / of_chunk / entered;
      chunk = item / of_chunk % entered + (m.empty == 0 ? 1 : 0);
    } else {
      head = (item - first_empty) / of_chunk;
      chunk = m.empty;
    }
    panel = item / per_chunk % panels;
    token = chunk * m.chunk + item % per_chunk * kRows;
  }
  // Whether nothing reaches its tokens: no state enters, or decay has erased it.
  __device__ bool erased(const Reading& m) const {
    if (chunk == m.empty || !m.reach || token >= m.length) return chunk == m.empty;
    const int largest = m.falls ? token : min(token + kRows, m.length) - 1;
    return m.reach[place_of(m, head, largest)] == 0.0f;
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

}  // namespace furious::cuda
