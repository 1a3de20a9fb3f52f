// A mixer's step in the token kernel: the new token, the rows of the state, the window, and the sum over the blocks of
// a head.
#pragma once

#include "decode/token_memory-inl.cuh"

namespace furious::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __noinline__ Feature feature_of_row(const FeatureMap& features, int row) {
  return feature_of(features, row);
}

__device__ void make_features(ThreadState& state, const Cache& cache, int first_row) {
  state.first_row = first_row;
#pragma unroll
  for (int i = 0; i < kMostStateRows / kThreads; ++i) {
    const int row = first_row + static_cast<int>(threadIdx.x) + i * kThreads;
    state.features[i] = feature_of_row(cache.features, row < cache.state_rows ? row : 0);
  }
}

// Some tokens of a step: `count` of them in shared memory, and the new one behind them where it is with them.
struct TokenChunk {
  WindowArea area;
  int count;
  bool has_new;
};

constexpr int kTokensAtOnce = 4 * kWarps;  // eight lanes for each
static_assert(kLargestHead == 2 * 8 * 8);
// Where the largest exponent of no tokens would be minus infinity, from which no difference can be taken.
constexpr float kNoExponent = -1e30f;

__device__ float fast_exp(float x) {
  return fast_exp2(x * 1.44269504f);
}

// Adds up tokens of a window. The eight lanes of a token have eight neighbouring columns each, and in heads of more
// than 64 (kHalves 2) eight more; every eight lanes of a warp have sums of their own. There are no branches: a lane
// without columns computes with a zero of q, and a token past the last one has the weight zero.
template <bool kSoftmax, int kHalves>
struct TokenSums {
  int k_units, v_units, lane_k[kHalves], lane_v[kHalves];
  bool decay;
  float q[kHalves][8];
  float y[kHalves][8], n;
  float largest;  // exponent under softmax, by which y and n are scaled

