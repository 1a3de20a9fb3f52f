#include "train/memory_plan.h"

#include <algorithm>

#include "base/error.h"
#include "dist/sharded_optimizer.h"
#include "model/plan.h"
#include "tensor/arena.h"
#include "train/optimizer.h"
#include "train/options.h"

namespace furious {

std::string gib(int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

TrainingMemory needed_memory(const TrainOptions& options, const ModelConfig& config, const DataParallel& parallel) {
  const Device device = device_from_name(options.device);
  TrainingMemory memory = training_memory(config, options.batch / options.accumulate, options.length, options.recompute,
                                          device, compute_options(options, device).activations);
  const int64_t weights = parameter_count(config) * static_cast<int64_t>(sizeof(float));
  const OptimizerMemory optimizer = optimizer_memory(options, config);
  memory.parameters = parallel.sharded ? ShardedOptimizer::bytes(parameter_count(config), parallel.ranks.size())
                                       : 2 * weights + optimizer.states;
  if (options.ema > 0) memory.parameters += weights;
  // The update follows the backward pass. Sharded, Muon gathers its directions in memory as large as the weights.
  const int64_t gathered = parallel.sharded && optimizer.scratch > 0 ? weights : 0;
  memory.activations = std::max(memory.activations, optimizer.scratch + gathered);
  // Micro-batches after the first make the gradient of the output projection beside the accumulated one.
  if (options.accumulate > 1)
    memory.activations += config.vocabulary * config.hidden * static_cast<int64_t>(sizeof(float));
  return memory;
}

std::string memory_advice(const TrainOptions& options, const ModelConfig& config, int64_t available,
                          const DataParallel& parallel) {
  const auto needed = [&](int64_t micro_batches) {
    TrainOptions changed = options;
    changed.accumulate = micro_batches;
    changed.recompute = true;
    return needed_memory(changed, config, parallel).total();
  };
  if (!options.recompute && needed(options.accumulate) <= available)
    return fmt::format("--recompute would need {}", gib(needed(options.accumulate)));
  for (int64_t count = options.accumulate + 1; count <= options.batch; ++count)
    if (options.batch % count == 0 && needed(count) <= available)
      return fmt::format("--accumulate {} --recompute would need {}", count, gib(needed(count)));
  return "use a smaller --size, --length or --batch";
}

void check_memory(const TrainOptions& options, const ModelConfig& config, const DataParallel& parallel) {
  const Device device = device_from_name(options.device);
  const int64_t available = usable_memory(device, device.is_cpu() ? parallel.ranks.local_size() : 1);
  const TrainingMemory memory = needed_memory(options, config, parallel);
  if (memory.total() <= available) return;
  fail(
      "train: needs about {} of memory on {} ({} for {} parameters with gradients and optimizer, {} for activations), "
      "but {} are free; {}",
      gib(memory.total()), options.device, gib(memory.parameters), parameter_count(config), gib(memory.activations),
      gib(available), memory_advice(options, config, available, parallel));
}

}  // namespace furious
