// The inputs of training steps, copied to the device one step ahead.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "data/batches.h"
#include "tensor/feed.h"
#include "train/data_parallel.h"

namespace furious {

// The inputs of one step as views into one block of i32 memory: on the host to be written, on the device to be read.
struct StepInputs {
  // `weighted`: with weights of the tokens.
  StepInputs(const Tensor& memory, const TrainOptions& options, bool weighted);
  static int64_t elements(const TrainOptions& options, bool weighted);

  std::vector<Tensor> inputs, targets;  // i32 [rows, length] of each micro-batch
  std::vector<Tensor> token_weights;    // f32 [rows, length] of each micro-batch; undefined: all 1
  Tensor weights;                       // f32 [micro-batches]: each loss's share of the batch's mean
  Tensor constants;                     // of AdamW (ops/optim/adamw.h)
};

class StepFeed {
 public:
  // `source` and the communicator must outlive it. `options` are those of all ranks, resolved.
  // `weighted`: the batches have weights.
  StepFeed(const TrainOptions& options, const DataParallel& parallel, const BatchSource& source, int64_t vocabulary,
           Device device, bool weighted = false);

  // Copies the inputs of a step to the device, which may still be busy with the step before. Steps count from 0.
  void prefetch(int64_t step);
  // Makes the inputs of this step current, prefetching them if nobody has.
  void advance(int64_t step);

  // Of the steps that are prefetched from here on; none: that of the options.
  void set_learning_rate(std::optional<double> rate) { rate_ = rate; }
  double learning_rate(int64_t step) const;  // of a step 1, 2, …

  bool weighted() const { return weighted_; }

  // Of the current step.
  StepInputs inputs() const { return StepInputs(memory_, rank_options_, weighted_); }
  const std::vector<float>& weights() const { return current_.weights; }
  const std::vector<Tensor>& boundaries() const { return current_.boundaries; }
  int64_t targets() const { return current_.targets; }  // of all ranks

  // The rows of this rank in one micro-batch of any step, computed again on the host.
  Batch batch(int64_t step, int64_t micro_batch) const;

 private:
  struct HostInputs {  // what the host needs of a step
    int64_t step = -1;
    std::vector<float> weights;
    std::vector<Tensor> boundaries;
    int64_t targets = 0;
  };

  TrainOptions options_, rank_options_;
  DataParallel parallel_;
  const BatchSource& source_;
  int64_t vocabulary_;
  bool weighted_;
  std::optional<double> rate_;
  Tensor memory_;  // StepInputs on the device
  std::unique_ptr<Feed> feed_;
  HostInputs next_, current_;
};

}  // namespace furious