  __device__ TokenSums(const StepCall& step, const NewToken& token)
      : k_units(step.cache.qk_dim / 8),
        v_units(step.cache.v_dim / 8),
        decay(step.cache.decay),
        n(0),
        largest(kNoExponent) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int unit = lane_of_thread() % 8 + 8 * half;
      lane_k[half] = unit < k_units ? unit : 0;
      lane_v[half] = unit < v_units ? unit : 0;
      const float4* const from = reinterpret_cast<const float4*>(token.q) + 2 * lane_k[half];
      const float4 low = from[0], high = from[1];
      const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        q[half][i] = unit < k_units ? eight[i] : 0.0f;
        y[half][i] = 0;
      }
    }
  }

  // The last warps come first, since the first ones have more rows of the state.
  static __device__ int first_of_warp() {
    return (kWarps - 1 - warp_of_thread()) * 4;
  }

  // kAtOnce: tokens of a lane, whose latencies overlap.
  template <int kAtOnce>
  __device__ void add(const TokenChunk& chunk, const NewToken& token, const Polynomial& polynomial) {
    const int tokens = chunk.count + (chunk.has_new ? 1 : 0);
#pragma unroll 1
    for (int first = first_of_warp(); first < tokens; first += kAtOnce * kTokensAtOnce) {
      uint4 k[kAtOnce][kHalves], v[kAtOnce][kHalves];
      float log_decay[kAtOnce], weights[kAtOnce];
      bool valid[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int j = first + i * kTokensAtOnce + lane_of_thread() / 8;
        const bool kept = j < chunk.count;
        valid[i] = j < tokens;
        const uint4* const k_from = kept ? reinterpret_cast<const uint4*>(chunk.area.k) + j * k_units : token.k;
        const uint4* const v_from = kept ? reinterpret_cast<const uint4*>(chunk.area.v) + j * v_units : token.v;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          k[i][half] = k_from[lane_k[half]];
          v[i][half] = v_from[lane_v[half]];
        }
        log_decay[i] = decay && kept ? static_cast<float>(token.now - chunk.area.totals[j]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) weights[i] = product(k[i]);
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[i] += __shfl_xor_sync(0xFFFFFFFFu, weights[i], offset);
      if constexpr (kSoftmax) {
        float most = largest;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          weights[i] = valid[i] ? weights[i] + log_decay[i] : -INFINITY;
          most = fmaxf(most, weights[i]);
        }
        scale_to(most);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[i] = fast_exp(weights[i] - most);
      } else {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          weights[i] = valid[i] ? polynomial(weights[i]) * fast_exp(log_decay[i]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        n += weights[i];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          float x[8];
          unpack(v[i][half], x);
#pragma unroll
          for (int c = 0; c < 8; ++c) y[half][c] = fmaf(weights[i], x[c], y[half][c]);
        }
      }
    }
  }

  // The sums of the warp, on top of what is in a row of v_dim numbers. All lanes get n. The four lanes that have the
  // same columns exchange half of them with each other, and then half of what is left.
  __device__ void add_to(float* row) {
    const bool second = lane_of_thread() & 8, last = lane_of_thread() & 16;
    if constexpr (kSoftmax) {
      float most = largest;
#pragma unroll
      for (int offset = 8; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
      scale_to(most);
    }
    n += __shfl_xor_sync(0xFFFFFFFFu, n, 8);
    n += __shfl_xor_sync(0xFFFFFFFFu, n, 16);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float four[4], two[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, second ? y[half][i] : y[half][i + 4], 8);
        four[i] = (second ? y[half][i + 4] : y[half][i]) + other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, last ? four[i] : four[i + 2], 16);
        two[i] = (last ? four[i + 2] : four[i]) + other;
      }
      const int unit = lane_of_thread() % 8 + 8 * half;
      if (unit >= v_units) continue;
      float2* const to = reinterpret_cast<float2*>(row) + 4 * unit + (second ? 2 : 0) + (last ? 1 : 0);
      *to = {to->x + two[0], to->y + two[1]};
    }
  }

 private:
  __device__ float product(const uint4 (&k)[kHalves]) const {
    float sums[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float x[8];
      unpack(k[half], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i % 2] = fmaf(x[i], q[half][i], sums[i % 2]);
    }
    return sums[0] + sums[1];
  }
  __device__ void scale_to(float most) {
    const float factor = fast_exp(largest - most);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int i = 0; i < 8; ++i) y[half][i] *= factor;
    n *= factor;
    largest = most;
  }
};

// Waits for the new token: every thread for one number, or for few.
__device__ void load_token(const StepCall& step, const StepShare& own, const Tagged& awaited, NewToken& token) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x), half = cache.qk_dim / 2;
  const int v_from = 2 * cache.qk_dim, end = v_from + cache.v_dim;
#pragma unroll 1
  for (int i = thread; i < end; i += kThreads) {
    if (i >= v_from) {
      const int of = i - v_from;
      float v = step.dt != nullptr ? 0 : awaited.wait_activation(own.v + of), raw = v;
      if (step.dt != nullptr) {
        const float2 both = awaited.wait_activation_and_number(own.v + of, own.dt);
        raw = both.x;
        v = both.x * both.y;
      }
      token.raw_v[of] = raw;
      reinterpret_cast<uint16_t*>(token.v)[of] = static_cast<uint16_t>(bits_of(v));
      continue;
    }
    const bool is_q = i < cache.qk_dim;
    const int of = is_q ? i : i - cache.qk_dim;
    const uint32_t* const from = is_q ? own.q : own.k;
    uint32_t bits;
    if (step.turns != nullptr) {
      const bool is_first = step.halves ? of < half : of % 2 == 0;
      const int pair = step.halves ? (is_first ? of : of - half) : of / 2, distance = step.halves ? half : 1;
      // The angle is kept in turns: the whole ones drop out in double precision.
      const double turns = static_cast<double>(own.position) * step.turns[pair];
      float sine, cosine;
      sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine, &cosine);
      const float2 both = awaited.wait_activations(from + of, from + (is_first ? of + distance : of - distance));
      bits = bits_of(is_first ? both.x * cosine - both.y * sine : both.x * cosine + both.y * sine);
    } else {
      bits = awaited.wait_word(from + of);
    }
    if (is_q)
      token.q[of] = cache.scale * value_of(bits);
    else
      reinterpret_cast<uint16_t*>(token.k)[of] = static_cast<uint16_t>(bits);
  }
  if (thread == kThreads - 1) {
    token.left = 1;
    if (cache.decay) {
      token.log_decay = awaited.wait_number(own.log_decay);
      token.now = own.before + static_cast<double>(token.log_decay);
      token.left = decay_factor(token.now);
    }
  }
}

