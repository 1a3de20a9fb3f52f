#include "ops/activation.cuh"
#include "ops/mixer/mma.cuh"
#include "ops/token_linear.h"
#include "tensor/launch.cuh"

// A block makes some rows of the product for all sequences: its eight warps share out the columns of the weights, and
// their sums meet in shared memory. Weights are the tensor cores' second factor and come from memory straight into
// registers, each once; activations are the first factor, padded with zeros to 16 rows. A product sums over k in any
// order, so a lane takes 8 neighbouring numbers of a row (16 bytes) where the tensor core's layout has 4 pairs: both
// factors do, and the sum is the same.
//
// The norm costs nothing: its weight is multiplied into the activations as they are loaded, and the square sums, which
// every block makes for itself on the way, scale the result.

namespace furious::cuda {
namespace {

using Kind = TokenPart::Kind;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlockColumns = 32;  // of the weights, that a warp takes at a time
constexpr int kMostBlocks = 4;     // for a multiprocessor; each goes on with further rows

struct Part {
  Kind kind;
  bool f32_out;
  Activation after_conv, qk_activation;
  int rows, first_tile, window, qk_width;
  float sign;
  const __nv_bfloat16 *weight, *second;
  void* out;
  const float *bias, *conv_weight, *a_log;
  float *conv_state, *decay;
};

struct Call {
  const __nv_bfloat16 *x, *gate;
  const float* norm;
  int64_t x_stride, gate_stride;
  float eps;
  int batch, k, parts, tiles;
  Part part[kMostTokenParts];
};

// What the end of a tile needs from memory, for one element of the result.
struct Before {
  float bias = 0, old = 0;
  float past[3] = {}, taps[4] = {};  // of the convolution, newest last
};

__device__ Before load_before(const Part& part, int batch, int row) {
  Before before;
  if (part.bias) before.bias = part.bias[row];
  if (part.kind == Kind::add)
    before.old =
        to_float(__ldcg(static_cast<__nv_bfloat16*>(part.out) + static_cast<int64_t>(batch) * part.rows + row));
  if (part.kind == Kind::softplus && part.a_log) before.old = part.a_log[row];
  if (part.window == 0) return before;
  const int past = part.window - 1;
  const float* state = part.conv_state + static_cast<int64_t>(batch) * past * part.rows + row;
#pragma unroll
  for (int back = 0; back < 3; ++back)
    if (back < past) before.past[2 - back] = __ldcg(state + static_cast<int64_t>(past - 1 - back) * part.rows);
#pragma unroll
  for (int back = 0; back < 4; ++back)
    if (back < part.window) before.taps[3 - back] = part.conv_weight[row * part.window + part.window - 1 - back];
  return before;
}

__device__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// `other` is the second factor's sum under Kind::swiglu.
__device__ void finish(const Part& part, int batch, int row, float sum, float other, const Before& before) {
  const int64_t at = static_cast<int64_t>(batch) * part.rows + row;
  if (part.kind == Kind::softplus) {
    const float y = part.sign * softplus(sum + before.bias);
    static_cast<float*>(part.out)[at] = y;
    if (part.decay) part.decay[at] = -expf(before.old) * y;
    return;
  }
  if (part.kind == Kind::swiglu) sum = silu(sum) * other;
  if (part.kind == Kind::add) sum += before.old;
  if (part.window > 0) {
    // The convolution reads what is also kept for later tokens: rounded as all activations are.
    const float newest = to_float(__float2bfloat16_rn(sum));
    const int past = part.window - 1;
    float* state = part.conv_state + static_cast<int64_t>(batch) * past * part.rows + row;
    const float values[4] = {before.past[0], before.past[1], before.past[2], newest};
    sum = before.bias;
#pragma unroll
    for (int s = 0; s < 4; ++s)
      if (s >= 4 - part.window) sum = fmaf(before.taps[s], values[s], sum);
#pragma unroll
    for (int back = 0; back < 3; ++back)
      if (back < past) state[static_cast<int64_t>(past - 1 - back) * part.rows] = values[3 - back];
  } else {
    sum += before.bias;
  }
  if (part.after_conv != Activation::none) sum = activate(sum, part.after_conv);
  if (part.qk_activation != Activation::none && row < part.qk_width) sum = activate(sum, part.qk_activation);
  if (part.f32_out)
    static_cast<float*>(part.out)[at] = sum;
  else
    static_cast<__nv_bfloat16*>(part.out)[at] = __float2bfloat16_rn(sum);
}

__device__ void unpack(const uint4& from, float (&to)[8]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Eight numbers of h but for the factor 1/sqrt, and their squares' sum on top of `squares`.
__device__ uint4 normed(const Call& call, uint4 x, uint4 gate, const float (&weight)[8], float& squares) {
  float u[8];
  unpack(x, u);
  if (call.gate) {
    float z[8];
    unpack(gate, z);
#pragma unroll
    for (int i = 0; i < 8; ++i) u[i] *= silu(z[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    squares = fmaf(u[i], u[i], squares);
    u[i] *= weight[i];
  }
  return {pack(u[0], u[1]), pack(u[2], u[3]), pack(u[4], u[5]), pack(u[6], u[7])};
}

// kRows sequences (8, or a multiple of 16), kGroups times 8 rows of the weights, of which a lane keeps kSteps times 8
// numbers in flight.
template <int kRows, int kGroups, int kSteps>
__global__ void __launch_bounds__(kThreads, kRows == 8 ? (kGroups == 1 && kSteps <= 4 ? 4 : 2) : 1)
    token_linear_kernel(const __grid_constant__ Call call) {
  constexpr int kTiles = (kRows + 15) / 16;    // of 16 sequences
  constexpr int kHalves = kRows == 8 ? 1 : 2;  // of a tile that hold sequences
  constexpr int kAhead = kRows == 8 ? 4 : 1;   // steps whose activations are loaded at once
  constexpr int kColumns = 8 * kGroups;        // of the block's result
  constexpr int kOutputs = (kRows * kColumns + kThreads - 1) / kThreads;
  __shared__ float sums[kWarps][kRows][kColumns];
  __shared__ float squares_of[kWarps][kRows];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int g = thread % 32 / 4, t = thread % 4;
  const int first_sequence = static_cast<int>(blockIdx.y) * kRows;
  const int steps = (call.k + kWarps * kBlockColumns - 1) / (kWarps * kBlockColumns);
  // Two steps of a warp are neighbours, so that it reads whole lines.
  const auto column_of = [&](int step) { return ((step / 2 * kWarps + warp) * 2 + step % 2) * kBlockColumns + t * 8; };
  const auto part_of = [&](int tile) {
    int p = call.parts - 1;
    while (p > 0 && tile < call.part[p].first_tile) --p;
    return p;
  };

  uint4 weights[kGroups][kSteps];
  const auto fetch = [&](int tile, int first_step) {
    const Part& part = call.part[part_of(tile)];
    const bool pairs = part.kind == Kind::swiglu;
    const int first_row = (tile - part.first_tile) * (pairs ? kColumns / 2 : kColumns);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int row = first_row + (pairs ? group / 2 : group) * 8 + g;
      const __nv_bfloat16* from =
          (pairs && group % 2 == 1 ? part.second : part.weight) + static_cast<int64_t>(row) * call.k;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int column = column_of(first_step + s);
        weights[group][s] = row < part.rows && column < call.k ? __ldcs(reinterpret_cast<const uint4*>(from + column))
                                                               : make_uint4(0, 0, 0, 0);
      }
    }
  };

  int tile = static_cast<int>(blockIdx.x);
  fetch(tile, 0);
  start_next();
  wait_for_previous();
  for (; tile < call.tiles; tile += static_cast<int>(gridDim.x)) {
    const Part& part = call.part[part_of(tile)];
    const bool pairs = part.kind == Kind::swiglu;
    const int columns = pairs ? kColumns / 2 : kColumns;
    const int first_row = (tile - part.first_tile) * columns;
    // The element of the result that this thread finishes, the i-th of several.
    const auto output = [&](int i, int& sequence, int& column) {
      const int item = thread + i * kThreads;
      sequence = item / columns;
      column = item % columns;
      return sequence < kRows && first_sequence + sequence < call.batch && first_row + column < part.rows;
    };
    Before before;
    if constexpr (kOutputs == 1) {
      int sequence, column;
      if (output(0, sequence, column)) before = load_before(part, first_sequence + sequence, first_row + column);
    }

    float products[kTiles][kGroups][4] = {};
    float squares[kTiles][kHalves] = {};
    for (int chunk = 0; chunk < steps; chunk += kSteps) {
      if (chunk > 0) fetch(tile, chunk);
#pragma unroll
      for (int s0 = 0; s0 < kSteps; s0 += kAhead) {
        if (chunk + s0 >= steps) break;
        uint4 x[kAhead][kTiles][kHalves];
#pragma unroll
        for (int s = 0; s < kAhead; ++s)
#pragma unroll
          for (int tile16 = 0; tile16 < kTiles; ++tile16)
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
              const int sequence = first_sequence + tile16 * 16 + half * 8 + g;
              const int column = column_of(chunk + s0 + s);
              x[s][tile16][half] =
                  sequence < call.batch && column < call.k
                      ? __ldcg(reinterpret_cast<const uint4*>(call.x + sequence * call.x_stride + column))
                      : make_uint4(0, 0, 0, 0);
            }
        if (call.norm || call.gate) {
#pragma unroll
          for (int s = 0; s < kAhead; ++s) {
            const int column = column_of(chunk + s0 + s);
            if (column >= call.k) continue;
            float norm[8] = {1, 1, 1, 1, 1, 1, 1, 1};
            if (call.norm) {
              const float4 low = *reinterpret_cast<const float4*>(call.norm + column);
              const float4 high = *reinterpret_cast<const float4*>(call.norm + column + 4);
              norm[0] = low.x, norm[1] = low.y, norm[2] = low.z, norm[3] = low.w;
              norm[4] = high.x, norm[5] = high.y, norm[6] = high.z, norm[7] = high.w;
            }
#pragma unroll
            for (int tile16 = 0; tile16 < kTiles; ++tile16)
#pragma unroll
              for (int half = 0; half < kHalves; ++half) {
                const int sequence = first_sequence + tile16 * 16 + half * 8 + g;
                uint4 gate = make_uint4(0, 0, 0, 0);
                if (call.gate && sequence < call.batch)
                  gate = __ldcg(reinterpret_cast<const uint4*>(call.gate + sequence * call.gate_stride + column));
                x[s][tile16][half] = normed(call, x[s][tile16][half], gate, norm, squares[tile16][half]);
              }
          }
        }
#pragma unroll
        for (int s = 0; s < kAhead; ++s)
#pragma unroll
          for (int tile16 = 0; tile16 < kTiles; ++tile16) {
            const uint4 low = x[s][tile16][0];
            const uint4 high = kHalves == 2 ? x[s][tile16][kHalves - 1] : make_uint4(0, 0, 0, 0);
            const uint32_t first[4] = {low.x, high.x, low.y, high.y};
            const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
              const uint4 w = weights[group][s0 + s];
              mma(products[tile16][group], first, w.x, w.y);
              mma(products[tile16][group], second, w.z, w.w);
            }
          }
      }
    }
    const int next = tile + static_cast<int>(gridDim.x);
    if (next < call.tiles) fetch(next, 0);

#pragma unroll
    for (int tile16 = 0; tile16 < kTiles; ++tile16)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int row = tile16 * 16 + half * 8 + g;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          *reinterpret_cast<float2*>(&sums[warp][row][group * 8 + 2 * t]) =
              make_float2(products[tile16][group][2 * half], products[tile16][group][2 * half + 1]);
        if (call.norm) {
          float square = squares[tile16][half];
          square += __shfl_xor_sync(0xFFFFFFFFu, square, 1);
          square += __shfl_xor_sync(0xFFFFFFFFu, square, 2);
          if (t == 0) squares_of[warp][row] = square;
        }
      }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      int sequence, column;
      if (!output(i, sequence, column)) continue;
      if constexpr (kOutputs > 1) before = load_before(part, first_sequence + sequence, first_row + column);
      float sum = 0, other = 0, square = 0;
      const int at = pairs ? column / 8 * 16 + column % 8 : column;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[w][sequence][at];
      if (pairs)
#pragma unroll
        for (int w = 0; w < kWarps; ++w) other += sums[w][sequence][at + 8];
      if (call.norm) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) square += squares_of[w][sequence];
        const float scale = 1.0f / sqrtf(square / static_cast<float>(call.k) + call.eps);
        sum *= scale;
        other *= scale;
      }
      finish(part, first_sequence + sequence, first_row + column, sum, other, before);
    }
    if (next < call.tiles) __syncthreads();
  }
}

