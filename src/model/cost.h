// What training a model costs, counted: the ground for the rate it is measured by, and for refusing what cannot fit.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"
#include "tensor/profiler.h"
#include "tensor/tensor.h"

namespace furious {

// Floating-point operations of forward and backward for a batch, as the formulas need them: matrix products and mixers;
// what recomputation does twice counts once.
double training_flops(const ModelConfig& config, int64_t batch, int64_t length);

// What the operations of a training step need, for each label and pass: floating-point operations of products,
// convolutions and mixers, and bytes of what an operation reads and writes if every tensor is touched once. Tensors
// that an operation makes for itself (logits, φ) do not count.
struct WorkCost {
  WorkLabel label;
  StepPass pass;
  double flops = 0, bytes = 0;
};
std::vector<WorkCost> training_costs(const ModelConfig& config, int64_t batch, int64_t length, Device device,
                                     DType activations);

// Bytes of weights, gradients and optimizer, and of the activations of one part of a batch.
struct TrainingMemory {
  int64_t parameters = 0;
  int64_t activations = 0;

  int64_t total() const { return parameters + activations; }
};
TrainingMemory training_memory(const ModelConfig& config, int64_t batch, int64_t length, bool recompute,
                               Device device = {}, DType activations = DType::f32);

}  // namespace furious
