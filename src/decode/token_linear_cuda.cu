#include "decode/token_linear.cuh"
#include "gpu/launch.cuh"

// A block computes eight rows of the product (of a gated pair, eight of each) for up to eight sequences. It first
// copies the weights to shared memory with cp.async, each once, and then loads the activations when the previous kernel
// has written them. Its warps divide the columns; their partial sums are added in shared memory.
//
// Activations are the A operand of the mma, with eight of its sixteen rows zero, and weights the B operand. The order
// of the sum over k is arbitrary, so a lane uses 8 consecutive numbers of a row (one 16-byte load) in place of the 4
// pairs of the fragment layout, for both operands.
//
// The norm needs no separate pass: its weight is multiplied into the activations as they are loaded, and their sum of
// squares scales the result.

namespace furious::cuda {
namespace {

using Kind = TokenPart::Kind;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int64_t kMostColumns = 1 << 16;  // exceeds any shared memory; keeps the byte count within an int
constexpr int kOtherBytes = 8 << 10;       // shared memory of a block besides weights and activations
constexpr int kMostBlocks = 4;             // per multiprocessor; a block loops over tiles

// Row stride in shared memory in units of 16 bytes, padded to avoid bank conflicts.
__host__ __device__ int row_units(int k) {
  return k / 8 + 4;
}

// Dynamic shared memory: `buffers` tiles of weights, and the activations.
int shared_bytes(int groups, int buffers, int batch, int k) {
  return (buffers * 8 * groups + batch) * row_units(k) * 16;
}

// A tile has kGroups · 8 rows, kGroups = 2 for gated pairs. Weights are double-buffered (`buffers` = 2) if a block
// computes more than one tile.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, kMostBlocks)
    token_linear_kernel(const __grid_constant__ LinearCall call, const int buffers) {
  constexpr int kColumns = 8 * kGroups;
  extern __shared__ uint4 shared[];
  __shared__ float sums[kWarps][kMostSequences][kColumns];
  __shared__ float squares_of[kWarps][kMostSequences];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int units = call.k / 8, stride = row_units(call.k);
  uint4* const activations = shared + buffers * kColumns * stride;
  // Each warp copies one row per group.
  const auto fetch = [&](int tile, int buffer) {
    const LinearPart& part = call.part_of(tile);
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
    const LinearPart& part = call.part_of(of_tile);
    return sequence < call.batch && (of_tile - part.first_tile) * 8 + column < part.rows;
  };
  const auto row_of = [&](int of_tile) { return (of_tile - call.part_of(of_tile).first_tile) * 8 + column; };
  Before before;
  if (finishes(tile)) before = load_before(call.part_of(tile), sequence, row_of(tile));
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
      float factors[8] = {1, 1, 1, 1, 1, 1, 1, 1};
      if (gate != nullptr) gate_factors(factors, __ldcg(gate + unit));
      if (call.norm != nullptr || gate != nullptr) eight = normed(eight, factors, norm, squares);
      activations[b * stride + unit] = eight;
    }
    if (call.norm == nullptr) continue;
    squares = warp_sum(squares);
    if (lane == 0) squares_of[warp][b] = squares;
  }

  const int g = lane / 4, t = lane % 4;
  for (int buffer = 0; tile < call.tiles; buffer = buffers - 1 - buffer) {
    const int next = tile + static_cast<int>(gridDim.x);
    float old = 0;  // the residual, which the previous kernel may have written
    if (finishes(tile)) old = load_old(call.part_of(tile), sequence, row_of(tile));
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
      finish(call.part_of(tile), sequence, row_of(tile), sum, other, old, before);
    }
    tile = next;
    if (tile < call.tiles && finishes(tile)) before = load_before(call.part_of(tile), sequence, row_of(tile));
  }
}

template <int kGroups>
void launch(const LinearCall& call, Device device) {
  const cudaStream_t s = stream(device);
  const int blocks = std::min(call.tiles, kMostBlocks * multiprocessors());
  const int buffers = blocks < call.tiles ? 2 : 1;
  const int bytes = shared_bytes(kGroups, buffers, call.batch, call.k);
  // The same value for all calls: another thread may set the attribute between this and the launch.
  if (bytes > 40 << 10)
    check(cudaFuncSetAttribute(token_linear_kernel<kGroups>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               most_shared_memory() - kOtherBytes),
          "token_linear");
  launch_early(true, token_linear_kernel<kGroups>, static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(bytes),
               s, call, buffers);
}

const float* optional(const Tensor& x) {
  return x ? x.data<float>() : nullptr;
}

}  // namespace

void token_linear(const TokenInput& in, std::span<const TokenPart> parts) {
  require(parts.size() <= kMostTokenParts, "token_linear: {} parts, expected at most {}", parts.size(),
          kMostTokenParts);
  if (in.x.size(0) == 0) return;
  LinearCall call{};
  call.x = pointer<bfloat16>(in.x);
  call.x_stride = in.x.stride(0);
  if (in.gate) call.gate = pointer<bfloat16>(in.gate), call.gate_stride = in.gate.stride(0);
  call.norm = optional(in.norm);
  call.eps = in.eps;
  call.batch = static_cast<int>(in.x.size(0));
  call.k = static_cast<int>(in.x.size(1));
  for (const TokenPart& from : parts) {
    LinearPart& part = call.part[call.parts++];
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
    part.slot_of_row = from.conv_weight ? from.slots.data<int32_t>() : nullptr;
    part.decay = from.decay ? from.decay.data<float>() : nullptr;
  }
  call.number_tiles();
  call.pairs() ? launch<2>(call, in.x.device()) : launch<1>(call, in.x.device());
}

bool token_linear_fits(Device device, int64_t batch, int64_t k, Kind kind) {
  (void)stream(device);  // makes it current
  const int groups = kind == Kind::swiglu ? 2 : 1;
  return batch <= kMostSequences && k % 8 == 0 && k <= kMostColumns &&
         shared_bytes(groups, 2, static_cast<int>(batch), static_cast<int>(k)) + kOtherBytes <= most_shared_memory();
}

}  // namespace furious::cuda
