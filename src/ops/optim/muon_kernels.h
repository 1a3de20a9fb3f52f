// What muon.cpp calls after all checks.
#pragma once

#include "ops/optim/muon.h"

namespace furious {

inline constexpr double kMuonEpsilon = 1e-7;

}  // namespace furious

namespace furious::cpu {

// momentum ← μ momentum + g, update = g + μ momentum
void muon_momentum(const Tensor& update, const Tensor& momentum, const Tensor& gradient, const Tensor& numbers,
                   float mu);
void muon_normalize(const Tensor& x, const Tensor& squares);  // x /= √squares + ε
void muon_apply(const Tensor& parameter, const Tensor& direction, const Tensor& numbers, float factor);

}  // namespace furious::cpu

namespace furious::cuda {

void muon_momentum(const Tensor& update, const Tensor& momentum, const Tensor& gradient, const Tensor& numbers,
                   float mu);
void muon_normalize(const Tensor& x, const Tensor& squares);
void muon_apply(const Tensor& parameter, const Tensor& direction, const Tensor& numbers, float factor);

}  // namespace furious::cuda
