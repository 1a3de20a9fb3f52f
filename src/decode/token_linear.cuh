// Shared by the kernels that multiply a token's activations by weights: description of a product, preparation of its
// input (gate, norm) and processing of its rows (decode/token_linear.h).
#pragma once

#include "decode/token_linear.h"
#include "gpu/mma.cuh"
#include "ops/nn/activation.cuh"
#include "tensor/cuda.cuh"

namespace furious::cuda {

inline constexpr int kMostSequences = 8;

struct LinearPart {
  TokenPart::Kind kind;
  bool f32_out;
  Activation after_conv, qk_activation;
  int rows, first_tile, window, qk_width;
  float sign;
  const __nv_bfloat16 *weight, *second;
  void* out;
  const float *bias, *conv_weight, *a_log;
  float *conv_state, *decay;
  const int32_t* slot_of_row;  // with a convolution: index of the state
};

struct LinearCall {
  const __nv_bfloat16 *x, *gate;
  const float* norm;
  int64_t x_stride, gate_stride;
  float eps;
  int batch, k, parts, tiles;
  LinearPart part[kMostTokenParts];

  // A tile is eight rows of one part.
  __host__ __device__ void number_tiles() {
    tiles = 0;
    for (int p = 0; p < parts; ++p) {
      part[p].first_tile = tiles;
      tiles += (part[p].rows + 7) / 8;
    }
  }
  __device__ const LinearPart& part_of(int tile) const {
    int p = parts - 1;
    while (p > 0 && tile < part[p].first_tile) --p;
    return part[p];
  }
  __host__ __device__ bool pairs() const { return part[0].kind == TokenPart::Kind::swiglu; }
};

// Operands of finish() for one element of the result that no kernel of the current token has written, so that they can
// be loaded before the previous kernel ends.
struct Before {
  float bias = 0, a_log = 0;
  float past[3] = {}, taps[4] = {};  // of the convolution, newest last
  float* state = nullptr;            // the oldest input of this channel in the convolution's state
};

__device__ inline Before load_before(const LinearPart& part, int sequence, int row) {
  Before before;
  if (part.bias) before.bias = part.bias[row];
  if (part.a_log) before.a_log = part.a_log[row];
  if (part.window == 0) return before;
  const int past = part.window - 1;
  before.state = part.conv_state + static_cast<int64_t>(__ldcg(part.slot_of_row + sequence)) * past * part.rows + row;
#pragma unroll
  for (int back = 0; back < 3; ++back)
    if (back < past) before.past[2 - back] = __ldcg(before.state + static_cast<int64_t>(past - 1 - back) * part.rows);
#pragma unroll
  for (int back = 0; back < 4; ++back)
    if (back < part.window) before.taps[3 - back] = part.conv_weight[row * part.window + part.window - 1 - back];
  return before;
}

__device__ inline float load_old(const LinearPart& part, int sequence, int row) {
  if (part.kind != TokenPart::Kind::add) return 0;
  return to_float(__ldcg(static_cast<__nv_bfloat16*>(part.out) + static_cast<int64_t>(sequence) * part.rows + row));
}

// Fast and approximate: the result is rounded to bf16.
__device__ inline float quick_silu(float x) {
  return __fdividef(x, 1.0f + __expf(-x));
}

// Not inlined: few elements need it, and its code stays out of the path of the others.
__device__ __noinline__ inline float rare_softplus(float x) {
  return softplus(x);
}

// Writes results: activations as bf16, numbers as f32.
struct Store {
  __device__ void activation(void* out, int64_t at, float x) const {
    static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(x);
  }
  __device__ void number(void* out, int64_t at, float x) const { static_cast<float*>(out)[at] = x; }
};

// Writes one element. `other` is the sum of the second product under TokenPart::Kind::swiglu.
template <class To = Store>
__device__ void finish(const LinearPart& part, int sequence, int row, float sum, float other, float old,
                       const Before& before, const To& to = {}) {
  const int64_t at = static_cast<int64_t>(sequence) * part.rows + row;
  if (part.kind == TokenPart::Kind::softplus) {
    const float y = part.sign * rare_softplus(sum + before.bias);
    if (part.out != nullptr) to.number(part.out, at, y);
    if (part.decay != nullptr) to.number(part.decay, at, -expf(before.a_log) * y);
    return;
  }
  if (part.kind == TokenPart::Kind::swiglu) sum = quick_silu(sum) * other;
  if (part.kind == TokenPart::Kind::add) sum += old;
  if (part.window > 0) {
    // The newest input is rounded like all activations, so that it equals the value kept for later tokens.
    const float newest = to_float(__float2bfloat16_rn(sum));
    const int past = part.window - 1;
    const float values[4] = {before.past[0], before.past[1], before.past[2], newest};
    sum = before.bias;
#pragma unroll
    for (int s = 0; s < 4; ++s)
      if (s >= 4 - part.window) sum = fmaf(before.taps[s], values[s], sum);
#pragma unroll
    for (int back = 0; back < 3; ++back)
      if (back < past) before.state[static_cast<int64_t>(past - 1 - back) * part.rows] = values[3 - back];
  } else {
    sum += before.bias;
  }
  if (part.after_conv != Activation::none) sum = activate(sum, part.after_conv);
  if (part.qk_activation != Activation::none && row < part.qk_width) sum = activate(sum, part.qk_activation);
  if (part.f32_out)
    static_cast<float*>(part.out)[at] = sum;
  else
    to.activation(part.out, at, sum);
}

__device__ inline void unpack(const uint4& from, float (&to)[8]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

// silu of eight numbers z of the gate.
__device__ inline void gate_factors(float (&to)[8], const uint4& z) {
  unpack(z, to);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = quick_silu(to[i]);
}

// Eight numbers of h without the factor 1/sqrt(mean(u²) + eps); adds their u² to `squares`.
__device__ inline uint4 normed(const uint4& x, const float (&factors)[8], const float (&weight)[8], float& squares) {
  float u[8];
  unpack(x, u);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u[i] *= factors[i];
    squares = fmaf(u[i], u[i], squares);
    u[i] *= weight[i];
  }
  return {pack(u[0], u[1]), pack(u[2], u[3]), pack(u[4], u[5]), pack(u[6], u[7])};
}

__device__ inline void load_norm(float (&to)[8], const float* norm, int unit) {
  const float4 low = reinterpret_cast<const float4*>(norm)[2 * unit];
  const float4 high = reinterpret_cast<const float4*>(norm)[2 * unit + 1];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

}  // namespace furious::cuda
