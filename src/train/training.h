// One model in training: weights, optimizer and position in the data, advanced step by step. run.cpp adds the folder,
// the log and the checkpoints of a run around it; trainer.cpp is furious::Trainer, with batches of the caller.
//
//   train_data.h           training and test batches
//   memory_plan.h          the estimate of memory that is checked before anything is allocated
//   given_batches.h        batches of a caller
//   step_feed.h            inputs of a step, copied to the device one step ahead
//   optimizer.h            AdamW or Muon and their moments, whole or sharded over ranks
//   weight_average.h       the exponential moving average of the weights
//   divergence.h           losses and gradients that are not finite
//   training_checkpoint.h  what is saved
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "furious/train.h"
#include "model/language_model.h"
#include "tensor/graph.h"
#include "train/data_parallel.h"
#include "train/divergence.h"
#include "train/memory_plan.h"
#include "train/optimizer.h"
#include "train/step_feed.h"
#include "train/train_data.h"
#include "train/weight_average.h"

namespace furious {

// The model that the options train on this data: of options.init, which must know its token ids, or a new one.
ModelConfig config_of(const TrainOptions& options, const TrainData& data);

class Training {
 public:
  // Starts from new weights or options.init, on the data that the options name or on other data. Does not communicate.
  explicit Training(const TrainOptions& options, const DataParallel& parallel = {})
      : Training(options, TrainData::open(options, parallel.ranks.size()), parallel) {}
  // `cancel`: as TrainObserver::cancel.
  using Cancel = std::function<bool()>;
  Training(const TrainOptions& options, TrainData data, const DataParallel& parallel = {}, const Cancel& cancel = {});
  // A model of another configuration than the one that the options describe.
  Training(const TrainOptions& options, const ModelConfig& config, TrainData&& data, const DataParallel& parallel = {},
           const Cancel& cancel = {});
  // Resumes from a checkpoint that save() wrote, with any number of ranks.
  Training(const TrainOptions& options, const std::filesystem::path& checkpoint, const DataParallel& parallel = {})
      : Training(options, checkpoint, TrainData::open(options, parallel.ranks.size()), parallel) {}
  Training(const TrainOptions& options, const std::filesystem::path& checkpoint, TrainData data,
           const DataParallel& parallel = {}, const Cancel& cancel = {});
  ~Training();

  // All ranks call step, test_loss and save together. Divergence on one rank throws on all. A step whose loss exploded
  // has updated the weights and counts; one that is not finite does not.
  // One step of the optimizer; without test loss and sample. With a profiler its operations are timed, and on a GPU
  // launched one by one.
  TrainStep step(Profiler* profiler = nullptr);
  // The same without the update, in one process: loss, gradients and their norm.
  TrainStep backward();
  double loss(const Batch& batch) const;  // of one pass, without gradients

  // The sizes of the batches from here on, where they are given one by one (train/given_batches.h).
  void set_sizes(int64_t rows, int64_t length, bool weighted);
  void set_learning_rate(std::optional<double> rate);  // overrides the schedule; none: the schedule again

  // Mean loss per token on the test split; none without one.
  std::optional<double> test_loss() const;
  std::vector<double> value_rms() const;     // of the first micro-batch of the last step
  std::string sample(int64_t tokens) const;  // text that the model generates now; empty without a tokenizer

  void save(const std::filesystem::path& directory) const;  // into an existing directory; rank 0 writes

  int64_t steps_done() const { return step_; }
  double flops() const { return flops_ * parallel_.ranks.size(); }  // of forward and backward of a step
  const LanguageModel& model() const { return *model_; }
  const TrainOptions& options() const { return options_; }
  const std::vector<Tensor>& gradients() const { return optimizer_->gradients(); }  // of the last step, not clipped
  const TrainData& data() const { return data_; }
  TrainingMemory memory() const;  // the estimate for one rank
  // On a GPU a step is captured in a graph. After this call kernels are launched one by one, with the same bits.
  void disable_graph() { graph_disabled_ = true; }

 private:
  void make_optimizer();
  void prepare();
  void make_feed(const TrainOptions& sizes, bool weighted);
  void check_cancel() const;
  TrainStep outcome();
  void check_divergence(const TrainStep& done, int64_t step) const;
  void run_step(Profiler* profiler);
  void drop_graph();
  void compute(Profiler* profiler);
  void compute_gradients(const StepInputs& inputs, Profiler* profiler);
  Variable micro_batch_loss(Tape& tape, const StepInputs& inputs, int64_t micro_batch) const;
  double batch_loss(const Tensor& results);
  void add_times(TrainStep& done);

  DataParallel parallel_;
  TrainOptions options_;       // resolved
  TrainOptions step_options_;  // with the sizes of the current batches
  TrainOptions rank_options_;  // of these the rows of this rank as batch
  Device device_;
  TrainData data_;
  Cancel cancel_;
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<WeightAverage> average_;  // with options.ema
  std::unique_ptr<StepFeed> feed_;
  std::unique_ptr<DivergenceCheck> divergence_;
  std::optional<double> rate_;
  std::string failure_;  // of this rank in this step
  int64_t step_ = 0;

  Tensor results_;  // f64 [1 + micro-batches]: norm of the gradient, loss of each micro-batch
  bool graph_disabled_ = false;
  bool warmed_up_ = false;  // a step has run without a graph
  size_t step_bytes_ = 0;   // peak memory of that step beyond what was allocated before it
  std::optional<Graph> graph_;
  size_t memory_ = 0;      // peak memory of the last step
  double flops_ = 0;       // of a step, on this rank
  double flops_rate_ = 0;  // that a large matrix product reaches here
};

}  // namespace furious
