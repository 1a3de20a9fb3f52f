// One model in training: weights, optimizer and position in the data, advanced step by step. run.cpp adds the folder,
// the log and the checkpoints around it.
//
//   train_data.h           training and test batches
//   memory_plan.h          the estimate of memory that is checked before anything is allocated
//   step_feed.h            inputs of a step, copied to the device one step ahead
//   optimizer.h            AdamW and its moments, whole or sharded over ranks
//   divergence.h           losses and gradients that are not finite
//   training_checkpoint.h  what is saved
#pragma once

#include <filesystem>
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

namespace furious {

class Trainer {
 public:
  // Starts from new weights or options.init, on the data that the options name or on other data. Does not communicate.
  explicit Trainer(const TrainOptions& options, const DataParallel& parallel = {})
      : Trainer(options, TrainData::open(options, parallel.ranks.size()), parallel) {}
  Trainer(const TrainOptions& options, TrainData data, const DataParallel& parallel = {});
  // A model of another configuration than the one that the options describe.
  Trainer(const TrainOptions& options, const ModelConfig& config, TrainData&& data, const DataParallel& parallel = {});
  // Resumes from a checkpoint that save() wrote, with any number of ranks.
  Trainer(const TrainOptions& options, const std::filesystem::path& checkpoint, const DataParallel& parallel = {});
  ~Trainer();

  // All ranks call step, test_loss and save together. Divergence on one rank throws on all.
  // One step of the optimizer; without test loss and sample. With a profiler its operations are timed, and on a GPU
  // launched one by one.
  TrainStep step(Profiler* profiler = nullptr);
  // Mean loss per token on the test split; none without one.
  std::optional<double> test_loss() const;
  std::vector<double> value_rms() const;     // of the first micro-batch of the last step
  std::string sample(int64_t tokens) const;  // text that the model generates now; empty without a tokenizer

  void save(const std::filesystem::path& directory) const;  // into an existing directory; rank 0 writes

  int64_t steps_done() const { return step_; }
  const LanguageModel& model() const { return *model_; }
  const TrainData& data() const { return data_; }
  TrainingMemory memory() const;  // the estimate for one rank
  // On a GPU a step is captured in a graph. After this call kernels are launched one by one, with the same bits.
  void disable_graph() { graph_disabled_ = true; }

 private:
  void prepare();
  void run_step(Profiler* profiler);
  void drop_graph();
  void compute(Profiler* profiler);
  void compute_gradients(const StepInputs& inputs, Profiler* profiler);
  Variable micro_batch_loss(Tape& tape, const StepInputs& inputs, int64_t micro_batch) const;
  double batch_loss(const Tensor& results);
  void add_times(TrainStep& done);

  DataParallel parallel_;
  TrainOptions options_;       // resolved
  TrainOptions rank_options_;  // with the rows of this rank as batch
  Device device_;
  TrainData data_;
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<StepFeed> feed_;
  std::unique_ptr<DivergenceCheck> divergence_;
  std::string failure_;  // of this rank in this step
  int64_t step_ = 0;

  Tensor results_;  // f64 [1 + micro-batches]: norm of the gradient, loss of each micro-batch
  bool graph_disabled_ = false;
  bool warmed_up_ = false;  // a step has run without a graph
  size_t step_bytes_ = 0;   // peak memory of that step beyond what was allocated before it
  std::optional<Graph> graph_;
  double flops_ = 0;       // of a step
  double flops_rate_ = 0;  // that a large matrix product reaches here
};

}  // namespace furious
