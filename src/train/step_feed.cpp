#include "train/step_feed.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "ops/elementwise.h"
#include "ops/nn/cross_entropy.h"
#include "ops/optim/adamw.h"
#include "tensor/check.h"
#include "train/options.h"

namespace furious {
namespace {

int64_t counted_targets(const Tensor& targets) {
  const int32_t* const ids = targets.data<int32_t>();
  return targets.elements() - std::count(ids, ids + targets.elements(), kIgnoredTarget);
}

}  // namespace

int64_t StepInputs::elements(const TrainOptions& options, bool weighted) {
  return (weighted ? 3 : 2) * options.batch * options.length + options.accumulate + kAdamWConstants;
}

StepInputs::StepInputs(const Tensor& memory, const TrainOptions& options, bool weighted) {
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    used += count;
    return memory.slice(0, used - count, count);
  };
  const auto floats = [](const Tensor& ints) {
    return Tensor::wrap(ints.raw(), ints.shape(), DType::f32, ints.device());
  };
  const int64_t rows = options.batch / options.accumulate;
  for (int64_t micro_batch = 0; micro_batch < options.accumulate; ++micro_batch) {
    inputs.push_back(take(rows * options.length).view({rows, options.length}));
    targets.push_back(take(rows * options.length).view({rows, options.length}));
    token_weights.push_back(weighted ? floats(take(rows * options.length)).view({rows, options.length}) : Tensor());
  }
  weights = floats(take(options.accumulate));
  constants = floats(take(kAdamWConstants));
}

StepFeed::StepFeed(const TrainOptions& options, const DataParallel& parallel, const BatchSource& source,
                   int64_t vocabulary, Device device, bool weighted)
    : options_(options),
      rank_options_(parallel.rank_options(options)),
      parallel_(parallel),
      source_(source),
      vocabulary_(vocabulary),
      weighted_(weighted),
      memory_(Tensor::zeros({StepInputs::elements(rank_options_, weighted)}, DType::i32, device)),
      feed_(std::make_unique<Feed>(memory_)) {}

Batch StepFeed::batch(int64_t step, int64_t micro_batch) const {
  const int64_t rows = rank_options_.batch / rank_options_.accumulate;
  return source_.at(step, {parallel_.ranks.rank() * rank_options_.batch + micro_batch * rows, rows});
}

void StepFeed::prefetch(int64_t step) {
  if (next_.step == step) return;
  const StepInputs host(feed_->next(), rank_options_, weighted_);
  next_ = {step, {}, {}, 0};
  int64_t all = 0;
  for (int64_t i = 0; i < options_.accumulate; ++i) {
    const Batch made = batch(step, i);
    const ArgumentCheck check("train");
    check.token_ids("inputs", made.inputs, 0, vocabulary_);
    check.token_ids("targets", made.targets, kIgnoredTarget, vocabulary_);
    copy(host.inputs[i], made.inputs);
    copy(host.targets[i], made.targets);
    if (weighted_) copy(host.token_weights[i], made.weights);
    next_.boundaries.push_back(made.boundaries);
    all += counted_targets(made.targets);
  }
  if (parallel_.sharded) {
    const std::vector<int64_t> counts = parallel_.ranks.all_gather(all);
    all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }
  next_.targets = all;
  for (int64_t i = 0; i < options_.accumulate; ++i)
    next_.weights.push_back(static_cast<float>(counted_targets(host.targets[i])) /
                            static_cast<float>(std::max<int64_t>(1, all)));
  std::ranges::copy(next_.weights, host.weights.data<float>());
  const AdamW adamw{learning_rate(step + 1), options_.weight_decay, options_.beta1, options_.beta2, options_.eps};
  const AdamWConstants constants = adamw_constants(adamw, step + 1);
  std::memcpy(host.constants.raw(), &constants, sizeof(constants));
  feed_->send();
}

double StepFeed::learning_rate(int64_t step) const {
  return rate_ ? *rate_ : furious::learning_rate(options_, step);
}

void StepFeed::advance(int64_t step) {
  prefetch(step);
  current_ = std::exchange(next_, {});
  feed_->arrive();
}

}  // namespace furious
