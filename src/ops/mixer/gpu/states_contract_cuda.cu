// What the states of a squared score give to gradients through the features of the tokens of their chunks:
//
//   dx_i = f_i ∂/∂x_i φ(x_i)ᵀ (S u_i + e_i Z)  with (q, g, −δ, S) for dq, and with (k, v, 1, dS) for dk
//
// Where g and δ are not divided by n, the factors f of dq are.
//
// A block has 256 tokens, for wider heads 128. t_ab = Σ_v u_v S_ab,v is a product, and dx_b += x_a t_ab (and dx_a +=
// x_b t_ab where only one of the two is kept) follow on the other units; a warpgroup has two sets of 64 tokens (wider
// heads: one), and one set's products run while it computes with those of the other.
#include "ops/mixer/gpu/states_stream.cuh"

namespace furious::cuda {
namespace {

template <int kBlocks, int kUPanels>
using ContractShared = std::conditional_t<kBlocks <= 4, Stream<1, kUPanels, 2, 2, 8>, Stream<2, kUPanels, 2, 1, 8>>;

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
    // Of a pair's tile, column 8j + … of t is a = j/2 and b = 8(j%2) + …; of a corner, a = 8 + j and b = 8 + ….
    const auto corner = [&](int set, int block) {
      float(&dx)[8][4] = results[set][block / 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 pairs =
            *reinterpret_cast<const uint4*>(panel(set, block / 4).at(warp * 16 + lane / 4 + 8 * i, block % 4 * 2 + 1));
        const uint32_t of_two[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& to = dx[block % 4 * 2 + 1][2 * i + e];
            to = fmaf(j % 2 == 0 ? low_of(of_two[j / 2]) : high_of(of_two[j / 2]), t[set][j][2 * i + e], to);
          }
      }
    };
    float sums[kSets][4][2], scalars[kSets][4][2];  // dx_a and x_a of four a, of the thread's rows
    const auto begin_four = [&](int set, int block, int four) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 words = *reinterpret_cast<const uint2*>(
            panel(set, block / 4).at(warp * 16 + lane / 4 + 8 * i, block % 4 * 2 + four / 2) + four % 2 * 4);
        scalars[set][0][i] = low_of(words.x);
        scalars[set][1][i] = high_of(words.x);
        scalars[set][2][i] = low_of(words.y);
        scalars[set][3][i] = high_of(words.y);
#pragma unroll
        for (int a = 0; a < 4; ++a) sums[set][a][i] = 0;
      }
    };
    // Two of the four a belong to a lane, in the half of the four lanes that holds these columns.
    const auto end_four = [&](int set, int block, int four) {
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
    };
    const auto pairs = [&](int set, int block, int other, const uint32_t(&of_b)[4]) {
      float(&dx)[8][4] = results[set][other / 4];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& to = dx[other % 4 * 2 + j % 2][i];
          to = fmaf(scalars[set][j / 2][i / 2], t[set][j][i], to);
          if (other == block && j % 2 == 0) continue;  // both (a, b) and (b, a) are kept
          const uint32_t pair = of_b[j % 2 * 2 + i / 2];
          float& sum = sums[set][j / 2][i / 2];
          sum = fmaf(i % 2 == 0 ? low_of(pair) : high_of(pair), t[set][j][i], sum);
        }
    };
    // A tile: load(set, fragment) and compute(set, fragment) for each set. Products of the other set run meanwhile, or,
    // unless it is the last, of the next tile.
    const auto each_set = [&](bool last_tile, auto&& load, auto&& compute) {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const bool last = set + 1 == kSets && last_tile;
        if (set + 1 < kSets) {
          begin_pairs(set + 1);
        } else if (kSets > 1 && !last) {
          wait(kU);
          begin_pairs(0);
        }
        uint32_t fragment[4];
        load(set, fragment);
        if (kSets > 1 && !last)
          wait_for_products<1>();
        else
          wait_for_products<0>();
        settle(t[set]);
        if (set + 1 == kSets) release(kU);
        compute(set, fragment);
        if (kSets == 1 && !last) {
          wait(kU);
          begin_pairs(0);
        }
      }
    };
    const auto load_x = [&](int set, int other, uint32_t(&of_b)[4]) {
      panel(set, other / 4).a_fragment(of_b, warp * 16, other % 4);
    };
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      wait(kU);
      begin_pairs(0);
#pragma unroll
      for (int four = 0; four < 2; ++four)
        each_set(
            false,
            [&](int set, uint32_t(&of_b)[4]) {
              begin_four(set, block, four);
              load_x(set, block, of_b);
            },
            [&](int set, const uint32_t(&of_b)[4]) {
              pairs(set, block, block, of_b);
              end_four(set, block, four);
            });
      each_set(
          true, [](int, uint32_t(&)[4]) {}, [&](int set, const uint32_t(&)[4]) { corner(set, block); });
      if (block + 1 == kBlocks) break;
#pragma unroll 1
      for (int four = 0; four < 4; ++four) {
        wait(kU);
        begin_pairs(0);
#pragma unroll
        for (int set = 0; set < kSets; ++set) begin_four(set, block, four);
#pragma unroll
        for (int other = block + 1; other < kBlocks; ++other)
          each_set(
              other + 1 == kBlocks, [&](int set, uint32_t(&of_b)[4]) { load_x(set, other, of_b); },
              [&](int set, const uint32_t(&of_b)[4]) { pairs(set, block, other, of_b); });
#pragma unroll
        for (int set = 0; set < kSets; ++set) end_four(set, block, four);
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

}  // namespace

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

}  // namespace furious::cuda
