// Gradients through the states of chunks (chunk_states.cuh): dx_i += f_i ∂/∂x_i φ(x_i)ᵀ S u_i, with (q, [g, −δ], S) for
// dq, and with (k, [v, 1], dS) for dk.
//
// A block has 128 tokens of a chunk or fewer, 16 per warp, with u in registers, and the state streams through shared
// memory, 64 rows (a, b) at a time. t_ab = Σ_v u_v S_ab,v is a product; dx_b += x_a t_ab and, where only one of the two
// is kept, dx_a += x_b t_ab follow at once: the first in registers until block B is done, the second in shared memory.
#include "ops/mixer/gpu/chunk_states.cuh"

namespace furious::cuda::mma_states {
namespace {

constexpr int kStageRows = 64;
__host__ __device__ constexpr int rows_of(int warps) {
  return warps * 16;
}

struct ContractArguments {
  Sizes sizes;
  Heads<bf16> x, u, dx;
  const bf16* states;
  const float *factors, *delta, *reach;
  int empty;
  bool reverse;
  bool wide;  // rows of dx
  double* decay;
  float decay_factor;
};

// The tokens of a block, and its shared memory.
template <int kWidth>
struct Place {
  static constexpr int kStages = kWidth <= 104 ? 2 : 3;  // with two, two blocks fit on a multiprocessor
  bf16 (*stages)[kStageRows][kWidth];
  bf16* x;
  union {
    bf16* u;  // until its fragments are in registers
    float* dx;
  };
  int rows;
  int pitch, sum_pitch;  // of those of x and dx
  int64_t head, b, h;
  int c, token, end;

  __device__ Place(const Sizes& s, unsigned char* memory)
      : rows(rows_of(static_cast<int>(blockDim.x) / 32)),
        head(s.range.first + blockIdx.y),
        b(head / s.heads),
        h(head % s.heads) {
    stages = reinterpret_cast<bf16(*)[kStageRows][kWidth]>(memory);
    pitch = 16 * s.blocks + 8;
    sum_pitch = 16 * s.blocks + 4;
    x = &stages[kStages][0][0];
    u = x + rows * pitch;
    const int per_chunk = (s.chunk + rows - 1) / rows;
    c = static_cast<int>(blockIdx.x) / per_chunk;
    token = c * s.chunk + static_cast<int>(blockIdx.x) % per_chunk * rows;
    end = min(token + rows, s.end_of(c));
  }
  static size_t bytes(int blocks, int warps) {
    const auto rows = static_cast<size_t>(rows_of(warps));
    const size_t u = sizeof(bf16) * rows * kWidth, dx = sizeof(float) * rows * (16 * blocks + 4);
    return sizeof(bf16) * (kStages * kStageRows * kWidth + rows * (16 * blocks + 8)) + std::max(u, dx);
  }
};

// x·dx to the gradient of the decay, and dx to memory; a warp's 16 tokens, four at a time, eight columns per lane.
template <int kWidth>
__device__ void write_rows(const ContractArguments& m, const Place<kWidth>& p) {
  const Sizes& s = m.sizes;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = warp * 16 + 4 * i + lane / 8, token = p.token + row;
    const bool there = token < p.end;
    const int64_t place = s.token(p.head, there ? token : p.token);
    const float factor = m.factors ? m.factors[place] : 1.0f;
    bf16* const to = m.dx.row(p.b, there ? token : p.token, p.h);
    float product = 0;
#pragma unroll 2
    for (int column = lane % 8 * 8; column < s.qk_dim && there; column += 64) {
      union Eight {
        uint4 all;
        bf16 each[8];
      } x, y;
      x.all = *reinterpret_cast<const uint4*>(p.x + row * p.pitch + column);
      if (m.wide)
        y.all = *reinterpret_cast<const uint4*>(to + column);
      else
#pragma unroll
        for (int e = 0; e < 8; ++e) y.each[e] = to[column + e];
      const float* const dx = p.dx + row * p.sum_pitch + column;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float value = dx[e] * factor;
        product = fmaf(to_float(x.each[e]), value, product);
        y.each[e] = from_float<bf16>(to_float(y.each[e]) + value);
      }
      if (m.wide)
        *reinterpret_cast<uint4*>(to + column) = y.all;
      else
#pragma unroll
        for (int e = 0; e < 8; ++e) to[column + e] = y.each[e];
    }
    if (!m.decay) continue;
    product = warp_sum<8>(product);
    if (lane % 8 == 0 && there) m.decay[place] += static_cast<double>(product * m.decay_factor);
  }
}

