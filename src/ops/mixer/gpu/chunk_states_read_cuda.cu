// What the states of chunks (chunk_states.cuh) give to their tokens: y_i = f_i φ(x_i)ᵀ S, with (q, S), and with (k, dS)
// for dv.
//
// A block has 256 tokens of a chunk or fewer, 32 per warp, and the state streams through shared memory, 64 rows at a
// time. The operand A for rows (a, b) is the fragment of x_b times x_a of its row, made in registers.
#include "ops/mixer/gpu/chunk_states.cuh"

namespace furious::cuda::mma_states {
namespace {

constexpr int kM = 2;  // times 16 tokens of a warp
__host__ __device__ constexpr int rows_of(int warps) {
  return warps * kM * 16;
}
constexpr int kStages = 3;
constexpr int kStageRows = 64;

struct ReadArguments {
  Sizes sizes;
  Heads<bf16> x;
  const bf16* states;
  const float* reach;
  float constant;
  int empty;
  bool reverse;
  float* past;
  int past_pitch;
  Heads<bf16> values;
  float* normalizer;
  bool add, wide;  // to values; their rows

  __device__ float factor(int64_t place) const { return reach ? constant * reach[place] : constant; }
};

// y of a token's row, two columns at a time: acc(j) for columns 8j + 2t and the next.
template <int kBlocks, class Columns>
__device__ void write_row(const ReadArguments& m, int64_t b, int64_t h, int64_t head, int token, float n,
                          Columns&& acc) {
  const Sizes& s = m.sizes;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const int64_t place = s.token(head, token);
  float factor = m.factor(place);
  if (m.past) {
    float* const row = m.past + place * m.past_pitch;
    float* const to = row + s.column;
#pragma unroll
    for (int j = 0; j < kBlocks - 1; ++j) {
      const int column = 8 * j + 2 * t;
      if (column >= s.v_dim) continue;
      const float2 y = acc(j);
      to[column] = y.x * factor;
      to[column + 1] = y.y * factor;
    }
    if (s.sum_norm && t == 0) row[s.columns - 1] = n * factor;
    return;
  }
  if (m.normalizer) {
    // Rounding may have made a sum of squares negative.
    const float total = fmaxf(n, 0.0f) * factor;
    factor = total < kSmallestNormalizer ? 0.0f : 1 / n;
    if (t == 0) m.normalizer[place] = factor > 0 ? total : 0.0f;
  }
  bf16* const to = m.values.row(b, token, h);
#pragma unroll
  for (int j = 0; j < kBlocks - 1; ++j) {
    const int column = 8 * j + 2 * t;
    if (column >= s.v_dim) continue;
    const float2 y = acc(j);
    if (m.wide) {
      uint32_t* const pair = reinterpret_cast<uint32_t*>(to + column);
      const uint32_t before = m.add ? *pair : 0;
      *pair = pack(y.x * factor + low_of(before), y.y * factor + high_of(before));
    } else {
      to[column] = from_float<bf16>(y.x * factor + (m.add ? to_float(to[column]) : 0.0f));
      to[column + 1] = from_float<bf16>(y.y * factor + (m.add ? to_float(to[column + 1]) : 0.0f));
    }
  }
}

template <bool kSquared, int kWidth>
__global__ void __launch_bounds__(32 * kMostWarps, kWidth <= 72 ? 2 : 1) read_kernel(const ReadArguments m) {
  constexpr int kBlocks = kWidth / 8;
  extern __shared__ __align__(16) unsigned char memory[];
  const Sizes& s = m.sizes;
  bf16(*const stages)[kStageRows][kWidth] = reinterpret_cast<bf16(*)[kStageRows][kWidth]>(memory);
  bf16* const x = &stages[kStages][0][0];
  const int pitch = 16 * s.blocks + 8;
  const int64_t head = s.range.first + blockIdx.y, b = head / s.heads, h = head % s.heads;
  const int rows = rows_of(static_cast<int>(blockDim.x) / 32), per_chunk = (s.chunk + rows - 1) / rows;
  const int c = static_cast<int>(blockIdx.x) / per_chunk;
  const int token = c * s.chunk + static_cast<int>(blockIdx.x) % per_chunk * rows;
  const int end = min(token + rows, s.end_of(c));
  if (token >= end) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp * 16 * kM, first = token + row + lane / 4;  // of the thread's tokens
  if (c == m.empty || erased(m.reach, s.token(head, token), s.token(head, end), m.reverse)) {
    if (m.add) return;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i)
      if (first + 8 * i < end)
        write_row<kBlocks>(m, b, h, head, first + 8 * i, 0.0f, [](int) { return make_float2(0.0f, 0.0f); });
    return;
  }
  const int steps = s.rows / 16, count = (steps + 3) / 4;
  const bf16* const state = m.states + s.state(blockIdx.y, c) * s.rows * kWidth;
  const auto request = [&](int i) {
    if (i < count) {
      const bf16* const from = state + static_cast<int64_t>(i) * kStageRows * kWidth;
      bf16* const to = &stages[i % kStages][0][0];
      const int vectors = min(kStageRows, s.rows - i * kStageRows) * kBlocks;
      for (int v = static_cast<int>(threadIdx.x); v < vectors; v += static_cast<int>(blockDim.x))
        copy_async(to + v * 8, from + v * 8, true);
    }
    commit_copies();
  };
  copy_rows(x, pitch, m.x, b, h, token, rows, end - token, 0, 2 * s.blocks, s.qk_dim);
  request(0);
  request(1);
  float acc[kM][kBlocks][4] = {};
  int block = 0;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    request(i + 2);
    const bf16(*const tile)[kWidth] = stages[i % kStages];
    while (kSquared && 4 * i >= steps_before(true, block + 1)) ++block;
    uint32_t own[kM][4], scalars[4][kM][2];
    if constexpr (kSquared) {
      const int a = 4 * i - steps_before(true, block);
#pragma unroll
      for (int u = 0; u < kM; ++u) {
        load_matrices(own[u], x + (row + 16 * u + lane % 16) * pitch + 16 * block + lane / 16 * 8);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint2 pairs = *reinterpret_cast<const uint2*>(x + (row + 16 * u + 8 * e + lane / 4) * pitch + a);
          scalars[0][u][e] = twice_low(pairs.x);
          scalars[1][u][e] = twice_high(pairs.x);
          scalars[2][u][e] = twice_low(pairs.y);
          scalars[3][u][e] = twice_high(pairs.y);
        }
      }
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (!kSquared && 4 * i + step >= steps) break;
      uint32_t f[kM][4];
#pragma unroll
      for (int u = 0; u < kM; ++u)
        if constexpr (kSquared) {
#pragma unroll
          for (int e = 0; e < 4; ++e) f[u][e] = multiply_pairs(own[u][e], scalars[step][u][e % 2]);
        } else {
          load_matrices(f[u], x + (row + 16 * u + lane % 16) * pitch + 16 * (4 * i + step) + lane / 16 * 8);
        }
      const bf16* const from = &tile[16 * step + lane % 16][lane / 16 * 8];
#pragma unroll
      for (int j = 0; j < kBlocks - 1; j += 2) {
        uint32_t y[4];
        load_matrices_transposed(y, from + 8 * j);
#pragma unroll
        for (int u = 0; u < kM; ++u) {
          mma(acc[u][j], f[u], y[0], y[1]);
          mma(acc[u][j + 1], f[u], y[2], y[3]);
        }
      }
      if (!s.sum_norm || m.add) continue;
      uint32_t y[2];
      load_two_transposed(y[0], y[1], &tile[16 * step + lane % 16][kWidth - 8]);
#pragma unroll
      for (int u = 0; u < kM; ++u) mma(acc[u][kBlocks - 1], f[u], y[0], y[1]);
    }
  }
