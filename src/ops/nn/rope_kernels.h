#pragma once

#include <span>

#include "ops/boundaries.h"
#include "ops/nn/rope.h"

namespace furious::cpu {

// The inverse turns the other way.
void rope_rotate(const Tensor& y, const Tensor& x, const Rope& rope, std::span<const Segment> segments, bool inverse);

// `angles` has one entry per token: dim/2 cosines followed by dim/2 sines.
void rope_rotate_rows(const Tensor& y, const Tensor& x, std::span<const float* const> angles, RopePairing pairing,
                      bool inverse);

}  // namespace furious::cpu

namespace furious::cuda {

void rope_rotate(const Tensor& y, const Tensor& x, const Rope& rope, std::span<const Segment> segments, bool inverse);

}  // namespace furious::cuda