// The result of a head: what all blocks' sums come to, with D ⊙ v.
__device__ void write_output(const StepCall& step, const StepShare& own, const NewToken& token, float y, float n,
                             float d, int column, const Tagged& written) {
  const Cache& cache = step.cache;
  if (cache.sum) y = normalized(cache.score, y, n);
  if (step.d != nullptr) y = fmaf(d, token.raw_v[column], y);
  written.activation(own.out, column, y);
}

// What the lane has of the sum over the blocks of column c, or in the last 16 lanes of the normalizer, scaled by the
// largest exponent of all.
__device__ float sum_of_blocks(const StepCall& step, const StepShare& own, int c, const Tagged& written) {
  const int lane = lane_of_thread(), v_dim = step.cache.v_dim;
  float sum = 0, largest = kNoExponent;
#pragma unroll 1
  for (int part = lane % 16; part < step.blocks; part += 16) {
    const uint64_t* const from = own.partials + part * step.partial_width;
    const float2 both = written.wait_partials(from + (lane < 16 ? c : v_dim), from + v_dim + 1);
    const float larger = fmaxf(largest, both.y);
    sum = sum * fast_exp(largest - larger) + both.x * fast_exp(both.y - larger);
    largest = larger;
  }
  float most = largest;
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
  return sum * fast_exp(largest - most);
}

