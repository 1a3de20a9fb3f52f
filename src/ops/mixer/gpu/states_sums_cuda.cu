// States that are sums of x_j u_jᵀ: those of linear scores, and the normalizer of squared ones. A kernel computes the
// sum of every chunk alone, and another one carries them through the chunks.
#include "ops/mixer/gpu/states_write.cuh"

namespace furious::cuda {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ float weight_of(const WalkArguments& m, int64_t row, int t) {
  if (t >= m.chunks.length) return 0.0f;
  float w = m.constant;
  if (m.factors) w *= m.factors[row + t];
  if (m.extra) w *= m.extra[row + t];
  return w;
}

#endif

// Σ_j w_j x_j u_jᵀ of a single chunk. A block has kGroups × kAcross tiles of it, each warpgroup those of its rows. With
// `same`, the columns of u are those of x.
template <int kGroupCount, int kAcrossCount>
struct OuterShared {
  static constexpr int kGroups = kGroupCount, kAcross = kAcrossCount;
  static constexpr int kStages = kGroups + kAcross > 2 ? 3 : 4;  // two blocks and more on a multiprocessor
  unsigned char x[kStages][kGroups][kPanelBytes], u[kStages][kAcross][kPanelBytes];
  float weights[kStages][kPanelRows];
  Barrier full[kStages];
};
template <class Shared>
__global__ void __launch_bounds__(128 * Shared::kGroups)
    outer_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap u, const WalkArguments m,
                 const bool same) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  constexpr int kStages = Shared::kStages, kAcross = Shared::kAcross;
  const int rows = m.summed / m.summed_across, across = (m.summed_across + kAcross - 1) / kAcross;
  const int blocks = (rows + Shared::kGroups - 1) / Shared::kGroups * across;
  const int c = static_cast<int>(blockIdx.x) / blocks, own = static_cast<int>(blockIdx.x) % blocks;
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int first_row = own / across * Shared::kGroups, first_column = own % across * kAcross;  // tiles
  const int64_t head = static_cast<int64_t>(b) * m.heads + h;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = c * m.chunks.chunk, tiles = m.chunks.tiles(c);
  if (threadIdx.x == 0) {
    for (Barrier& full : shared.full) full.init(1);
    fence_barriers();
  }
  __syncthreads();
  const auto load = [&](int tile) {
    const int stage = tile % kStages, token = begin + tile * kPanelRows;
    if (threadIdx.x < kPanelRows)
      shared.weights[stage][threadIdx.x] = weight_of(m, head * m.chunks.length, token + static_cast<int>(threadIdx.x));
    if (threadIdx.x != 0) return;
    shared.full[stage].arrive_and_expect((Shared::kGroups + (same ? 0 : kAcross)) * kPanelBytes);
    for (int i = 0; i < Shared::kGroups; ++i)
      copy_tile(shared.x[stage][i], x, shared.full[stage], 64 * (first_row + i), token, h / m.x_group, b);
    for (int i = 0; !same && i < kAcross; ++i)
      copy_tile(shared.u[stage][i], u, shared.full[stage], 64 * (first_column + i), token, h / m.u_group, b);
  };
  for (int tile = 0; tile < min(tiles, kStages - 1); ++tile) load(tile);
  float acc[kAcross][8][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    __syncthreads();  // the tile before is read, and the weights of this one are written
    if (tile + kStages - 1 < tiles) load(tile + kStages - 1);
    shared.full[stage].wait(tile / kStages);
    uint32_t f[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_matrices_transposed(
          f[step], panel_of(shared.x[stage][group]).at(16 * step + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 w = *reinterpret_cast<const float2*>(shared.weights[stage] + 16 * step + i / 2 * 8 + lane % 4 * 2);
        f[step][i] = pack(low_of(f[step][i]) * w.x, high_of(f[step][i]) * w.y);
      }
    }
    fence_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < kAcross; ++i)
        wgmma<1>(acc[i], f[step], operand_transposed(same ? shared.x[stage][i] : shared.u[stage][i], step), 1);
    commit_products();
    wait_for_products<0>();
#pragma unroll
    for (int i = 0; i < kAcross; ++i) settle(acc[i]);
  }
  if (first_row + group >= rows) return;
#pragma unroll
  for (int i = 0; i < kAcross; ++i) {
    if (first_column + i >= m.summed_across) return;
    const int tile = (first_row + group) * m.summed_across + first_column + i;
    float* const to = m.sums + ((head * m.chunks.chunks + c) * m.summed + tile) * kTileElements;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        *reinterpret_cast<float2*>(to + (16 * warp + lane / 4 + 8 * e) * 64 + 8 * j + lane % 4 * 2) =
            make_float2(acc[i][j][2 * e], acc[i][j][2 * e + 1]);
  }
#endif
}
void outer(const MixerCall& call, const CUtensorMap& x, const CUtensorMap& u, const WalkArguments& m, bool same) {
  const int rows = m.summed / m.summed_across;
  const auto launch = [&]<int kGroups, int kAcross>() {
    using Shared = OuterShared<kGroups, kAcross>;
    constexpr auto kernel = outer_kernel<Shared>;
    allow_shared_memory(kernel, sizeof(Shared));
    const unsigned blocks = blocks_for(rows, kGroups) * blocks_for(m.summed_across, kAcross);
    const dim3 grid(static_cast<unsigned>(m.chunks.chunks) * blocks, static_cast<unsigned>(m.heads),
                    static_cast<unsigned>(call.shape.batch));
    kernel<<<grid, 128 * kGroups, sizeof(Shared), stream(call.inputs.q.device())>>>(x, u, m, same);
  };
  if (rows > 1 && m.summed_across > 1)
    launch.template operator()<2, 2>();
  else if (rows > 1)
    launch.template operator()<2, 1>();
  else if (m.summed_across > 1)
    launch.template operator()<1, 2>();
  else
    launch.template operator()<1, 1>();
  check_launch("mixer: sums of chunks");
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

}  // namespace

void carry_sums(const MixerCall& call, const CUtensorMap& x, const CUtensorMap& u, const WalkArguments& m) {
  const bool normalizer = call.spec.score == Score::squared;
  outer(call, x, u, m, normalizer && m.summed == 1);
  const dim3 grid(static_cast<unsigned>(m.summed * kTileElements / 2 / 256), static_cast<unsigned>(m.heads),
                  static_cast<unsigned>(call.shape.batch));
  carry_kernel<<<grid, 256, 0, stream(call.inputs.q.device())>>>(m, normalizer);
  check_launch("mixer: states of chunks");
}

}  // namespace furious::cuda
