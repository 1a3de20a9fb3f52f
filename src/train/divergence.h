// Divergence: a loss or gradient that is not finite, or a loss far above that of a uniform prediction. The error names
// the first layer or parameter that is affected.
#pragma once

#include <span>
#include <string>

#include "data/batches.h"
#include "dist/communicator.h"
#include "furious/train.h"
#include "model/language_model.h"

namespace furious {

class Diverged : public Error {
 public:
  using Error::Error;
};

// Steps are numbered from 1 here, as in messages.
class DivergenceCheck {
 public:
  DivergenceCheck(const LanguageModel& model, Communicator& ranks, bool clips)
      : model_(model), ranks_(ranks), clips_(clips) {}

  // Throws Diverged if an activation of this batch is not finite; it names the first.
  void check_activations(int64_t step, const Batch& batch) const;
  // For a loss that is not finite.
  [[noreturn]] void loss_not_finite(int64_t step, const Batch& batch) const;
  // The norm and the loss of a step; `gradients` are this rank's. All ranks call it and throw the same.
  // `weighted`: the loss has weights, so that its size says nothing. `z_loss`: its factor of the
  // z-loss, which it includes.
  void check_step(int64_t step, const TrainStep& done, std::span<const Tensor> gradients, bool weighted = false,
                  double z_loss = 0) const;
  // A failure of one rank becomes one of all: throws if any rank gives a text.
  void agree(const std::string& failure) const;

 private:
  enum class Scope { rank, all };
  [[noreturn]] void diverged(int64_t step, const std::string& what, Scope scope = Scope::rank) const;
  void check_gradients(int64_t step, std::span<const Tensor> gradients) const;

  const LanguageModel& model_;
  Communicator& ranks_;
  bool clips_;  // gradients, so that the limit can be smaller
};

}  // namespace furious