// Adds up the warps' sums, and then the blocks'. `d`: of the first column of this thread, or of its warp where a head
// has several blocks.
__device__ void combine(const StepCall& step, const StepShare& own, const NewToken& token, float d,
                        const Tagged& written, const Memory& memory) {
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_thread(), lane = lane_of_thread();
  const int v_dim = step.cache.v_dim, ld = step.partial_width;
  if (thread < ld) {
    float y = 0, n = 0, most = kNoExponent;
    if (step.softmax) {
      float largest[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, largest[w] = memory.largest[w]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float factor = fast_exp(largest[w] - most);
        if (thread < v_dim) y = fmaf(factor, memory.values[w][thread], y);
        n = fmaf(factor, memory.normalizers[w], n);
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (thread < v_dim) y += memory.values[w][thread];
        n += memory.normalizers[w];
      }
    }
    if (step.blocks > 1)
      written.partial(own.partials + own.block * ld + thread, thread < v_dim ? y : thread == v_dim ? n : most);
    else if (thread < v_dim)
      write_output(step, own, token, y, n, d, thread, written);
  }
  if (step.blocks == 1) return;
    // The blocks of a head share out its columns. A warp adds up one: half of it y, the others n.
#pragma unroll 1
  for (int c = own.column + warp; c < own.columns_end; c += kWarps) {
    float sum = 0;
    if (step.softmax) {
      sum = sum_of_blocks(step, own, c, written);
    } else {
#pragma unroll 1
      for (int part = lane % 16; part < step.blocks; part += 16)
        sum += written.wait_partial(own.partials + part * ld + (lane < 16 ? c : v_dim));
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    const float n = __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
    if (c != own.column + warp && step.d != nullptr) d = own.d[c];
    if (lane == 0) write_output(step, own, token, sum, n, d, c, written);
  }
}

// Adds the tokens of a window to the warp's sums in shared memory.
template <bool kSoftmax, int kHalves>
__device__ void add_window(const StepCall& step, const StepShare& own, const StepArea& from, const NewToken& token,
                           StageCursor& cursor, Memory& memory) {
  using Sums = TokenSums<kSoftmax, kHalves>;
  const int warp = warp_of_thread(), lane = lane_of_thread();
  const int all = own.tokens, at_once = min(all, step.first_tokens), each = step.chunk_tokens, stages = step.stages;
  if (kSoftmax && lane == 0) memory.largest[warp] = kNoExponent;
  if (all <= at_once && Sums::first_of_warp() >= at_once + (own.has_new ? 1 : 0)) return;
  const Polynomial polynomial = step.polynomial;
  Sums sums(step, token);
  TokenChunk chunk{WindowArea(step.cache, step.first_tokens, from.window), at_once, own.has_new};
#pragma unroll 1
  for (int done = at_once;; done += each) {
    if (kSoftmax && each > kChunkTokens)
      sums.template add<4>(chunk, token, polynomial);
    else
      sums.template add<2>(chunk, token, polynomial);
    if (done > at_once) {
      __syncwarp();
      if (lane == 0) memory.chunk_used[cursor.stage].arrive();
      cursor.advance(stages);
    }
    if (done >= all) break;
    memory.chunk_fetched[cursor.stage].wait(cursor.round);
    chunk = {WindowArea(step.cache, each, from.stage(step, cursor.stage)), min(each, all - done), false};
  }
  __syncwarp();
  sums.add_to(memory.values[warp]);
  if (lane == 0) {
    memory.normalizers[warp] += sums.n;
    if (kSoftmax) memory.largest[warp] = sums.largest;
  }
}

__device__ void add_window(const StepCall& step, const StepShare& own, const StepArea& from, const NewToken& token,
                           StageCursor& cursor, Memory& memory) {
  const bool wide = max(step.cache.qk_dim, step.cache.v_dim) > 64;
  if (step.softmax)
    wide ? add_window<true, 2>(step, own, from, token, cursor, memory)
         : add_window<true, 1>(step, own, from, token, cursor, memory);
  else
    wide ? add_window<false, 2>(step, own, from, token, cursor, memory)
         : add_window<false, 1>(step, own, from, token, cursor, memory);
}

// Which rows of a state a thread has: a warp reads whole rows, a thread four columns of them.
struct RowGroup {
  int vectors, each, column, first, step;  // rows first, first + step, ...

  __device__ explicit RowGroup(const StepCall& call) : vectors(call.cache.v_dim / 4), each(call.rows_at_once) {
    const int of_warp = lane_of_thread() * call.part_of_row >> 16;
    column = lane_of_thread() - of_warp * vectors;
    step = each * kWarps;
    first = of_warp < each ? warp_of_thread() * each + of_warp : 1 << 16;  // of no row
  }
};

constexpr int kRowsAtOnce = 128 / kWarps;  // that a thread loads before the input is waited for

__device__ void load_rows(float4 (&x)[kRowsAtOnce], const StepCall& call, const StepArea& from, int rows) {
  const RowGroup own(call);
  const float4* const values = reinterpret_cast<const float4*>(from.values) + own.column;
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int r = own.first + i * own.step;
    x[i] = r < rows ? values[r * own.vectors] : float4{0, 0, 0, 0};
  }
}

// The sum φᵀ S of the warp for every column, in the lanes of the first row.
__device__ float4 sum_rows(const float4 (&x)[kRowsAtOnce], const StepCall& call, const StepArea& from, int rows,
                           const float* phi) {
  const RowGroup own(call);
  float4 y = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int r = own.first + i * own.step;
    add_row(y, r < rows ? phi[r] : 0, x[i]);
  }