template <int kRows, int kGroups, int kSteps>
void launch(Call& call, Device device) {
  for (int p = 0; p < call.parts; ++p) {
    const int columns = call.part[p].kind == Kind::swiglu ? 4 * kGroups : 8 * kGroups;
    call.part[p].first_tile = call.tiles;
    call.tiles += (call.part[p].rows + columns - 1) / columns;
  }
  const cudaStream_t s = stream(device);
  const auto most = static_cast<unsigned>(kMostBlocks * multiprocessors());
  const dim3 grid(std::min(static_cast<unsigned>(call.tiles), most), blocks_for(call.batch, kRows));
  launch_early(true, token_linear_kernel<kRows, kGroups, kSteps>, grid, kThreads, s, call);
}

const float* optional(const Tensor& x) {
  return x ? x.data<float>() : nullptr;
}

}  // namespace

void token_linear(const TokenInput& in, std::span<const TokenPart> parts) {
  require(parts.size() <= kMostTokenParts, "token_linear: {} parts", parts.size());
  if (in.x.size(0) == 0) return;
  Call call{};
  call.x = pointer<bfloat16>(in.x);
  call.x_stride = in.x.stride(0);
  if (in.gate) call.gate = pointer<bfloat16>(in.gate), call.gate_stride = in.gate.stride(0);
  call.norm = optional(in.norm);
  call.eps = in.eps;
  call.batch = static_cast<int>(in.x.size(0));
  call.k = static_cast<int>(in.x.size(1));
  bool pairs = false;
  for (const TokenPart& from : parts) {
    Part& part = call.part[call.parts++];
    pairs = pairs || from.kind == Kind::swiglu;
    part.kind = from.kind;
    part.f32_out = from.out.dtype() == DType::f32;
    part.after_conv = from.after_conv;
    part.qk_activation = from.qk_activation;
    part.rows = static_cast<int>(from.weight.size(0));
    part.window = from.conv_weight ? static_cast<int>(from.conv_weight.size(1)) : 0;
    part.qk_width = static_cast<int>(from.qk_width);
    part.sign = from.sign;
    part.weight = pointer<bfloat16>(from.weight);
    part.second = from.second ? pointer<bfloat16>(from.second) : nullptr;
    part.out = from.out.raw();
    part.bias = optional(from.bias);
    part.conv_weight = optional(from.conv_weight);
    part.a_log = optional(from.a_log);
    part.conv_state = from.conv_weight ? from.conv_state.data<float>() : nullptr;
    part.decay = from.decay ? from.decay.data<float>() : nullptr;
  }
  const bool adds = call.part[0].kind == Kind::add;
  const Device device = in.x.device();
  if (call.batch <= 8) {
    if (pairs)
      launch<8, 2, 4>(call, device);
    else if (call.k > 4 * kWarps * kBlockColumns)
      launch<8, 1, 8>(call, device);
    else
      launch<8, 1, 4>(call, device);
  } else if (adds) {  // few rows: small tiles fill the device
    launch<64, 1, 4>(call, device);
  } else {
    launch<64, 2, 4>(call, device);
  }
}

}  // namespace furious::cuda
