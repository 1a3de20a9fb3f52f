// An exponential moving average of the weights:
//
//   e ← β e + (1 − β) p after every step;    after t steps the average is e / (1 − βᵗ)
//
// e starts at zero, and the divisor is the sum of all weights so far: so the average never holds the initial weights,
// and nothing in a step depends on t.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/language_model.h"

namespace furious {

class SafetensorsReader;

class WeightAverage {
 public:
  WeightAverage(const LanguageModel& model, double decay);

  // After the optimizer's update, on the device. `constants`: of the step; a step that was skipped is none.
  void update(const Tensor& constants);

  // A model with the averages after so many steps, on the CPU; after 0 its weights.
  LanguageModel averaged(int64_t steps) const;

  // e by name, for checkpoints.
  void add_state(std::map<std::string, Tensor>& tensors) const;
  void load(const SafetensorsReader& file);

 private:
  const LanguageModel& model_;
  double decay_;
  std::vector<Tensor> sums_;  // e of each parameter
};

}  // namespace furious
