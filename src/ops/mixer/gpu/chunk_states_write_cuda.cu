// The states of chunks (chunk_states.cuh): S ← through · S + Σ_j w_j φ(x_j) u_jᵀ, and the calls of chunk_states.h.
//
// A block owns some rows of the state of a head as accumulators and walks over tiles of 64 tokens. The operand A, rows
// (a, b) of 16 b by 16 tokens, is the transposed fragment of x_b times w x_a of the tokens, made in registers. Where
// the rows of all heads fill the device, a block walks through all chunks and writes the state before each, in bf16:
// that is an operand of products only, the sum stays f32. For blocks that all end at the same time their walk is cut
// into segments; a block leaves its accumulators to that of the next one. Where there are few heads, every chunk has
// blocks of its own, which write f32 sums for `carry_kernel` to add up.
#include "gpu/device.h"
#include "ops/elementwise.h"
#include "ops/mixer/gpu/chunk_states.cuh"

namespace furious::cuda {
namespace mma_states {
namespace {

constexpr int kTokens = 64;  // of a tile
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 3;
constexpr int64_t kStateBytes = int64_t{4} << 30;  // of states at a time, unless one head has more
constexpr int kManyWaves = 8;                      // of blocks: so many that the last one does not matter

struct WalkArguments {
  Sizes sizes;
  Heads<bf16> x, u;
  const float *factors, *delta, *reach, *through, *first;
  float* last;
  bf16* states;
  float* sums;  // f32 as `states`, the sum of each chunk: where it is defined, a block has one chunk
  bool reverse;
  // Of walks that are cut into segments, each of which is a block: tickets that put the blocks in order, the number of
  // segments done of each walk (its rows of one head), and its accumulators, [walks, numbers, threads].
  int slices, segments;
  int* progress;  // of each walk, and at the end the next ticket
  float* between;
};

template <bool kSquared, int kWidth>
struct WalkShared {
  static constexpr int kM = kSquared && kWidth <= 72 ? 4 : 2;  // times 16 rows of a warp
  static constexpr int kFirst = kSquared ? kWarps * kM : 0;    // indices a of a block
  static constexpr int kColumns = kSquared ? 16 : kWarps * kM * 16;
  static constexpr int kPitch = kColumns + 8;
  alignas(16) bf16 u[kStages][kTokens][kWidth];
  alignas(16) bf16 x[kStages][kTokens][kPitch];
  alignas(16) bf16 a[kStages][kTokens][kFirst + 8];
  alignas(16) bf16 scaled[2][kFirst + 1][kTokens + 8];  // w x_a, transposed
  alignas(16) float weights[kStages][kTokens];
  alignas(16) float delta[kStages][kTokens];
};

// The rows of a block and what it does with a tile.
template <bool kSquared, int kWidth>
struct Walker {
  using Shared = WalkShared<kSquared, kWidth>;
  static constexpr int kM = Shared::kM, kBlocks = kWidth / 8;
  const WalkArguments& m;
  Shared& shared;
  int64_t own, head, b, h;  // own: the head, among those of the range
  int block, first_a;       // of a squared score
  int first_row;            // of a linear one
  float acc[kM][kBlocks][4];

  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }

  // `walk`: which rows of which head.
  __device__ Walker(const WalkArguments& arguments, Shared& memory, int walk)
      : m(arguments),
        shared(memory),
        own(walk / m.slices),
        head(m.sizes.range.first + own),
        b(head / m.sizes.heads),
        h(head % m.sizes.heads),
        block(0),
        first_a(0),
        first_row(walk % m.slices * Shared::kColumns) {
    if constexpr (kSquared) {
      constexpr int kPerBlock = 16 / Shared::kFirst;
      int slice = walk % m.slices;
      while (slice >= kPerBlock * (block + 1)) slice -= kPerBlock * ++block;
      first_a = slice * Shared::kFirst;
    }
  }

  // Of each 16 rows of the warp, the first row of the state; at and after the last where there are none.
  __device__ int row(int i) const {
    if constexpr (kSquared) return (steps_before(true, block) + first_a + warp() * kM + i) * 16;
    return first_row + (i * kWarps + warp()) * 16;
  }
  __device__ float factor(int i) const { return kSquared && (first_a + warp() * kM + i) / 16 < block ? 2.0f : 1.0f; }

