// What training a model costs, counted: the ground for the rate it is measured by, and for refusing what cannot fit.
#pragma once

#include <cstdint>

#include "model/config.h"
#include "tensor/tensor.h"

namespace furious {

// Floating-point operations of forward and backward for a batch, as the formulas need them: matrix products and mixers;
// what recomputation does twice counts once.
double training_flops(const ModelConfig& config, int64_t batch, int64_t length);

// Bytes of weights, gradients and optimizer, and of the activations of one part of a batch.
struct TrainingMemory {
  int64_t parameters = 0;
  int64_t activations = 0;

  int64_t total() const { return parameters + activations; }
};
TrainingMemory training_memory(const ModelConfig& config, int64_t batch, int64_t length, bool recompute,
                               Device device = {}, DType activations = DType::f32);

}  // namespace furious