#pragma unroll 1
  for (int r = own.first + kRowsAtOnce * own.step; r < rows; r += own.step)
    add_row(y, phi[r], reinterpret_cast<const float4*>(from.values)[r * own.vectors + own.column]);
  float4 all = y;
#pragma unroll 1
  for (int i = 1; i < own.each; ++i) {
    const int other = own.column + i * own.vectors;
    all.x += __shfl_sync(0xFFFFFFFFu, y.x, other);
    all.y += __shfl_sync(0xFFFFFFFFu, y.y, other);
    all.z += __shfl_sync(0xFFFFFFFFu, y.z, other);
    all.w += __shfl_sync(0xFFFFFFFFu, y.w, other);
  }
  return all;
}

// What the rows of a state add: sums of the warps in shared memory, which stay there from piece to piece.
__device__ void add_state(const TokenPiece& piece, const StepArea& from, const float4 (&x)[kRowsAtOnce], int rows,
                          const NewToken& token, const ThreadState& state, Memory& memory) {
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_thread(), lane = lane_of_thread();
  const Cache& cache = piece.step.cache;
  float4 y = {0, 0, 0, 0};
  float n = 0;
  if (rows > 0) {
#pragma unroll
    for (int i = 0; i < kMostStateRows / kThreads; ++i)
      if (thread + i * kThreads < rows)
        memory.phi[thread + i * kThreads] = token.left * state.features[i].of<2>(token.q);
    sync_compute_warps();
    y = sum_rows(x, piece.step, from, rows, memory.phi);
    if (cache.sum) {
#pragma unroll 1
      for (int r = thread; r < rows; r += kThreads)
        n = fmaf(memory.phi[r], reinterpret_cast<const float*>(from.normalizers)[r], n);
      n = warp_sum(n);
    }
  }
  if (lane < cache.v_dim / 4) {
    float4& sum = reinterpret_cast<float4*>(memory.values[warp])[lane];
    if (!piece.first) add_row(y, 1, sum);
    sum = y;
  }
  if (lane == 0) memory.normalizers[warp] = piece.first ? n : memory.normalizers[warp] + n;
}

__device__ void run_step(const TokenPiece& piece, Barrier& used, char* area, const StepShare& own, unsigned first_tag,
                         ThreadState& state, Memory& memory) {
  if (!own.active) return used.arrive();
  const StepCall& step = piece.step;
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_thread();
  const Tagged written(first_tag + piece.operation);
  const StepArea from(piece, area);
  if (own.rows > 0 && own.first != state.first_row) make_features(state, cache, own.first);
  float4 x[kRowsAtOnce];
  load_rows(x, step, from, own.rows);
  float d = 0;
  if (step.d != nullptr && piece.last) {
    const int c = step.blocks == 1 ? thread : own.column + warp;
    if (c < cache.v_dim) d = own.d[c];
  }
  if (piece.first) load_token(step, own, Tagged(first_tag + step.inputs_from), memory.tokens[state.steps++ % 2]);
  const NewToken& token = memory.tokens[(state.steps - 1) % 2];
  sync_compute_warps();
  add_state(piece, from, x, own.rows, token, state, memory);
  if (piece.first) add_window(step, own, from, token, state.cursor, memory);
  used.arrive();
  if (piece.last) {
    sync_compute_warps();
    combine(step, own, token, d, written, memory);
  }
  if (!piece.first || !own.has_new) return;
  // The last threads, which have no column, keep the new token.
  const int i = kThreads - 1 - thread;
  if (own.k_to != nullptr && i < cache.qk_dim / 8) own.k_to[i] = token.k[i];
  if (own.v_to != nullptr && i < cache.v_dim / 8) own.v_to[i] = token.v[i];
  if (cache.decay && i == 0) {
    *own.log_decay_to = token.log_decay;
    *own.total_to = token.now;
  }
}

#endif

}  // namespace
}  // namespace furious::cuda