  __device__ void load(int stage, int token, int end) const {
    const Sizes& s = m.sizes;
    const int valid = end - token;
    copy_rows(shared.u[stage][0], kWidth, m.u, b, h, token, kTokens, valid, 0, kBlocks - 1, s.v_dim);
    copy_rows(shared.x[stage][0], Shared::kPitch, m.x, b, h, token, kTokens, valid, kSquared ? 16 * block : first_row,
              kSquared ? 2 : min(Shared::kColumns, 16 * s.blocks - first_row) / 8, s.qk_dim);
    if constexpr (kSquared)
      copy_rows(shared.a[stage][0], Shared::kFirst + 8, m.x, b, h, token, kTokens, valid, first_a, Shared::kFirst / 8,
                s.qk_dim);
    const int i = static_cast<int>(threadIdx.x);
    if (i < kTokens) {
      if (m.factors) copy_float(&shared.weights[stage][i], m.factors + head * s.length, token + i, end);
      if (m.delta) copy_float(&shared.delta[stage][i], m.delta + head * s.length, token + i, end);
    }
    commit_copies();
  }

  // After the tile has arrived: w x_a, and −δ as two columns.
  __device__ void prepare(int stage, int buffer) const {
    const int i = static_cast<int>(threadIdx.x);
    if (m.delta && i >= kThreads - kTokens) {
      const int token = i - (kThreads - kTokens);
      *reinterpret_cast<uint4*>(&shared.u[stage][token][kWidth - 8]) =
          make_uint4(split(-shared.delta[stage][token]), 0, 0, 0);
    }
    if constexpr (kSquared) {
      constexpr int kPairs = kTokens / 2;
      if (i >= kPairs * Shared::kFirst / 8) return;
      const int pair = i % kPairs, eight = i / kPairs * 8;
      const uint4 even = *reinterpret_cast<const uint4*>(&shared.a[stage][2 * pair][eight]);
      const uint4 odd = *reinterpret_cast<const uint4*>(&shared.a[stage][2 * pair + 1][eight]);
      const float2 w =
          m.factors ? *reinterpret_cast<const float2*>(&shared.weights[stage][2 * pair]) : make_float2(1.0f, 1.0f);
      const uint32_t evens[4] = {even.x, even.y, even.z, even.w}, odds[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        *reinterpret_cast<uint32_t*>(&shared.scaled[buffer][eight + 2 * e][2 * pair]) =
            pack(low_of(evens[e]) * w.x, low_of(odds[e]) * w.y);
        *reinterpret_cast<uint32_t*>(&shared.scaled[buffer][eight + 2 * e + 1][2 * pair]) =
            pack(high_of(evens[e]) * w.x, high_of(odds[e]) * w.y);
      }
    }
  }

  // φ of 16 tokens: rows (a, b) by tokens.
  __device__ void features(uint32_t (&f)[kM][4], int stage, int buffer, int step) const {
    const int t = lane() % 4, token = 16 * step + lane() % 8 + lane() / 16 * 8;
    if constexpr (kSquared) {
      uint32_t own[4];
      load_matrices_transposed(own, &shared.x[stage][token][lane() / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const bf16* const scaled = &shared.scaled[buffer][warp() * kM + i][16 * step + 2 * t];
        const uint32_t low = *reinterpret_cast<const uint32_t*>(scaled);
        const uint32_t high = *reinterpret_cast<const uint32_t*>(scaled + 8);
        f[i][0] = multiply_pairs(own[0], low);
        f[i][1] = multiply_pairs(own[1], low);
        f[i][2] = multiply_pairs(own[2], high);
        f[i][3] = multiply_pairs(own[3], high);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const int own = min(row(i), 16 * m.sizes.blocks - 16) - first_row;
        load_matrices_transposed(f[i], &shared.x[stage][token][own + lane() / 8 % 2 * 8]);
        if (!m.factors) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 w = *reinterpret_cast<const float2*>(&shared.weights[stage][16 * step + e / 2 * 8 + 2 * t]);
          f[i][e] = pack(low_of(f[i][e]) * w.x, high_of(f[i][e]) * w.y);
        }
      }
    }
  }

