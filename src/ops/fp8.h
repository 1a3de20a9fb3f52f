// Products of matrices of 8-bit floats, on GPUs of compute capability 8.9 and later:
//
//   x ≈ scale · q        scale = max |x| / largest number of the format        out = a bᵀ  (+ addend, or += )
//
// A matrix has one scale, made of its own numbers: no step depends on the one before. Weights and activations are e4m3
// (3 bits after the point, up to 448), gradients e5m2 (2 bits, up to 57,344). Sums are f32. A NaN stays one; a
// product with a matrix that has an infinite number is NaN. A matrix of numbers below 1e-30 is zero.
//
// The kernels read both factors along the inner dimension, so that a matrix that is also multiplied the other way round
// is stored twice, as it is and transposed; both are made in one pass.
#pragma once

#include <cstdint>

#include "tensor/tensor.h"

namespace furious {

enum class Fp8Format : uint8_t { e4m3, e5m2 };

// A matrix [rows, inner], whose rows are read by the product.
struct Fp8Factor {
  Tensor values;  // i32 [rows, inner / 4]: four numbers in each
  Tensor scale;   // f32 [1]
  Fp8Format format = Fp8Format::e4m3;

  int64_t rows() const { return values.size(0); }
  int64_t inner() const { return 4 * values.size(1); }
  Fp8Factor part(int64_t row, int64_t count) const { return {values.slice(0, row, count), scale, format}; }
};

struct Fp8Matrix {
  Fp8Factor as_is, transposed;
};

// Whether the device has such products.
bool fp8_supported(Device device);
// Whether a product of these sizes can be one: each is a multiple of 16.
bool fp8_fits(int64_t rows, int64_t columns, int64_t inner);

// x: f32 or bf16 [rows, columns], both multiples of 16, with unit inner stride; on a GPU.
Fp8Matrix to_fp8(const Tensor& x, Fp8Format format, bool with_transposed = true);

struct Fp8Options {
  bool accumulate = false;
  Tensor addend = {};  // optional; of the shape, dtype and strides of out, and other memory
  // Whether sums may lose the last bits of what the tensor cores add up: for results that are rounded more than that.
  bool fast_sums = false;
};
// out: f32 or bf16 [a.rows(), b.rows()]. At most one factor is e5m2. Same bits on the same GPU.
void matmul_fp8(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options = {});

}  // namespace furious
