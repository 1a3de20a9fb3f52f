// What the kernels share that read states.
#pragma once

#include <cstddef>
#include <type_traits>

#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/states.cuh"

namespace furious::cuda {

struct Reading {
  const bf16* states;
  const float* factors;  // [batch, heads, length]
  const float* reach;    // the same: where this is 0, so are they
  const float* shift;    // [batch, heads, length]: −e, where e is not 1
  Heads<bf16> out;
  float* normalizer;  // [batch, heads, length]
  int out_dim;
  int length, chunk, chunks, heads, batch, x_group, u_group;
  StateDims dims;
  int tiles;   // of a state
  int empty;   // the chunk that no state enters, or −1
  bool falls;  // `reach` within a chunk, which else rises
  float constant;
  bool sum_norm;
  // Gradients of decays, [batch, heads, length], or null: what `other`, the queries or keys that `out` is the gradient
  // of (of a squared score they are x, and read there), times that gradient gives before it is rounded, times this.
  double* decay;
  Heads<bf16> other;
  float decay_factor;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline int64_t place_of(const Reading& m, int head, int t) {
  return static_cast<int64_t>(head) * m.length + t;
}
__device__ inline float factor_of(const Reading& m, int head, int t) {
  return m.factors ? m.constant * m.factors[place_of(m, head, t)] : m.constant;
}

// A warp's 16 rows of results, rounded, times a factor for each of a thread's two rows, through its rows in `through`:
// columns from 64·panel on. pair_of(own row, j): the thread's pair among the columns 8j and up of `other`; null where
// results are no gradients of what decays.
template <int kPanels, class PairOf>
__device__ void write_rows(const Reading& m, int head, int row, const float (&acc)[kPanels][8][4],
                           const float (&factor)[2], const Tile<64>& through, int panel0, PairOf&& pair_of) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  int lane = static_cast<int>(threadIdx.x) % 32;
  asm volatile("" : "+r"(lane));  // else places of all are computed ahead, for which registers do not suffice
  if constexpr (!std::is_same_v<std::decay_t<PairOf>, std::nullptr_t>)
    if (m.decay) {
      uint32_t pairs[2][8 * kPanels];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 8 * kPanels; ++j) pairs[i][j] = pair_of(lane / 4 + 8 * i, j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = row + lane / 4 + 8 * i;
        float product = 0;
#pragma unroll
        for (int j = 0; j < 8 * kPanels; ++j)
          product +=
              low_of(pairs[i][j]) * acc[j / 8][j % 8][2 * i] + high_of(pairs[i][j]) * acc[j / 8][j % 8][2 * i + 1];
        product = quad_sum(product) * factor[i] * m.decay_factor;
        if (own < m.length && lane % 4 == 0) m.decay[place_of(m, head, own)] = static_cast<double>(product);
      }
      __syncwarp();
    }
  bf16* const to = m.out.row(head / m.heads, row, head % m.heads);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    if (panel > 0) __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t rounded[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float(&x)[4] = acc[panel][j + e / 2];
        rounded[e] = pack(x[e % 2 * 2] * factor[e % 2], x[e % 2 * 2 + 1] * factor[e % 2]);
      }
      store_matrices(through.at(warp * 16 + lane % 16, j + lane / 16), rounded);
    }
    __syncwarp();
    const int vector = 8 * (panel0 + panel) + lane % 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = 4 * i + lane / 8;
      if (row + own < m.length && 8 * vector < m.out_dim)
        *(reinterpret_cast<uint4*>(to + own * m.out.token) + vector) =
            *reinterpret_cast<const uint4*>(through.at(warp * 16 + own, lane % 8));
    }
  }
}
__device__ inline void write_zeros(const Reading& m, int head, int row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int own = lane / 8; own < 16; own += 4)
    if (row + own < m.length) {
      for (int vector = lane % 8; 8 * vector < m.out_dim; vector += 8)
        *(reinterpret_cast<uint4*>(m.out.row(head / m.heads, row + own, head % m.heads)) + vector) = uint4{};
      if (m.decay && lane % 8 == 0) m.decay[place_of(m, head, row + own)] = 0;
    }
}

#endif

// Of a squared score: the gradient of φ(x_i)ᵀ (S u_i + e_i Z), times f_i.
void contract(const Reading& m, const CUtensorMap& x, const CUtensorMap& u, cudaStream_t here);

// Of a linear score: out = f_i · x_i · S, or f_i · x_i · Sᵀ.
void read_linear(const Reading& m, const CUtensorMap& x, bool transposed, cudaStream_t here);

}  // namespace furious::cuda