  __device__ void multiply(int stage, int buffer) {
    if (!kSquared && row(0) >= m.sizes.rows) return;
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      uint32_t f[kM][4];
      features(f, stage, buffer, step);
      const bf16* const u = &shared.u[stage][16 * step + lane() % 16][lane() / 16 * 8];
#pragma unroll
      for (int j = 0; j < kBlocks - 1; j += 2) {
        uint32_t y[4];
        load_matrices_transposed(y, u + 8 * j);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          mma(acc[i][j], f[i], y[0], y[1]);
          mma(acc[i][j + 1], f[i], y[2], y[3]);
        }
      }
      if (!m.sizes.sum_norm) continue;
      uint32_t y[2];
      load_two_transposed(y[0], y[1], &shared.u[stage][16 * step + lane() % 16][kWidth - 8]);
#pragma unroll
      for (int i = 0; i < kM; ++i) mma(acc[i][kBlocks - 1], f[i], y[0], y[1]);
    }
  }

  // Adds up the tokens of a chunk; `meanwhile` runs after the first of them have been requested.
  template <class F>
  __device__ void add_chunk(int c, F&& meanwhile) {
    const int begin = c * m.sizes.chunk, end = m.sizes.end_of(c);
    const float* const reach = m.reach ? m.reach + head * m.sizes.length : nullptr;
    int tile = 0, tiles = (end - begin + kTokens - 1) / kTokens;
    const auto is_erased = [&](int i) {
      const int token = begin + i * kTokens;
      return erased(reach, token, min(token + kTokens, end), !m.reverse);
    };
    if (reach) {  // tiles that factors have erased are the first ones, or the last
      const int all = tiles;
      int count = 0;
      for (int base = 0; base < all; base += 32)
        count += __popc(__ballot_sync(0xFFFFFFFFu, base + lane() < all && is_erased(base + lane())));
      if (m.reverse)
        tiles -= count;
      else
        tile = count;
    }
    if (tile >= tiles) return meanwhile();
    const auto request = [&](int i) {
      if (i < tiles)
        load(i % kStages, begin + i * kTokens, end);
      else
        commit_copies();
    };
    request(tile);
    request(tile + 1);
    meanwhile();
    wait_for_copies<1>();
    __syncthreads();
    prepare(tile % kStages, tile % 2);
    for (; tile < tiles; ++tile) {
      wait_for_copies<0>();
      __syncthreads();  // the tile is prepared, the next has arrived, and that before is read
      request(tile + 2);
      if (tile + 1 < tiles) prepare((tile + 1) % kStages, (tile + 1) % 2);
      multiply(tile % kStages, tile % 2);
    }
    __syncthreads();
  }

