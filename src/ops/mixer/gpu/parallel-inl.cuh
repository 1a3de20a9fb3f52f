// What the kernels of the parallel form on tensor cores share.
//
// Decay is never an exponential per element off the diagonal. Going over tiles of keys J with r_J = A at the last key
// of the tile, w_ij = f(S_ij)·exp(r_J − A_j)·exp(A_i − r_J): the first factor belongs to a column of the tile; the
// second is left out of the sums, which are kept relative to r_J and multiplied by exp(r_J − r_{J−1}) from tile to
// tile. All factors are at most 1. At the diagonal the sums become true ones, times exp(A_i − r_J), and the tiles there
// take an exponential per element. The pass over queries for a block of keys is the mirror image, from the last tile to
// the first, relative to A at the first query of a tile.
//
// A is summed in double; kernels use differences to a reference in their own block, so length costs no precision.
#pragma once

#include "gpu/mma.cuh"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/gpu/score.cuh"

namespace furious::cuda {

constexpr int kTile = 64;  // keys or queries of a tile in shared memory

struct Parallel {
  Heads<bf16> q, k, v, out, g, dq, dk, dv;
  const double* decay;
  const int *starts, *ends;
  float *normalizer, *maximum;
  float *delta,
      *log_sum;  // [batch, heads, length]: δ_i (divided by n_i but for exponentials); log2 of n_i·exp(maximum)
  const float* inverse;  // [batch, heads, length]: 1/n_i, where neither g nor δ is divided by it; or undefined
  double *row_decay, *key_decay;
  int64_t length, heads;
  int qk_dim, v_dim;
  int first;  // the first query; q, out, normalizer and maximum begin with it. 0 backward and with chunks
  float scale;
  bool sum_norm, may_grow;  // may_grow: the decay is signed
  ScoreFunction f;
  // What a state adds to each query: f32 [batch, heads, length, past_columns()].
  const float* state_part;
  // The chunked form on Hopper: a query sees no keys before its chunk, of `chunk` tokens (0: all), but has what they
  // give: `past` (y, divided by its part of the normalizer under the sum norm) and `past_n`. Backward, dq, dk and dv
  // hold it already.
  int chunk;
  Heads<bf16> past;
  const float* past_n;
  bool add;

  __device__ const double* decay_of(int64_t b, int64_t h) const {
    return decay ? decay + (b * heads + h) * length : nullptr;
  }
  // Of a query in the results that have one number for each.
  __device__ int64_t place_of(int64_t b, int64_t h, int row) const {
    return (b * heads + h) * (length - first) + row - first;
  }
};

inline Parallel parallel_of(const MixerCall& call, const TokenTables& tables) {
  Parallel m = {};
  const int64_t heads = call.shape.heads;
  m.q = heads_of<bfloat16>(call.inputs.q, heads);
  m.k = heads_of<bfloat16>(call.inputs.k, heads);
  m.v = heads_of<bfloat16>(call.inputs.v, heads);
  m.out = heads_of<bfloat16>(call.result.out, heads);
  m.decay = tables.decay ? tables.decay.data<double>() : nullptr;
  m.starts = tables.starts ? tables.starts.data<int32_t>() : nullptr;
  m.ends = tables.ends ? tables.ends.data<int32_t>() : nullptr;
  m.normalizer = floats(call.result.normalizer);
  m.maximum = floats(call.result.maximum);
  m.length = call.shape.length;
  m.first = static_cast<int>(call.shape.first_query);
  m.heads = heads;
  m.qk_dim = static_cast<int>(call.shape.qk_dim);
  m.v_dim = static_cast<int>(call.shape.v_dim);
  m.scale = call.shape.scale;
  m.sum_norm = call.spec.norm == Norm::sum;
  m.may_grow = call.spec.signed_decay;
  m.f = score_function(call.spec, call.shape.scale);
  return m;
}

// q, k and v of a call, or copies with rows that can be read 16 bytes at a time, behind the last column zeros.
struct WideInputs {
  Tensor q, k, v;

  explicit WideInputs(const MixerInputs& inputs);
  void put_into(Parallel& m) const;
};

// The passes of the mma kernels (parallel_passes.cuh), each compiled in a file of its own.
enum class Target : uint8_t { out, dq, dk, dv };
template <Target kTarget>
void run_pass(const MixerCall& call, const Parallel& m);
extern template void run_pass<Target::out>(const MixerCall&, const Parallel&);
extern template void run_pass<Target::dq>(const MixerCall&, const Parallel&);
extern template void run_pass<Target::dk>(const MixerCall&, const Parallel&);
extern template void run_pass<Target::dv>(const MixerCall&, const Parallel&);

// The factor that f takes out of q·k: S = scale·q·k.
template <Score kScore>
__device__ float score_scale(float scale) {
  return kScore == Score::squared ? scale * scale : kScore == Score::linear ? scale : scale * kLog2e;
}

// acc[rows][dim] *= one factor per row of a lane.
template <int kN>
__device__ void scale_rows(float (&acc)[kN][4], float upper, float lower) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    acc[n][0] *= upper;
    acc[n][1] *= upper;
    acc[n][2] *= lower;
    acc[n][3] *= lower;
  }
}

// Calls f with the score and the dimension, 64, 128, 192 or 256, as constants.
template <class F>
void with_score_and_dim(const MixerCall& call, F&& f) {
  const auto with_dim = [&](auto score) {
    const int64_t dim = std::max(call.shape.qk_dim, call.shape.v_dim);
    if (dim <= 64)
      f(score, std::integral_constant<int, 64>());
    else if (dim <= 128)
      f(score, std::integral_constant<int, 128>());
    else if (dim <= 192)
      f(score, std::integral_constant<int, 192>());
    else
      f(score, std::integral_constant<int, 256>());
  };
  switch (call.spec.score) {
    case Score::linear:
      return with_dim(std::integral_constant<Score, Score::linear>());
    case Score::squared:
      return with_dim(std::integral_constant<Score, Score::squared>());
    case Score::exponential:
      return with_dim(std::integral_constant<Score, Score::exponential>());
    case Score::power:
    case Score::series:
      return;  // hopper_supports() refuses them
  }
}

// The same on Hopper, with what only it has.
void hopper_forward(const MixerCall& call, const Parallel& m);
inline constexpr int64_t kLargestHopperDim = 256;
// hopper_wide_backward() for heads of more than 128.
void hopper_backward(const MixerCall& call, const Parallel& m, const Tensor& gradient);
void hopper_wide_backward(const MixerCall& call, const Parallel& m, const Tensor& gradient);

}  // namespace furious::cuda
