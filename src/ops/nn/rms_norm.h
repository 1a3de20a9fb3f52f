// Root-mean-square norm over the last dimension n, with an optional gate z:
//
//   u = x ⊙ silu(z)  (u = x without a gate)        r = 1 / sqrt(mean(u²) + eps)        y = r u ⊙ weight
//
//   du = r (dy ⊙ weight − r u · mean(dy ⊙ weight ⊙ r u))        dweight = Σ_rows dy ⊙ r u
//   dx = du ⊙ silu(z)                                           dz = du ⊙ x ⊙ silu'(z)
//
// A weight of two dimensions [groups, n] belongs to x of [..., groups, n]: each group has a row of it.
//
// x and z are f32 (on a GPU also bf16, in rows of up to 8192) of one shape with contiguous rows (views); y is
// contiguous; weight and r are f32. Beside its inputs the backward pass needs r alone, one number per row.
#pragma once

#include "ops/tape.h"

namespace furious {

struct RmsNormResult {
  Tensor y;
  Tensor inverse_rms;  // r, of the shape of x without its last dimension; with groups, these come first
};
RmsNormResult rms_norm_forward(const Tensor& x, const Tensor& weight, float eps, const Tensor& z = {});

struct RmsNormGradients {
  Tensor x;
  Tensor weight;
  Tensor z;                // only with a gate
  bool adds_to_x = false;  // dx is added to what x holds, as where a residual goes around the norm; without a gate only
};
void rms_norm_backward(const RmsNormGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& z = {});

Variable rms_norm(Tape& tape, const Variable& x, const Variable& weight, float eps, const Variable& z = {});

}  // namespace furious