  // f(element, row and column of the state outside) for every element that has them.
  template <class F>
  __device__ void each(F&& f) {
    const Sizes& s = m.sizes;
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = (kSquared ? 16 * block : row(i)) + lane() / 4 + e / 2 * 8;
        const int a = kSquared ? first_a + warp() * kM + i : own;
        const int low = min(a, own), high = max(a, own);
        if (high >= s.qk_dim) continue;
        const int64_t outside = head * s.features + (kSquared ? pair_index(s.qk_dim, low, high) : own);
        const float factor = a == own ? 1.0f : kPairFactor;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          const bool value = j + 1 < kBlocks;
          const int column = 8 * j + lane() % 4 * 2 + e % 2;
          const bool there = value ? column < s.v_dim : s.sum_norm && lane() % 4 == 0 && e % 2 == 0;
          if (there)
            f(acc[i][j][e], outside * s.columns + (value ? s.column + column : s.columns - 1), factor, a <= own);
        }
      }
  }

  // −δ is in two columns.
  __device__ void add_last_columns() {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; e += 2) acc[i][kBlocks - 1][e] += acc[i][kBlocks - 1][e + 1];
  }

  __device__ void begin() {
    each_number([](float& x, int) { x = 0; });
    for (int i = static_cast<int>(threadIdx.x); i < kStages * kTokens; i += kThreads)
      *reinterpret_cast<uint4*>(&shared.u[i / kTokens][i % kTokens][kWidth - 8]) = make_uint4(pack(1, 0), 0, 0, 0);
    __syncthreads();
  }

  // The accumulators to and from memory.
  template <class F>
  __device__ void each_number(F&& f) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(acc[i][j][e], (i * kBlocks + j) * 4 + e);
  }
  __device__ float* between(int walk) const {
    return m.between + static_cast<int64_t>(walk) * kM * kBlocks * 4 * kThreads + threadIdx.x;
  }

  __device__ void write_sums(float* sums) const {
    const int t = lane() % 4;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      if (row(i) >= m.sizes.rows) continue;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float* const to = sums + static_cast<int64_t>(row(i) + lane() / 4 + 8 * u) * kWidth;
#pragma unroll
        for (int j = 0; j < kBlocks - 1; ++j)
          *reinterpret_cast<float2*>(to + 8 * j + 2 * t) = make_float2(acc[i][j][2 * u], acc[i][j][2 * u + 1]);
        if (t == 0) to[kWidth - 8] = acc[i][kBlocks - 1][2 * u] + acc[i][kBlocks - 1][2 * u + 1];
      }
    }
  }

  __device__ void write_state(bf16* state) const {
    const int t = lane() % 4;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      if (row(i) >= m.sizes.rows) continue;
      const float by = factor(i);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        bf16* const to = state + static_cast<int64_t>(row(i) + lane() / 4 + 8 * u) * kWidth;
#pragma unroll
        for (int j = 0; j < kBlocks - 1; ++j)
          *reinterpret_cast<uint32_t*>(to + 8 * j + 2 * t) = pack(acc[i][j][2 * u] * by, acc[i][j][2 * u + 1] * by);
        if (t == 0)
          *reinterpret_cast<uint4*>(to + kWidth - 8) =
              last_columns((acc[i][kBlocks - 1][2 * u] + acc[i][kBlocks - 1][2 * u + 1]) * by);
      }
    }
  }
};

// A block has all chunks of a walk, or one segment of them, or one chunk whose sum it writes.
template <bool kSquared, int kWidth>
__global__ void __launch_bounds__(kThreads, 2) walk_kernel(const WalkArguments m) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ int shared_ticket;
  using Own = Walker<kSquared, kWidth>;
  const Sizes& s = m.sizes;
  const int walks = static_cast<int>(s.range.count) * m.slices;
  if (threadIdx.x == 0) shared_ticket = m.progress ? atomicAdd(m.progress + walks, 1) : static_cast<int>(blockIdx.x);
  __syncthreads();
  const int ticket = shared_ticket, walk = ticket % walks, segment = ticket / walks;
  Own own(m, *reinterpret_cast<typename Own::Shared*>(memory), walk);
  const int64_t size = static_cast<int64_t>(s.rows) * kWidth;
  own.begin();
  if (m.sums) {
    const int c = segment;
    if (!m.last && c == (m.reverse ? 0 : s.chunks - 1)) return;
    own.add_chunk(c, [] {});
    return own.write_sums(m.sums + s.state(own.own, c) * size);
  }
  if (segment > 0) {
    // A block with a lower ticket has the segment before: it runs, or is done.
    volatile int* const progress = m.progress + walk;
    if (threadIdx.x == 0)
      while (*progress < segment) __nanosleep(200);
    __syncthreads();
    __threadfence();
    const float* const from = own.between(walk);
    own.each_number([&](float& x, int i) { x = __ldcg(from + i * kThreads); });
  } else if (m.first) {
    own.each([&](float& x, int64_t place, float factor, bool) { x = m.first[place] / factor; });
  }
  const int first = segment * s.chunks / m.segments, end = (segment + 1) * s.chunks / m.segments;
  for (int i = first; i < end; ++i) {
    const int c = m.reverse ? s.chunks - 1 - i : i;
    const auto write = [&] {
      if (i == 0 && !m.first) return;
      own.write_state(m.states + s.state(own.own, c) * size);
      const float through = m.through ? m.through[own.head * s.chunks + c] : 1.0f;
      own.each_number([&](float& x, int) { x *= through; });
    };
    if (i + 1 < s.chunks || m.last)
      own.add_chunk(c, write);
    else
      write();
  }
  if (segment + 1 < m.segments) {
    float* const to = own.between(walk);
    own.each_number([&](float& x, int i) { __stcg(to + i * kThreads, x); });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *static_cast<volatile int*>(m.progress + walk) = segment + 1;
    return;
  }
  if (!m.last) return;
  own.add_last_columns();
  own.each([&](float& x, int64_t place, float factor, bool keep) {
    if (keep) m.last[place] = x * factor;
  });
}