// Sums over the four lanes of a row: lane t gets that of `sums[t]`, for both of its rows.
__device__ inline float2 transposed_sums(const float (&sums)[4][2]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  float half[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float keep = t & 2 ? sums[2 + i][e] : sums[i][e], give = t & 2 ? sums[i][e] : sums[2 + i][e];
      half[i][e] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, 2);
    }
  float own[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float keep = t & 1 ? half[1][e] : half[0][e], give = t & 1 ? half[0][e] : half[1][e];
    own[e] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, 1);
  }
  return make_float2(own[0], own[1]);
}

// t = u · rows of the tile, for eight times eight rows (a, b).
template <int kWidth>
__device__ void multiply(float (&t)[8][4], const uint32_t (&u)[kWidth / 16][4], const uint32_t (&last)[2],
                         const bf16 (*tile)[kWidth], bool ones) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) t[j][e] = 0;
  const bf16* const from = &tile[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8];
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step)
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t y[4];
      load_matrices(y, from + 8 * j * kWidth + 16 * step);
      mma(t[j], u[step], y[0], y[1]);
      mma(t[j + 1], u[step], y[2], y[3]);
    }
  if (!ones) return;
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    uint32_t y[4];
    load_matrices(y, &tile[8 * j + lane][kWidth - 8]);
#pragma unroll
    for (int e = 0; e < 4; ++e) mma_eight(t[j + e], last[0], last[1], y[e]);
  }
}

template <bool kSquared, int kWidth>
__global__ void __launch_bounds__(32 * kMostWarps, kWidth <= 104 ? 2 : 1) contract_kernel(const ContractArguments m) {
  constexpr int kSteps = kWidth / 16, kStages = Place<kWidth>::kStages;
  extern __shared__ __align__(16) unsigned char memory[];
  const Sizes& s = m.sizes;
  const Place<kWidth> p(s, memory);
  if (p.token >= p.end || p.c == m.empty ||
      erased(m.reach, s.token(p.head, p.token), s.token(p.head, p.end), m.reverse))
    return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp * 16, g = lane / 4, quad = lane % 4;
  const int count = (s.rows + kStageRows - 1) / kStageRows;
  const bf16* const state = m.states + s.state(blockIdx.y, p.c) * s.rows * kWidth;
  const auto request = [&](int i) {
    if (i < count) {
      const bf16* const from = state + static_cast<int64_t>(i) * kStageRows * kWidth;
      bf16* const to = &p.stages[i % kStages][0][0];
      const int vectors = min(kStageRows, s.rows - i * kStageRows) * (kWidth / 8);
      for (int v = static_cast<int>(threadIdx.x); v < vectors; v += static_cast<int>(blockDim.x))
        copy_async(to + v * 8, from + v * 8, true);
    }
    commit_copies();
  };
  copy_rows(p.u, kWidth, m.u, p.b, p.h, p.token, p.rows, p.end - p.token, 0, kWidth / 8 - 1, s.v_dim);
  commit_copies();
  copy_rows(p.x, p.pitch, m.x, p.b, p.h, p.token, p.rows, p.end - p.token, 0, 2 * s.blocks, s.qk_dim);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) request(i);
  uint32_t u[kSteps][4], last[2] = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int token = p.token + row + g + 8 * e;
    // [1, 0, 1, 0, …], or −δ as [high, low, high, 0, …].
    if (quad < 2) last[e] = pack(1, 0);
    if (quad < 2 && m.delta) {
      last[e] = split(token < p.end ? -m.delta[s.token(p.head, token)] : 0.0f);
      if (quad == 1) last[e] &= 0xFFFFu;
    }
  }
  wait_for_copies<kStages - 1>();
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    load_matrices(u[step], p.u + (row + lane % 16) * kWidth + 16 * step + lane / 16 * 8);
  // dx takes the place of u after the first barrier below.
  float own[2][4] = {};  // dx of block B
  int block = 0;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    request(i + kStages - 1);
    float t[8][4];
    multiply<kWidth>(t, u, last, p.stages[i % kStages], s.sum_norm);
    const auto place = [&](int e, int column) { return p.dx + (row + g + 8 * e) * p.sum_pitch + column; };
    if constexpr (!kSquared) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = i * kStageRows + 8 * j + 2 * quad;
        if (column >= 16 * s.blocks) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<float2*>(place(e, column)) = make_float2(t[j][2 * e], t[j][2 * e + 1]);
      }
    } else {
      const int a = 4 * i - steps_before(true, block);
      const bool diagonal = a >= 16 * block;
      float scalars[4][2], sums[4][2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(p.x + (row + g + 8 * e) * p.pitch + a);
        const float by = diagonal ? 2.0f : 1.0f;
        scalars[0][e] = low_of(pairs.x) * by;
        scalars[1][e] = high_of(pairs.x) * by;
        scalars[2][e] = low_of(pairs.y) * by;
        scalars[3][e] = high_of(pairs.y) * by;
      }
      uint32_t pairs[4];
      load_matrices(pairs, p.x + (row + lane % 16) * p.pitch + 16 * block + lane / 16 * 8);
      // Column 8j + … of t is a = j/2 and b = 8(j%2) + ….
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t pair = pairs[j % 2 * 2 + e / 2];
          own[j % 2][e] = fmaf(scalars[j / 2][e / 2], t[j][e], own[j % 2][e]);
          sums[j / 2][e / 2] = fmaf(e % 2 == 0 ? low_of(pair) : high_of(pair), t[j][e], sums[j / 2][e / 2]);
        }
      if (!diagonal) {
        const float2 sum = transposed_sums(sums);
        *place(0, a + quad) += sum.x;
        *place(1, a + quad) += sum.y;
      } else if (a + 4 == 16 * (block + 1)) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            *reinterpret_cast<float2*>(place(e, 16 * block + 8 * j + 2 * quad)) =
                make_float2(own[j][2 * e], own[j][2 * e + 1]);
            own[j][2 * e] = own[j][2 * e + 1] = 0;
          }
        ++block;
        __syncwarp();
      }
    }
  }
  __syncwarp();
  write_rows(m, p);
}

}  // namespace

