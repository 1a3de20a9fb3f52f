// Matrix products, the one place that knows the library behind them (oneDNN, or OpenBLAS without it):
//
//   out = op(a) op(b)      or, with accumulate,      out += op(a) op(b)            op: as it is, or transposed
//
// out and a are f32; b is f32, or bf16 or f16 (weights), converted first. All are matrices on the CPU with unit inner
// stride and any distance between rows; out overlaps neither a nor b. The library brings its own threads: not to be
// called inside a parallel loop. Same bits for the same shapes, strides and number of threads.
#pragma once

#include <cstdint>
#include <string>

#include "tensor/tensor.h"

namespace furious {

// What the factors are rounded to before they are multiplied; sums and result are f32 in both.
enum class MatmulPrecision : uint8_t { f32, bf16 };

struct MatmulOptions {
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  MatmulPrecision precision = MatmulPrecision::f32;
};

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options = {});

// Whether library and CPU have products of this precision; without, matmul refuses it with an Error.
bool matmul_supports(MatmulPrecision precision);

// Flop/s of a large product on all threads, measured now: the best of a few runs, so that floors are not soft.
double matmul_rate(MatmulPrecision precision = MatmulPrecision::f32);

std::string matmul_library();  // "oneDNN 2.6.3", "OpenBLAS 0.3.21"

}  // namespace furious