#pragma unroll
  for (int u = 0; u < kM; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // The normalizer: columns 0 and 2 of the last eight.
      float n = acc[u][kBlocks - 1][2 * e];
      n = __shfl_sync(0xFFFFFFFFu, n, lane & ~3) + __shfl_sync(0xFFFFFFFFu, n, (lane & ~3) + 1);
      const int own = first + 16 * u + 8 * e;
      if (own < end)
        write_row<kBlocks>(m, b, h, head, own, n,
                           [&](int j) { return make_float2(acc[u][j][2 * e], acc[u][j][2 * e + 1]); });
    }
}

}  // namespace

size_t read_memory(const MixerCall& call, int64_t columns, int warps) {
  size_t bytes = 0;
  with_constants(call, columns, [&](auto, auto width) {
    constexpr size_t kWidth = decltype(width)::value;
    bytes = sizeof(bf16) *
            (kStages * kStageRows * kWidth + static_cast<size_t>(rows_of(warps)) * (16 * blocks_of(call) + 8));
  });
  return bytes;
}

void read(const MixerCall& call, const ChunkTables& tables, const HeadRange& range, const Reading& reading) {
  const MixerShape& shape = call.shape;
  ReadArguments m = {};
  m.sizes = sizes_of(call, tables, range);
  m.x = heads_of<bfloat16>(reading.x, shape.heads);
  m.states = pointer<bfloat16>(reading.states);
  m.reach = floats(reading.reach);
  m.constant = reading.constant;
  m.empty = reading.empty;
  m.reverse = reading.reverse;
  m.past = floats(reading.past);
  m.past_pitch = past_columns(shape.v_dim, call.spec.norm == Norm::sum);
  m.normalizer = floats(reading.normalizer);
  m.add = reading.add_to.defined();
  if (!reading.past) {
    const Tensor& values = m.add ? reading.add_to : reading.values;
    m.values = heads_of<bfloat16>(values, shape.heads);
    m.wide = rows_are_wide(values);
  }
  with_constants(call, range.columns, [&](auto squared, auto width) {
    const auto kernel = read_kernel<decltype(squared)::value, decltype(width)::value>;
    const size_t bytes = read_memory(call, range.columns, range.warps);
    allow_shared_memory(kernel, bytes);
    const int rows = rows_of(range.warps), per_chunk = (m.sizes.chunk + rows - 1) / rows;
    const dim3 grid(static_cast<unsigned>(m.sizes.chunks * per_chunk), static_cast<unsigned>(range.count));
    kernel<<<grid, 32 * range.warps, bytes, stream(call.inputs.q.device())>>>(m);
    check_launch("mixer: reading states");
  });
}

}  // namespace furious::cuda::mma_states