// Carries sums through the chunks, four columns per thread.
template <bool kSquared, int kWidth>
__global__ void carry_kernel(const WalkArguments m) {
  const Sizes& s = m.sizes;
  const int64_t head = s.range.first + blockIdx.y;
  const int64_t size = static_cast<int64_t>(s.rows) * kWidth;
  const int64_t element = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (element >= size) return;
  const int row = static_cast<int>(element / kWidth), column = static_cast<int>(element % kWidth);
  const bool ones = column >= kWidth - 8;
  if (ones && (!s.sum_norm || column > kWidth - 8)) return;
  int block = 0, a = 0;
  if constexpr (kSquared) {
    while (steps_before(true, block + 1) <= row / 16) ++block;
    a = row / 16 - steps_before(true, block);
  } else {
    a = row;
  }
  const int own = kSquared ? 16 * block + row % 16 : row, low = min(a, own), high = max(a, own);
  const float twice = kSquared && a / 16 < block ? 2.0f : 1.0f, factor = a == own ? 1.0f : kPairFactor;
  const int64_t outside = (head * s.features + (kSquared ? pair_index(s.qk_dim, low, high) : own)) * s.columns +
                          (ones ? s.columns - 1 : s.column + column);
  const int count = high >= s.qk_dim ? 0 : ones ? 1 : max(0, min(4, s.v_dim - column));
  float x[4] = {};
  if (m.first)
    for (int i = 0; i < count; ++i) x[i] = m.first[outside + i] / factor;
  constexpr int kAhead = 8;
  for (int base = 0; base < s.chunks; base += kAhead) {
    float4 sums[kAhead];
    float through[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = min(base + i, s.chunks - 1);
      const int c = m.reverse ? s.chunks - 1 - at : at;
      sums[i] = make_float4(0, 0, 0, 0);
      if (at + 1 < s.chunks || m.last)
        sums[i] = *reinterpret_cast<const float4*>(m.sums + s.state(blockIdx.y, c) * size + element);
      through[i] = m.through ? m.through[head * s.chunks + c] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i;
      if (at >= s.chunks) break;
      bf16* const to = m.states + s.state(blockIdx.y, m.reverse ? s.chunks - 1 - at : at) * size + element;
      if (ones)
        *reinterpret_cast<uint4*>(to) = last_columns(x[0] * twice);
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(pack(x[0] * twice, x[1] * twice), pack(x[2] * twice, x[3] * twice));
      x[0] = fmaf(through[i], x[0], sums[i].x);
      x[1] = fmaf(through[i], x[1], sums[i].y);
      x[2] = fmaf(through[i], x[2], sums[i].z);
      x[3] = fmaf(through[i], x[3], sums[i].w);
    }
  }
  if (m.last && a <= own)
    for (int i = 0; i < count; ++i) m.last[outside + i] = x[i] * factor;
}

