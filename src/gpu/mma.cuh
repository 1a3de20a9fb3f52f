// Tensor cores and the memory around them, by the names that the kernels use. bf16 or tf32 operands, f32 sums.
//
// A warp multiplies 16 × 16 by 16 × 8. Lane l holds of the result rows l/4 and l/4 + 8, columns 2(l%4) and the next.
// Tiles in shared memory are rows of bf16, in vectors of 16 bytes, swizzled so that the eight rows of an ldmatrix fall
// into different banks.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "gpu/reduce.cuh"

namespace furious::cuda {

using bf16 = __nv_bfloat16;

__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 × 8 by 8 × 8 in tf32. With l/4 = g and l%4 = t, lane l holds of A (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4),
// and of B (t, g), (t + 4, g).
__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t round_to_tf32(float x) {
  uint32_t r;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(x));  // one instruction; .rna would be three
#else
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(x));
#endif
  return r;
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ inline void load_two_transposed(uint32_t& r0, uint32_t& r1, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r0), "=r"(r1)
               : "r"(shared_address(row)));
}

// 16 bytes, or zeros where there is nothing to load; `from` is then not read.
__device__ inline void copy_async(void* to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
// One of `length` floats, or 0 behind the last.
__device__ inline void copy_float(float* to, const float* from, int i, int length) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(to)),
               "l"(from + min(i, length - 1)), "r"(i < length ? 4 : 0));
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;\n");
}
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

// Into the L2 cache, a line of 128 bytes.
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from));
}

// A read that the compiler leaves where it is, ahead of its use.
__device__ inline double load_early(const double* from) {
  double x;
  asm volatile("ld.global.f64 %0, [%1];\n" : "=d"(x) : "l"(from));
  return x;
}
__device__ inline float load_early(const float* from) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];\n" : "=f"(x) : "l"(from));
  return x;
}

__device__ inline uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ inline float2 unpack(uint32_t x) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x));
}

// Products of two bf16 each, rounded once.
__device__ inline uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  uint32_t r;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(r) : "r"(x), "r"(y));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(r) : "r"(x), "r"(y), "r"(0x80008000u));  // −0 changes no product
#endif
  return r;
}
__device__ inline uint32_t twice_low(uint32_t x) {
  return __byte_perm(x, x, 0x1010);
}
__device__ inline uint32_t twice_high(uint32_t x) {
  return __byte_perm(x, x, 0x3232);
}
__device__ inline float low_of(uint32_t x) {
  return __uint_as_float(x << 16);
}
__device__ inline float high_of(uint32_t x) {
  return __uint_as_float(x & 0xFFFF0000u);
}

// Over the four lanes that hold a row of a result.
template <class T>
__device__ inline T quad_sum(T x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Rows of `stride` bf16 in shared memory, a multiple of 32. Vector p of row r lies at place p ^ (r % 8); where the
// stride is no multiple of 64, so that two rows share the banks of 128 bytes, at p ^ (r/2 % 4).
struct StridedTile {
  __nv_bfloat16* data;
  int stride;

  // `row` counts from row8, a multiple of 8.
  __device__ __nv_bfloat16* at(int row8, int row, int vector) const {
    const int swizzle = stride % 64 == 0 ? row & 7 : row >> 1 & 3;
    return data + (row8 + row) * stride + (vector ^ swizzle) * 8;
  }

  // Neighbouring threads that copy one row: `stride` has a multiple of as many vectors.
  static constexpr __host__ __device__ int lanes_of(int stride) { return stride % 64 == 0 ? 8 : 4; }

  // Copies kCount rows, `step` elements apart; those at and after `rows`, and columns at and after `columns`, become
  // zeros. By all threads; `from` is where a thread begins: in row thread/kLanes, column 8·(thread%kLanes).
  template <int kThreads, int kCount, int kLanes>
  __device__ void load(const __nv_bfloat16* from, int64_t step, int rows, int columns) const {
    constexpr int kAtOnce = kThreads / kLanes;
    static_assert(kAtOnce % 8 == 0);
    const int row = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll 1
    for (int vector = lane; vector < stride / 8; vector += kLanes, from += kLanes * 8)
#pragma unroll
      for (int i = 0; i < kCount; i += kAtOnce) {
        if (kCount % kAtOnce != 0 && i + row >= kCount) break;
        copy_async(at((row & ~7) + i, row & 7, vector), from + i * step, i + row < rows && vector * 8 < columns);
      }
  }

  // Fragments for mma: A of rows [row, row+16), `row` a multiple of 8, and dimensions [16·step, +16).
  __device__ void a_fragment(uint32_t (&r)[4], int row, int step) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(r, at(row + lane / 8 % 2 * 8, lane % 8, 2 * step + lane / 16));
  }
  // B of a product with the tile transposed: columns are rows [row, row+16), two groups of 8 (r0, r1 and r2, r3).
  __device__ void b_fragment(uint32_t (&r)[4], int row, int step) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(r, at(row + lane / 16 * 8, lane % 8, 2 * step + lane / 8 % 2));
  }
  // B of a product with the tile as it is: rows [row, row+16) are summed over, columns are dimensions [16·step, +16).
  __device__ void b_fragment_transposed(uint32_t (&r)[4], int row, int step) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices_transposed(r, at(row + lane / 8 % 2 * 8, lane % 8, 2 * step + lane / 16));
  }
};

