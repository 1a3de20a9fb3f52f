#include "ops/activation.cuh"
#include "ops/mixer/mma.cuh"
#include "ops/token_linear.h"
#include "tensor/launch.cuh"

// A block makes eight rows of the product (of a gated pair, eight of each) for up to eight sequences. The weights go
// straight to shared memory, each once, before the block has anything else to do; the activations follow when they are
// there. Its warps share out the columns, and their sums meet in shared memory.
//
// Activations are the tensor cores' first factor, eight of whose sixteen rows stay empty, weights the second. A product
// sums over k in any order, so a lane takes 8 neighbouring numbers of a row (16 bytes) where the tensor core's layout
// has 4 pairs: both factors do, and the sum is the same.
//
// The norm costs no pass of its own: its weight is multiplied into the activations as they come in, and their square
// sum scales the result.

namespace furious::cuda {
namespace {

using Kind = TokenPart::Kind;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMostSequences = 8;
constexpr int64_t kMostColumns = 1 << 16;  // more than fit into any shared memory
constexpr int kOtherBytes = 8 << 10;       // of shared memory that a block has besides weights and activations
constexpr int kMostBlocks = 4;             // for a multiprocessor; each goes on with further rows

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

// What the end of a tile needs of an element of the result and no kernel since the last token has written.
struct Before {
  float bias = 0, a_log = 0;
  float past[3] = {}, taps[4] = {};  // of the convolution, newest last
};

__device__ Before load_before(const Part& part, int sequence, int row) {
  Before before;
  if (part.bias) before.bias = part.bias[row];
  if (part.a_log) before.a_log = part.a_log[row];
  if (part.window == 0) return before;
  const int past = part.window - 1;
  const float* state = part.conv_state + static_cast<int64_t>(sequence) * past * part.rows + row;
#pragma unroll
  for (int back = 0; back < 3; ++back)
    if (back < past) before.past[2 - back] = __ldcg(state + static_cast<int64_t>(past - 1 - back) * part.rows);
#pragma unroll
  for (int back = 0; back < 4; ++back)
    if (back < part.window) before.taps[3 - back] = part.conv_weight[row * part.window + part.window - 1 - back];
  return before;
}

__device__ float load_old(const Part& part, int sequence, int row) {
  if (part.kind != Kind::add) return 0;
  return to_float(__ldcg(static_cast<__nv_bfloat16*>(part.out) + static_cast<int64_t>(sequence) * part.rows + row));
}

__device__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// `other` is the second factor's sum under Kind::swiglu.
__device__ void finish(const Part& part, int sequence, int row, float sum, float other, float old,
                       const Before& before) {
  const int64_t at = static_cast<int64_t>(sequence) * part.rows + row;
  if (part.kind == Kind::softplus) {
    const float y = part.sign * softplus(sum + before.bias);
    static_cast<float*>(part.out)[at] = y;
    if (part.decay) part.decay[at] = -expf(before.a_log) * y;
    return;
  }
  if (part.kind == Kind::swiglu) sum = silu(sum) * other;
  if (part.kind == Kind::add) sum += old;
  if (part.window > 0) {
    // The convolution reads what is also kept for later tokens: rounded as all activations are.
    const float newest = to_float(__float2bfloat16_rn(sum));
    const int past = part.window - 1;
    float* state = part.conv_state + static_cast<int64_t>(sequence) * past * part.rows + row;
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

// Eight numbers of h but for the factor 1/sqrt, and their squares' sum on top of `squares`.
__device__ uint4 normed(const uint4& x, const uint4* gate, const float (&weight)[8], float& squares) {
  float u[8];
  unpack(x, u);
  if (gate != nullptr) {
    float z[8];
    unpack(__ldcg(gate), z);
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

__device__ void load_norm(float (&to)[8], const float* norm, int unit) {
  const float4 low = reinterpret_cast<const float4*>(norm)[2 * unit];
  const float4 high = reinterpret_cast<const float4*>(norm)[2 * unit + 1];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// Rows in shared memory lie apart so that two of them fall into different banks. In units of 16 bytes.
__host__ __device__ int row_units(int k) {
  return k / 8 + 4;
}

// For `buffers` of weights and the activations.
int shared_bytes(int groups, int buffers, int batch, int k) {
  return (buffers * 8 * groups + batch) * row_units(k) * 16;
}

// kGroups times 8 rows: 2 for gated pairs. `buffers` of weights are 2 if the block makes more than one tile.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, kMostBlocks)
    token_linear_kernel(const __grid_constant__ Call call, const int buffers) {
  constexpr int kColumns = 8 * kGroups;
  extern __shared__ uint4 shared[];
  __shared__ float sums[kWarps][kMostSequences][kColumns];
  __shared__ float squares_of[kWarps][kMostSequences];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int units = call.k / 8, stride = row_units(call.k);
  uint4* const activations = shared + buffers * kColumns * stride;
  const auto part_of = [&](int tile) -> const Part& {
    int p = call.parts - 1;
    while (p > 0 && tile < call.part[p].first_tile) --p;
    return call.part[p];
  };
  // A warp fetches a row.
  const auto fetch = [&](int tile, int buffer) {
    const Part& part = part_of(tile);
    const int row = (tile - part.first_tile) * 8 + warp;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const __nv_bfloat16* from =
          (group == 0 ? part.weight : part.second) + static_cast<int64_t>(min(row, part.rows - 1)) * call.k;
      uint4* const to = shared + (buffer * kColumns + group * 8 + warp) * stride;
#pragma unroll 4
      for (int unit = lane; unit < units; unit += 32) copy_async(to + unit, from + unit * 8, row < part.rows);
    }
    commit_copies();
  };

  start_next();
  int tile = static_cast<int>(blockIdx.x);
  fetch(tile, 0);
  // The element of the result that this thread finishes.
  const int sequence = thread / 8, column = thread % 8;
  const auto finishes = [&](int of_tile) {
    const Part& part = part_of(of_tile);
    return sequence < call.batch && (of_tile - part.first_tile) * 8 + column < part.rows;
  };
  const auto row_of = [&](int of_tile) { return (of_tile - part_of(of_tile).first_tile) * 8 + column; };
  Before before;
  if (finishes(tile)) before = load_before(part_of(tile), sequence, row_of(tile));
  float norm[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  if (call.norm != nullptr && thread < units) load_norm(norm, call.norm, thread);
  wait_for_previous();

  for (int b = 0; b < call.batch; ++b) {
    const uint4* x = reinterpret_cast<const uint4*>(call.x + b * call.x_stride);
    const uint4* gate = call.gate ? reinterpret_cast<const uint4*>(call.gate + b * call.gate_stride) : nullptr;
    float squares = 0;
    for (int unit = thread; unit < units; unit += kThreads) {
      uint4 eight = __ldcg(x + unit);
      if (call.norm != nullptr && units > kThreads) load_norm(norm, call.norm, unit);
      if (call.norm != nullptr || gate != nullptr) eight = normed(eight, gate ? gate + unit : gate, norm, squares);
      activations[b * stride + unit] = eight;
    }
    if (call.norm == nullptr) continue;
    squares = warp_sum(squares);
    if (lane == 0) squares_of[warp][b] = squares;
  }

  const int g = lane / 4, t = lane % 4;
  for (int buffer = 0; tile < call.tiles; buffer = buffers - 1 - buffer) {
    const int next = tile + static_cast<int>(gridDim.x);
    float old = 0;  // what another kernel may just have written
    if (finishes(tile)) old = load_old(part_of(tile), sequence, row_of(tile));
    if (next < call.tiles) {
      fetch(next, buffers - 1 - buffer);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    float products[kGroups][4] = {};
    const uint4* const weights = shared + buffer * kColumns * stride;
#pragma unroll 4
    for (int first = warp * 4; first < units; first += 4 * kWarps) {
      const int unit = first + t;
      const uint4 none = make_uint4(0, 0, 0, 0);
      const uint4 x = g < call.batch && unit < units ? activations[g * stride + unit] : none;
      const uint32_t low[4] = {x.x, 0, x.y, 0}, high[4] = {x.z, 0, x.w, 0};
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint4 w = unit < units ? weights[(group * 8 + g) * stride + unit] : none;
        mma(products[group], low, w.x, w.y);
        mma(products[group], high, w.z, w.w);
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      *reinterpret_cast<float2*>(&sums[warp][g][group * 8 + 2 * t]) =
          make_float2(products[group][0], products[group][1]);
    __syncthreads();
    if (finishes(tile)) {
      float sum = 0, other = 0, square = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += sums[w][sequence][column];
        if constexpr (kGroups == 2) other += sums[w][sequence][column + 8];
        if (call.norm != nullptr) square += squares_of[w][sequence];
      }
      if (call.norm != nullptr) {
        const float scale = 1.0f / sqrtf(square / static_cast<float>(call.k) + call.eps);
        sum *= scale;
        other *= scale;
      }
      finish(part_of(tile), sequence, row_of(tile), sum, other, old, before);
    }
    tile = next;
    if (tile < call.tiles && finishes(tile)) before = load_before(part_of(tile), sequence, row_of(tile));
  }
}

template <int kGroups>
void launch(Call& call, Device device) {
  for (int p = 0; p < call.parts; ++p) {
    call.part[p].first_tile = call.tiles;
    call.tiles += (call.part[p].rows + 7) / 8;
  }
  const cudaStream_t s = stream(device);
  const int blocks = std::min(call.tiles, kMostBlocks * multiprocessors());
  const int buffers = blocks < call.tiles ? 2 : 1;
  const int bytes = shared_bytes(kGroups, buffers, call.batch, call.k);
  if (bytes > 40 << 10)
    check(cudaFuncSetAttribute(token_linear_kernel<kGroups>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "token_linear");
  launch_early(true, token_linear_kernel<kGroups>, static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(bytes),
               s, call, buffers);
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
  pairs ? launch<2>(call, in.x.device()) : launch<1>(call, in.x.device());
}

bool token_linear_fits(Device device, int64_t batch, int64_t k, Kind kind) {
  (void)stream(device);  // makes it current
  const int groups = kind == Kind::swiglu ? 2 : 1;
  return batch <= kMostSequences && k % 8 == 0 && k <= kMostColumns &&
         shared_bytes(groups, 2, static_cast<int>(batch), static_cast<int>(k)) + kOtherBytes <= most_shared_memory();
}

}  // namespace furious::cuda
