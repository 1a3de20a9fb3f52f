#include <cuda_fp8.h>

#include "gpu/reduce.cuh"
#include "gpu/rows.cuh"
#include "ops/fp8_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;          // rows and columns of a tile
constexpr int kWords = kTile / 4;   // of four numbers
constexpr int kPitch = kWords + 1;  // words of a row in shared memory: neighbouring rows start in other banks
constexpr int kLanesAcross = 8;     // lanes of a warp side by side; the other four lie below
constexpr int kBlocksAcross = kWords / kLanesAcross;

float largest_of(Fp8Format format) {
  return format == Fp8Format::e4m3 ? 448.0f : 57344.0f;
}

template <class T>
__device__ void load4(const T* from, float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    const T* const four = reinterpret_cast<const T*>(&two);
    for (int i = 0; i < 4; ++i) x[i] = to_float(four[i]);
  }
}

// Numbers that are not negative are ordered like their bits, so that the largest is found by integers, in any order. A
// NaN has larger bits than all others; it is left out, and stays one when it is rounded.
template <class T>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const T* x, int64_t rows, int64_t columns, int64_t stride, unsigned* largest) {
  __shared__ float shared[32];
  float most = 0;
  const int64_t across = columns / 4, count = rows * across;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    float four[4];
    load4(x + i / across * stride + i % across * 4, four);
    for (const float number : four) most = fmaxf(most, fabsf(number));
  }
  most = block_max(most, shared);
  if (threadIdx.x == 0) atomicMax(largest, __float_as_uint(most));
}

__device__ uint32_t rounded4(const float (&x)[4], float factor, __nv_fp8_interpretation_t format) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(x[i] * factor, __NV_SATFINITE, format)) << (8 * i);
  return word;
}

// Byte i of word j becomes byte j of word i.
__device__ void transpose4(uint32_t (&w)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410);
  w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410);
  w[3] = __byte_perm(c, d, 0x7632);
}

// A tile of 128 by 128 numbers. A thread rounds squares of 4 by 4, writes their rows, and puts their columns into
// shared memory, from where rows of the transposed matrix are written. `largest` becomes the scale in `scale`.
template <class T>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const T* x, int64_t rows, int64_t columns, int64_t stride, const unsigned* largest,
                 float format_largest, __nv_fp8_interpretation_t format, uint32_t* as_is, uint32_t* transposed,
                 float* scale) {
  __shared__ uint32_t tile[kTile * kPitch];
  const float most = __uint_as_float(*largest);
  const bool scaled = most > 1e-30f;  // below, the factor would overflow; such numbers round to 0
  const float factor = scaled ? format_largest / most : 1.0f;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale = scaled ? most / format_largest : 1.0f;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile,
                first_column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int across = warp % kBlocksAcross * kLanesAcross + lane % kLanesAcross;  // which four columns
  const bool inside = first_column + 4 * across < columns;
  for (int pass = 0; pass < kTile / 32; ++pass) {
    const int below = 8 * pass + warp / kBlocksAcross * 4 + lane / kLanesAcross;  // which four rows
    if (!inside || first_row + 4 * below >= rows) continue;
    uint32_t square[4];
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first_row + 4 * below + i;
      float four[4];
      load4(x + row * stride + first_column + 4 * across, four);
      square[i] = rounded4(four, factor, format);
      as_is[row * (columns / 4) + first_column / 4 + across] = square[i];
    }
    if (transposed == nullptr) continue;
    transpose4(square);
    for (int i = 0; i < 4; ++i) tile[(4 * across + i) * kPitch + below] = square[i];
  }
  if (transposed == nullptr) return;
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * kWords; i += kThreads) {
    const int column = i / kWords, word = i % kWords;
    if (first_column + column < columns && first_row + 4 * word < rows)
      transposed[(first_column + column) * (rows / 4) + first_row / 4 + word] = tile[column * kPitch + word];
  }
}

template <class T>
void run(const Fp8Matrix& out, const Tensor& x) {
  const cudaStream_t s = stream(x.device());
  const Tensor largest = Tensor::zeros({1}, DType::i32, x.device());
  auto* const most = reinterpret_cast<unsigned*>(largest.raw());
  const auto* const from = pointer<T>(x);
  const int64_t rows = x.size(0), columns = x.size(1), stride = x.stride(0);
  const int64_t blocks = std::min<int64_t>((rows * columns / 4 + kThreads - 1) / kThreads, 2048);
  largest_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, s>>>(from, rows, columns, stride, most);
  check(cudaGetLastError(), "to_fp8");
  const dim3 grid(static_cast<unsigned>((columns + kTile - 1) / kTile),
                  static_cast<unsigned>((rows + kTile - 1) / kTile));
  const Fp8Format format = out.as_is.format;
  round_kernel<<<grid, kThreads, 0, s>>>(
      from, rows, columns, stride, most, largest_of(format), format == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2,
      static_cast<uint32_t*>(out.as_is.values.raw()),
      out.transposed.values ? static_cast<uint32_t*>(out.transposed.values.raw()) : nullptr,
      static_cast<float*>(out.as_is.scale.raw()));
  check(cudaGetLastError(), "to_fp8");
}

}  // namespace

bool fp8_supported(Device device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index), "device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index), "device");
  return 10 * major + minor >= 89;
}

void to_fp8(const Fp8Matrix& out, const Tensor& x) {
  if (x.dtype() == DType::bf16)
    run<bfloat16>(out, x);
  else
    run<float>(out, x);
}

}  // namespace furious::cuda