size_t contract_memory(const MixerCall& call, int64_t columns, int warps) {
  size_t bytes = 0;
  with_constants(call, columns,
                 [&](auto, auto width) { bytes = Place<decltype(width)::value>::bytes(blocks_of(call), warps); });
  return bytes;
}

void contract(const MixerCall& call, const ChunkTables& tables, const HeadRange& range,
              const Contraction& contraction) {
  const MixerShape& shape = call.shape;
  ContractArguments m = {};
  m.sizes = sizes_of(call, tables, range);
  m.x = heads_of<bfloat16>(contraction.x, shape.heads);
  m.u = heads_of<bfloat16>(contraction.u, shape.heads);
  m.dx = heads_of<bfloat16>(contraction.dx, shape.heads);
  m.states = pointer<bfloat16>(contraction.states);
  m.factors = floats(contraction.factors);
  m.delta = floats(contraction.delta);
  m.reach = floats(contraction.reach);
  m.empty = contraction.empty;
  m.reverse = contraction.reverse;
  m.wide = rows_are_wide(contraction.dx);
  m.decay = doubles(contraction.decay);
  m.decay_factor = contraction.sign / (call.spec.score == Score::squared ? 2.0f : 1.0f);
  with_constants(call, range.columns, [&](auto squared, auto width) {
    const auto kernel = contract_kernel<decltype(squared)::value, decltype(width)::value>;
    const size_t bytes = contract_memory(call, range.columns, range.warps);
    allow_shared_memory(kernel, bytes);
    const int rows = rows_of(range.warps), per_chunk = (m.sizes.chunk + rows - 1) / rows;
    const dim3 grid(static_cast<unsigned>(m.sizes.chunks * per_chunk), static_cast<unsigned>(range.count));
    kernel<<<grid, 32 * range.warps, bytes, stream(call.inputs.q.device())>>>(m);
    check_launch("mixer: gradients through states");
  });
}

}  // namespace furious::cuda::mma_states