// factors_i = constant · in_i / n_i and δ_i = g_i·o_i, eight threads per token; without normalizer the first alone.
constexpr int kFactorTokens = 32;  // of a block
__global__ void gradient_factor_kernel(float* factors, float* delta, const float* in, const float* normalizer,
                                       Heads<bf16> g, Heads<bf16> out, float constant, int length, int v_dim) {
  const int t = static_cast<int>(blockIdx.x) * kFactorTokens + static_cast<int>(threadIdx.x) / 8;
  const int lane = static_cast<int>(threadIdx.x) % 8;
  const int64_t b = blockIdx.z, h = blockIdx.y, place = (b * gridDim.y + h) * length + t;
  float sum = 0;
  if (normalizer && t < length) {
    const uint32_t* const x = reinterpret_cast<const uint32_t*>(g.row(b, t, h));
    const uint32_t* const o = reinterpret_cast<const uint32_t*>(out.row(b, t, h));
#pragma unroll 4
    for (int c = 4 * lane; 2 * c < v_dim; c += 32) {
      const uint4 left = *reinterpret_cast<const uint4*>(x + c), right = *reinterpret_cast<const uint4*>(o + c);
      sum += low_of(left.x) * low_of(right.x) + high_of(left.x) * high_of(right.x);
      sum += low_of(left.y) * low_of(right.y) + high_of(left.y) * high_of(right.y);
      sum += low_of(left.z) * low_of(right.z) + high_of(left.z) * high_of(right.z);
      sum += low_of(left.w) * low_of(right.w) + high_of(left.w) * high_of(right.w);
    }
  }
  sum = warp_sum<8>(sum);
  if (t >= length || lane != 0) return;
  const float factor = in ? constant * in[place] : constant, n = normalizer ? normalizer[place] : 1.0f;
  factors[place] = fabsf(n) < kSmallestNormalizer ? 0.0f : factor / n;
  if (normalizer) delta[place] = sum;
}

Tensor wide(const Tensor& x) {
  if (rows_are_wide(x)) return x;
  const Tensor copy = Tensor::empty(x.shape(), x.dtype(), x.device());
  furious::copy(copy, x);
  return copy;
}

// Slices of the values that fit in shared memory: as few as possible, as wide as each other. Where none do, blocks that
// read states have fewer tokens. Devices differ: 163 KB and more on those for data centers, 99 KB on others.
struct Slices {
  int64_t columns;  // 0: none fit
  int warps;
};
Slices slices_of(const MixerCall& call) {
  const int64_t vectors = call.shape.v_dim / 8, most = most_shared_memory();
  for (int warps = kMostWarps; warps > 1; warps /= 2)
    for (int64_t slices = 1; slices <= vectors; ++slices) {
      const int64_t columns = 8 * ((vectors + slices - 1) / slices);
      if (columns > kMostColumns) continue;
      const size_t bytes = std::max(
          {walk_memory(call, columns), read_memory(call, columns, warps), contract_memory(call, columns, warps)});
      if (static_cast<int64_t>(bytes) <= most) return {columns, warps};
    }
  return {0, 0};
}

float score_constant(const MixerCall& call) {
  return call.spec.score == Score::squared ? call.shape.scale * call.shape.scale : call.shape.scale;
}

Tensor columns_of(const Tensor& x, const HeadRange& range) {
  return x.slice(3, range.column, range.columns);
}

// The states before the chunks.
Tensor states_of(const MixerCall& call, const ChunkTables& tables, const HeadRange& range, const Tensor& last) {
  return walk(call, tables, range,
              {call.inputs.k,
               columns_of(call.inputs.v, range),
               tables.out,
               {},
               tables.out,
               call.inputs.initial_state,
               last,
               false});
}

// As many heads at a time as keep states small. `once`: the normalizer belongs to the first slice, else to each.
template <class Body>
void for_each_range(const MixerCall& call, const ChunkTables& tables, bool once, Body&& body) {
  const bool sum = call.spec.norm == Norm::sum;
  const auto [columns, warps] = slices_of(call);
  int64_t bytes = 0;
  with_constants(call, columns, [&](auto, auto width) {
    bytes = tables.chunks * sizes_of(call, tables, {}).rows * decltype(width)::value * int64_t{2};
  });
  const int64_t all = call.shape.batch * call.shape.heads, step = std::clamp<int64_t>(kStateBytes / bytes, 1, 65535);
  for (int64_t first = 0; first < all; first += step)
    for (int64_t column = 0; column < call.shape.v_dim; column += columns)
      body({first, std::min(step, all - first), column, std::min(columns, call.shape.v_dim - column), warps,
            sum && (column == 0 || !once)});
}

}  // namespace

