// Rotary position embedding: pair i of a head's dimensions is turned by the angle position · ω_i, ω_i = base^(−2i/dim),
//
//   y_first  = x_first cos − x_second sin
//   y_second = x_second cos + x_first sin
//
// halves:       pair i is (i, i + dim/2), as in Hugging Face's Llama
// interleaved:  pair i is (2i, 2i + 1), as in the original and in the authors' release
//
// The gradient is turned back by the same angle. x is f32 (on a GPU also bf16) [batch, length, heads, dim] with
// contiguous heads (a view); dim is even. Angles are computed in double precision, so that they hold at any position.
#pragma once

#include <cmath>

#include "base/random.h"  // FURIOUS_HOST_DEVICE
#include "ops/tape.h"

namespace furious {

enum class RopePairing : uint8_t { halves, interleaved };

// Angles for longer texts than a model was first trained on. Without `original`, every ω is divided by the factor
// ("linear"). With it ("llama3") pairs that make fewer than `low` turns in `original` tokens are divided, those that
// make more than `high` stay, and between the two it is a blend.
struct RopeScaling {
  double factor = 1, low = 0, high = 0, original = 0;

  bool operator==(const RopeScaling&) const = default;
  FURIOUS_HOST_DEVICE double operator()(double frequency) const {
    if (original == 0) return frequency / factor;
    const double turns = original * frequency / 6.283185307179586;
    const double kept = fmin(fmax((turns - low) / (high - low), 0.0), 1.0);
    return frequency * (kept + (1 - kept) / factor);
  }
};

struct Rope {
  RopePairing pairing = RopePairing::halves;
  double base = 10000;
  int64_t offset = 0;  // position of the first token of every row; documents that start inside a row start at 0
  // Of a step: row i begins at offset + positions[rows[i]]. Both i32 of one dimension and on the device, where they are
  // read when the step runs, so that a recorded one can go on; positions may lie apart.
  Tensor positions = {}, rows = {};
  RopeScaling scaling = {};
};

// For `boundaries` see ops/boundaries.h.
Tensor rope_forward(const Tensor& x, const Rope& rope, const Tensor& boundaries = {});
void rope_backward(const Tensor& dx, const Tensor& dy, const Rope& rope, const Tensor& boundaries = {});

Variable rope(Tape& tape, const Variable& x, const Rope& rope, const Tensor& boundaries = {});

}  // namespace furious
