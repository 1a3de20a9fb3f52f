// The features whose product is the square of a product: φ(q)·φ(k) = (q·k)²,
//
//   φ(x) = (x_i x_j · (1 if i = j else √2))   for i ≤ j, in the order (0,0), (0,1), ..., (0,d−1), (1,1), ...
//   dx_i = 2 x_i dφ_ii + √2 Σ_{j≠i} x_j dφ_ij
//
// x is f32 [..., d] with contiguous rows (a view); φ(x) is contiguous [..., d(d+1)/2].
#pragma once

#include "ops/tape.h"

namespace furious {

constexpr int64_t symmetric_square_size(int64_t d) {
  return d * (d + 1) / 2;
}

Tensor symmetric_square_forward(const Tensor& x);
void symmetric_square_backward(const Tensor& dx, const Tensor& dy, const Tensor& x);

Variable symmetric_square(Tape& tape, const Variable& x);

}  // namespace furious