Sizes sizes_of(const MixerCall& call, const ChunkTables& tables, const HeadRange& range) {
  const MixerShape& shape = call.shape;
  Sizes s = {};
  s.range = range;
  s.length = static_cast<int>(shape.length);
  s.chunk = static_cast<int>(tables.chunk);
  s.chunks = static_cast<int>(tables.chunks);
  s.heads = static_cast<int>(shape.heads);
  s.batch = static_cast<int>(shape.batch);
  s.qk_dim = static_cast<int>(shape.qk_dim);
  s.v_dim = static_cast<int>(range.columns);
  s.column = static_cast<int>(range.column);
  s.columns = static_cast<int>(shape.state_columns);
  s.features = static_cast<int>(shape.state_rows);
  s.blocks = blocks_of(call);
  s.rows = 16 * steps_before(call.spec.score == Score::squared, s.blocks);
  s.sum_norm = range.normalizer;
  return s;
}

size_t walk_memory(const MixerCall& call, int64_t columns) {
  size_t bytes = 0;
  with_constants(call, columns, [&](auto squared, auto width) {
    bytes = sizeof(WalkShared<decltype(squared)::value, decltype(width)::value>);
  });
  return bytes;
}

Tensor walk(const MixerCall& call, const ChunkTables& tables, const HeadRange& range, const Walk& walk) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  Tensor states;
  with_constants(call, range.columns, [&](auto squared, auto width) {
    constexpr bool kSquared = decltype(squared)::value;
    constexpr int kWidth = decltype(width)::value;
    using Shared = WalkShared<kSquared, kWidth>;
    WalkArguments m = {};
    m.sizes = sizes_of(call, tables, range);
    const Sizes& s = m.sizes;
    states = Tensor::empty({range.count, tables.chunks, s.rows, kWidth}, DType::bf16, device);
    m.x = heads_of<bfloat16>(walk.x, shape.heads);
    m.u = heads_of<bfloat16>(walk.u, shape.heads);
    m.factors = floats(walk.factors);
    m.delta = floats(walk.delta);
    m.reach = floats(walk.reach);
    m.through = floats(tables.through);
    m.first = floats(walk.first);
    m.last = floats(walk.last);
    m.states = pointer<bfloat16>(states);
    m.reverse = walk.reverse;
    m.slices = kSquared ? s.rows / (16 * Shared::kFirst) : (s.rows + Shared::kColumns - 1) / Shared::kColumns;
    // Two blocks fit on a multiprocessor. Where walks would leave it idle, chunks have blocks of their own.
    const int64_t walks = range.count * m.slices, places = 2 * multiprocessors();
    const bool alone = walks < 3 * places / 4;
    Tensor sums, progress, between;
    m.segments = 1;
    if (alone) {
      sums = Tensor::empty(states.shape(), DType::f32, device);
    } else if (walks < kManyWaves * places && tables.chunks > 1) {
      m.segments = static_cast<int>(std::min<int64_t>(kManyWaves, tables.chunks));
      progress = Tensor::zeros({walks + 1}, DType::i32, device);
      between = Tensor::empty({walks, Shared::kM * (kWidth / 8) * 4, kThreads}, DType::f32, device);
      m.progress = progress.data<int32_t>();
    }
    m.sums = floats(sums);
    m.between = floats(between);
    const auto kernel = walk_kernel<kSquared, kWidth>;
    allow_shared_memory(kernel, sizeof(Shared));
    const int64_t blocks = walks * (alone ? tables.chunks : m.segments);
    kernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Shared), stream(device)>>>(m);
    check_launch("mixer: states of chunks");
    if (!alone) return;
    const dim3 grid(blocks_for(int64_t{s.rows} * kWidth / 4, 256), static_cast<unsigned>(range.count));
    carry_kernel<kSquared, kWidth><<<grid, 256, 0, stream(device)>>>(m);
    check_launch("mixer: sums of chunks");
  });
  return states;
}

}  // namespace mma_states

