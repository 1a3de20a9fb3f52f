#pragma once

#include <span>

#include "ops/rope.h"

namespace furious::cpu {

// `angles` has one entry per token: dim/2 cosines followed by dim/2 sines. The inverse turns the other way.
void rope_rotate(const Tensor& y, const Tensor& x, std::span<const float* const> angles, RopePairing pairing,
                 bool inverse);

}  // namespace furious::cpu