// The same with a stride that the compiler knows.
template <int kDim>
struct Tile {
  static_assert(kDim % 32 == 0);
  static constexpr int kVectors = kDim / 8;
  __nv_bfloat16* data;

  __device__ __nv_bfloat16* at(int row, int vector) const {
    return StridedTile{data, kDim}.at(row & ~7, row & 7, vector);
  }
  __device__ void a_fragment(uint32_t (&r)[4], int row, int step) const {
    StridedTile{data, kDim}.a_fragment(r, row, step);
  }
  __device__ void b_fragment(uint32_t (&r)[4], int row, int step) const {
    StridedTile{data, kDim}.b_fragment(r, row, step);
  }
  __device__ void b_fragment_transposed(uint32_t (&r)[4], int row, int step) const {
    StridedTile{data, kDim}.b_fragment_transposed(r, row, step);
  }
};

// s[m][n] += products of rows [row_a, +16·kM) of tile a and rows [row_b, +8·kN) of tile b, over 16·`steps` columns.
template <int kM, int kN, class A, class B>
__device__ void add_products(float (&s)[kM][kN][4], const A& a, int row_a, const B& b, int row_b, int steps) {
  __builtin_assume(steps > 0);
#pragma unroll 2
  for (int step = 0; step < steps; ++step) {
    uint32_t x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) a.a_fragment(x[m], row_a + m * 16, step);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t y[4];
      b.b_fragment(y, row_b + n * 8, step);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma(s[m][n], x[m], y[0], y[1]);
        mma(s[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
}

// Two neighbouring blocks of a result as the operand A of the next product.
__device__ inline void pack_fragment(uint32_t (&r)[4], const float (&left)[4], const float (&right)[4]) {
  r[0] = pack(left[0], left[1]);
  r[1] = pack(left[2], left[3]);
  r[2] = pack(right[0], right[1]);
  r[3] = pack(right[2], right[3]);
}

// acc += products of the weights p, rounded, with rows [row, +8·kN) of the tile, in columns [16·kFirst, 16·kEnd).
template <int kFirst, int kEnd, int kM, int kN, int kBlocks, class T>
__device__ void add_weighted_rows(float (&acc)[kM][kBlocks][4], const float (&p)[kM][kN][4], const T& tile, int row) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) pack_fragment(x[m], p[m][n], p[m][n + 1]);
#pragma unroll
    for (int d = kFirst; d < kEnd; ++d) {
      uint32_t y[4];
      tile.b_fragment_transposed(y, row + n * 8, d);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma(acc[m][2 * d], x[m], y[0], y[1]);
        mma(acc[m][2 * d + 1], x[m], y[2], y[3]);
      }
    }
  }
}

}  // namespace furious::cuda
