#include "train/divergence.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "ops/optim/adamw.h"

namespace furious {
namespace {

constexpr double kExploded = 3;  // times the loss of a uniform prediction

}  // namespace

void DivergenceCheck::diverged(int64_t step, const std::string& what, Scope scope) const {
  const std::string who = scope == Scope::rank && ranks_.size() > 1 ? fmt::format("rank {}: ", ranks_.rank()) : "";
  throw Diverged(fmt::format("train: {}step {}: {}", who, step, what));
}

void DivergenceCheck::agree(const std::string& failure) const {
  const std::vector<size_t> lengths = ranks_.all_gather(failure.size());
  if (std::ranges::count(lengths, size_t{0}) == ranks_.size()) return;
  for (const std::string& text : ranks_.all_gather(failure))
    if (!text.empty()) throw Diverged(text);
}

void DivergenceCheck::check_activations(int64_t step, const Batch& batch) const {
  const std::string layer = model_.first_not_finite(batch.inputs, batch.boundaries);
  if (!layer.empty())
    diverged(step, fmt::format("the loss is not finite; the first values that are not are in {}", layer));
}

void DivergenceCheck::loss_not_finite(int64_t step, const Batch& batch) const {
  check_activations(step, batch);
  diverged(step, "the loss is not finite; the first values that are not are in the output projection");
}

// The backward pass goes from the last parameter to the first: the last gradient that is not finite was the first.
void DivergenceCheck::check_gradients(int64_t step, std::span<const Tensor> gradients) const {
  for (size_t i = gradients.size(); i-- > 0;)
    if (!std::isfinite(gradient_norm(gradients.subspan(i, 1))))
      diverged(step, fmt::format("the gradient is not finite, first at {}", model_.parameters()[i].name));
}

void DivergenceCheck::check_step(int64_t step, const TrainStep& done, std::span<const Tensor> gradients, bool weighted,
                                 double z_loss) const {
  if (!std::isfinite(done.gradient_norm)) {
    std::string failure;
    try {
      check_gradients(step, gradients);
    } catch (const Diverged& error) {
      failure = error.what();
    }
    agree(failure);
    diverged(step, "the norm of the gradient is not finite, though that of each parameter is", Scope::all);
  }
  const double uniform = std::log(static_cast<double>(model_.config().vocabulary));
  if (weighted || done.loss <= kExploded * (uniform + z_loss * uniform * uniform)) return;
  std::vector<double> norms;
  for (size_t i = 0; i < gradients.size(); ++i) norms.push_back(gradient_norm(gradients.subspan(i, 1)));
  const auto largest = static_cast<size_t>(std::ranges::max_element(norms) - norms.begin());
  diverged(step,
           fmt::format("the loss has exploded to {:.4g} (a uniform prediction has {:.4g}); the largest gradient is at "
                       "{} (norm {:.3g}). Try a smaller --lr, a longer --warmup or {}",
                       done.loss, uniform, model_.parameters()[largest].name, norms[largest],
                       clips_ ? "a smaller --grad-clip" : "a --grad-clip such as 1"),
           Scope::all);
}

}  // namespace furious
