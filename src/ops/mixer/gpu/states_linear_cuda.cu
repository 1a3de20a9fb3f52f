// What the states of a linear score give to the tokens of their chunks, and to their gradients.
#include <type_traits>

#include "gpu/launch.cuh"
#include "ops/mixer/gpu/states_read.cuh"

namespace furious::cuda {
namespace {

// A block has 64 tokens; with states of more than four tiles 256, for which it reads the state once: two warpgroups
// have 64 at a time. Panels: 64 columns of x, and of the results.
template <int kIn, int kOut>
struct LinearShared {
  static constexpr bool kWide = kIn * kOut > 4;
  static constexpr int kGroups = kWide ? 2 : 1, kTurns = kWide ? 2 : 1;
  static constexpr int kTokens = kGroups * kTurns * kPanelRows, kThreads = 128 * kGroups;
  static_assert(kMostRows % kTokens == 0);
  unsigned char x[kGroups][kIn][kPanelBytes], state[kIn * kOut][kPanelBytes];
  Barrier full[kGroups], state_full;
};
template <bool kTransposed, int kIn, int kOut>
__global__ void __launch_bounds__(LinearShared<kIn, kOut>::kThreads)
    linear_kernel(const __grid_constant__ CUtensorMap map, const Reading m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = LinearShared<kIn, kOut>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int begin = static_cast<int>(blockIdx.x) * Shared::kTokens, h = static_cast<int>(blockIdx.y);
  const int b = static_cast<int>(blockIdx.z), c = begin / m.chunk;
  const int head = b * m.heads + h, group = static_cast<int>(threadIdx.x) / 128;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const auto token_of = [&](int turn) { return begin + (turn * Shared::kGroups + group) * kPanelRows; };
  if (c == m.empty) {
    for (int turn = 0; turn < Shared::kTurns; ++turn) write_zeros(m, head, token_of(turn) + warp * 16);
    return;
  }
  const auto copy_x = [&](int turn) {
    if (token_of(turn) >= m.length) return;
    shared.full[group].arrive_and_expect(kIn * kPanelBytes);
    for (int in = 0; in < kIn; ++in)
      copy_tile(shared.x[group][in], map, shared.full[group], 64 * in, token_of(turn), h / m.x_group, b);
  };
  if (threadIdx.x == 0) {
    for (Barrier& full : shared.full) full.init(1);
    shared.state_full.init(1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x % 128 == 0) copy_x(0);
  if (threadIdx.x == 0) {
    shared.state_full.arrive_and_expect(kIn * kOut * kPanelBytes);
    copy_bytes(shared.state, m.states + static_cast<int64_t>(head * m.chunks + c) * (kIn * kOut) * kTileElements,
               kIn * kOut * kPanelBytes, shared.state_full);
  }
#pragma unroll 1
  for (int turn = 0; turn < Shared::kTurns; ++turn) {
    const int first = token_of(turn) + warp * 16, row = first + lane / 4;
    if (token_of(turn) >= m.length) return;
    float acc[kOut][8][4] = {}, factor[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = row + 8 * i < m.length ? factor_of(m, head, row + 8 * i) : 0.0f;
    shared.full[group].wait(turn);
    shared.state_full.wait(0);
    uint32_t own[kIn][4][4];
#pragma unroll
    for (int in = 0; in < kIn; ++in)
#pragma unroll
      for (int i = 0; i < 4; ++i) panel_of(shared.x[group][in]).a_fragment(own[in][i], warp * 16, i);
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
    write_rows(m, head, first, acc, factor, panel_of(shared.x[group][0]), 0, [&](int own_row, int j) {
      if (first + own_row >= m.length || 8 * j >= m.out_dim) return 0u;
      return reinterpret_cast<const uint32_t*>(m.other.row(b, first + own_row, h))[4 * j + lane % 4];
    });
    if (turn + 1 == Shared::kTurns) return;
    fence_shared_writes();
    if (group == 0)
      warpgroup_barrier<0>();
    else
      warpgroup_barrier<1>();
    if (threadIdx.x % 128 == 0) copy_x(turn + 1);
  }
#endif
}

template <bool kTransposed>
void launch(const Reading& m, const CUtensorMap& x, cudaStream_t here) {
  const StateDims& dims = m.dims;
  const auto with_panels = [&](auto in, auto out) {
    using Shared = LinearShared<decltype(in)::value, decltype(out)::value>;
    constexpr auto kernel = linear_kernel<kTransposed, decltype(in)::value, decltype(out)::value>;
    allow_shared_memory(kernel, sizeof(Shared));
    const dim3 grid(blocks_for(m.length, Shared::kTokens), static_cast<unsigned>(m.heads),
                    static_cast<unsigned>(m.batch));
    kernel<<<grid, Shared::kThreads, sizeof(Shared), here>>>(x, m);
  };
  const auto with_count = [](int panels, auto&& f) {
    if (panels == 1) return f(std::integral_constant<int, 1>());
    if (panels == 2) return f(std::integral_constant<int, 2>());
    if (panels == 3) return f(std::integral_constant<int, 3>());
    f(std::integral_constant<int, 4>());
  };
  with_count(kTransposed ? dims.v_panels() : dims.qk_panels(), [&](auto in) {
    with_count(kTransposed ? dims.qk_panels() : dims.v_panels(), [&](auto out) { with_panels(in, out); });
  });
  check_launch("mixer: reading states");
}

}  // namespace

void read_linear(const Reading& m, const CUtensorMap& x, bool transposed, cudaStream_t here) {
  if (transposed)
    launch<true>(m, x, here);
  else
    launch<false>(m, x, here);
}

}  // namespace furious::cuda