bool chunk_states_support(const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const std::string_view forced = forced_kernel();
  const auto fits = [](int64_t dim) { return dim % 8 == 0 && dim <= kLargestStateDim; };
  return forced != "tiles" && forced != "simple" && call.inputs.q.dtype() == DType::bf16 &&
         product_precision(call) == MixerPrecision::bf16 &&
         (call.spec.score == Score::squared || call.spec.score == Score::linear) && !call.spec.signed_decay &&
         fits(shape.qk_dim) && fits(shape.v_dim) && rows_are_wide(call.inputs.q) && rows_are_wide(call.inputs.k) &&
         rows_are_wide(call.inputs.v) && shape.length <= (int64_t{1} << 30) && mma_states::slices_of(call).columns > 0;
}

Past chunk_states_past(const MixerCall& call, const ChunkTables& tables, bool hopper) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const bool comes_in = call.inputs.initial_state || tables.chunks > 1;
  Past past;
  if (!comes_in && !call.result.final_state) return past;
  mma_states::Reading reading{
      call.inputs.q, tables.in, {}, mma_states::score_constant(call), call.inputs.initial_state ? -1 : 0, false};
  if (comes_in && hopper) {
    past.values = Tensor::empty_like(call.result.out);
    if (call.result.normalizer) past.normalizer = reading.normalizer = Tensor::empty_like(call.result.normalizer);
  } else if (comes_in) {
    const int64_t columns = past_columns(shape.v_dim, call.spec.norm == Norm::sum);
    past.columns = reading.past = Tensor::empty({shape.batch, shape.heads, shape.length, columns}, DType::f32, device);
  }
  mma_states::for_each_range(call, tables, false, [&](const mma_states::HeadRange& range) {
    reading.states = mma_states::states_of(call, tables, range, call.result.final_state);
    if (past.values) reading.values = mma_states::columns_of(past.values, range);
    if (comes_in) mma_states::read(call, tables, range, reading);
  });
  return past;
}

void chunk_states_backward(const MixerCall& call, const ChunkTables& tables, const Tensor& out_gradient,
                           const Tensor& final_state_gradient, const HeadGradients& gradients,
                           const Tensor& initial_state_gradient) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const Tensor &q = call.inputs.q, &k = call.inputs.k, &v = call.inputs.v, &initial = call.inputs.initial_state;
  const Tensor& n = call.result.normalizer;
  const Tensor g = mma_states::wide(out_gradient), out = mma_states::wide(call.result.out);
  const Tensor factors = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f32, device);
  const Tensor delta = n ? Tensor::empty_like(factors) : Tensor();
  const dim3 grid(blocks_for(shape.length, mma_states::kFactorTokens), static_cast<unsigned>(shape.heads),
                  static_cast<unsigned>(shape.batch));
  mma_states::gradient_factor_kernel<<<grid, 8 * mma_states::kFactorTokens, 0, stream(device)>>>(
      floats(factors), floats(delta), floats(tables.in), floats(n), heads_of<bfloat16>(g, shape.heads),
      heads_of<bfloat16>(out, shape.heads), mma_states::score_constant(call), static_cast<int>(shape.length),
      static_cast<int>(shape.v_dim));
  check_launch("mixer: factors of a gradient");
  const bool comes_in = initial || tables.chunks > 1, goes_out = comes_in || final_state_gradient;
  const int first = initial ? -1 : 0, last = final_state_gradient ? -1 : static_cast<int>(tables.chunks) - 1;
  mma_states::for_each_range(call, tables, true, [&](const mma_states::HeadRange& range) {
    const Tensor own_g = mma_states::columns_of(g, range), own_v = mma_states::columns_of(v, range);
    if (comes_in)
      mma_states::contract(call, tables, range,
                           {q, own_g, factors, delta, tables.in, mma_states::states_of(call, tables, range, {}), first,
                            false, gradients.q, gradients.row_decay, 1.0f});
    if (!goes_out) return;
    const Tensor states = mma_states::walk(
        call, tables, range, {q, own_g, factors, delta, tables.in, final_state_gradient, initial_state_gradient, true});
    mma_states::contract(
        call, tables, range,
        {k, own_v, tables.out, {}, tables.out, states, last, true, gradients.k, gradients.key_decay, -1.0f});
    mma_states::Reading reading{k, tables.out, states, 1.0f, last, true};
    reading.add_to = mma_states::columns_of(gradients.v, range);
    mma_states::read(call, tables, range, reading);
  });
}

}  // namespace furious::cuda
