// Muon (Jordan and others, 2024) for the weight W [rows, columns] of a linear layer: the direction of a step is the
// momentum with all its singular values brought to about 1.
//
//   g ← gradient_scale · gradient                       (gradient clipping)
//   m ← μ m + g          u = g + μ m                    (Nesterov)
//   X ← u / (‖u‖ + ε),   then five times
//   X ← a X + (b A + c A²) X,  A = X Xᵀ                 (rows > columns:  X (b A + c A²),  A = Xᵀ X)
//   W ← (1 − lr·weight_decay) W − lr · 0.2 √max(rows, columns) · X
//
// with the coefficients (a, b, c) = (3.4445, −4.7750, 2.0315) of the Newton–Schulz iteration, which bring a singular
// value to 0.7 to 1.2. The factor 0.2 √max(rows, columns) (Liu and others, 2025) gives a step the root mean square that
// one of AdamW has in practice, so that both use one learning rate and one weight decay.
//
// All f32, contiguous and on one device; the precision is that of the products of the iteration. Nothing waits for the
// device, so a graph can capture it. The same bits for any number of threads.
#pragma once

#include <span>

#include "ops/matmul.h"
#include "ops/optim/adamw.h"
#include "tensor/tensor.h"

namespace furious {

struct MuonTensors {
  Tensor parameter, gradient, momentum;  // [rows, columns]
};

// `numbers`: the step's, as for adamw_update, of which learning rate, decay and gradient scale are used. A scale of NaN
// changes nothing. All memory is allocated before anything is changed.
void muon_update(std::span<const MuonTensors> tensors, const Tensor& numbers, double momentum,
                 MatmulPrecision precision = MatmulPrecision::f32);

// Its parts, for those who hold matrices in pieces. The first and the last work on any piece of one, with all tensors
// of one shape; between them the directions of a whole matrix are orthogonalized.
//
// momentum ← μ momentum + g,  direction = g + μ momentum
void muon_direction(const Tensor& direction, const Tensor& momentum, const Tensor& gradient, const Tensor& numbers,
                    double mu);
// W ← (1 − lr·weight_decay) W − lr · 0.2 √max(rows, columns) · direction, with the sizes of the whole matrix.
void muon_step(const Tensor& parameter, const Tensor& direction, const Tensor& numbers, int64_t rows, int64_t columns);
// The Newton–Schulz iteration on x itself, five times.
void orthogonalize(const Tensor& x, MatmulPrecision precision = MatmulPrecision::f32);

// Bytes that the update of such a matrix needs beside it.
int64_t muon_scratch_bytes(int64_t rows, int64_t columns);

}  // namespace furious
