// What the states of a linear score give to the tokens of their chunks, and to their gradients.
#include "gpu/launch.cuh"
#include "ops/mixer/gpu/states_read.cuh"

namespace furious::cuda {
namespace {

// A block has 64 tokens. Panels: 64 columns of x, and of the results.
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
  write_rows(m, head, first, acc, factor, panel_of(shared.x[0]), 0, [&](int own, int j) {
    if (first + own >= m.length || 8 * j >= m.out_dim) return 0u;
    return reinterpret_cast<const uint32_t*>(m.other.row(b, first + own, h))[4 * j + lane % 4];
  });
#endif
}

template <bool kTransposed>
void launch(const Reading& m, const CUtensorMap& x, cudaStream_t here) {
  const StateDims& dims = m.dims;
  const dim3 grid(blocks_for(m.length, kPanelRows), static_cast<unsigned>(m.heads), static_cast<unsigned>(m.batch));
  const auto with_panels = [&]<int kIn, int kOut>() {
    constexpr auto kernel = linear_kernel<kTransposed, kIn, kOut>;
    constexpr size_t bytes = sizeof(LinearShared<kIn, kOut>);
    allow_shared_memory(kernel, bytes);
    kernel<<<grid, 128, bytes, here>>>(x, m);
  };
  const bool wide_in = (kTransposed ? dims.v : dims.qk) > 64, wide_out = (kTransposed ? dims.qk : dims.v) > 64;
  if (wide_in && wide_out)
    with_panels.template operator()<2, 2>();
  else if (wide_in)
    with_panels.template operator()<2, 1>();
  else if (wide_out)
    with_panels.template operator()<1, 2>();
  else
    with_panels.template operator()<1, 1>();
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
