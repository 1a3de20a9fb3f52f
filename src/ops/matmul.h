// Matrix products, the one place that knows the libraries behind them (oneDNN, or OpenBLAS without it; cuBLASLt):
//
//   out = op(a) op(b)  (+ addend)      or, with accumulate,      out += op(a) op(b)      op: as it is, or transposed
//
// Matrices with unit inner stride and any distance between rows, all on one device; out overlaps neither a nor b. Sums
// are f32. Factors that are not of the type they are multiplied in are converted first. Tensors [count, rows, columns]
// are as many products, at any distance from each other.
//
// CPU: out and a are f32; b is f32, or bf16 or f16 (weights). The library computes tiles of the result, each on one
// thread with signals blocked; inside a parallel loop all of them on the thread that calls. Same bits for the same
// shapes and strides, whatever the number of threads.
//
// GPU: factors are f32 or bf16, b also f16; two bf16 factors are multiplied as they are whatever the precision. out is
// f32, or bf16 if the factors are multiplied in bf16. Same bits on the same GPU.
#pragma once

#include <cstdint>
#include <string>

#include "tensor/tensor.h"

namespace furious {

// What the factors are rounded to before they are multiplied. tf32 has the range of f32 and 11 bits; a GPU may multiply
// it many times faster than f32, the CPU takes f32 for it. fp8 is for linear layers on a GPU (ops/fp8.h); other
// products are then bf16.
enum class MatmulPrecision : uint8_t { f32, tf32, bf16, fp8 };

struct MatmulOptions {
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  MatmulPrecision precision = MatmulPrecision::f32;
  Tensor addend = {};  // optional; of the shape, dtype and strides of out, and other memory
};

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options = {});

// While it lives, large products of this thread on a GPU are tried with several kernels of the library, once for each
// shape, and later computed by the fastest of those that give the same bits as its first choice. For shapes that come
// up many times: a shape takes about 20 ms, and twice the memory of its result for that time, without which it is left
// as it is.
class MatmulTuning {
 public:
  MatmulTuning();
  ~MatmulTuning();
  MatmulTuning(const MatmulTuning&) = delete;
  MatmulTuning& operator=(const MatmulTuning&) = delete;
  static bool active();

 private:
  bool before_;
};

// Whether library and device have products of this precision; without, matmul refuses it with an Error.
bool matmul_supports(MatmulPrecision precision, Device device = {});

// Flop/s of a large product on the whole device, measured now: the best of a few runs, so that floors are not soft.
double matmul_rate(MatmulPrecision precision = MatmulPrecision::f32, Device device = {});

std::string matmul_library(Device device = {});  // "oneDNN 2.6.3", "OpenBLAS 0.3.21", "cuBLASLt 13.0.0"

}  // namespace furious
