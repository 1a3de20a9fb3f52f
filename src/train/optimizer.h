// The optimizer of a model: AdamW over all parameters, or Muon over the matrices of the layers and AdamW over the rest.
// The moments are whole on this process, or sharded over ranks (dist/sharded_optimizer.h); both give the same bits for
// one rank.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dist/sharded_optimizer.h"
#include "model/language_model.h"
#include "ops/optim/muon.h"
#include "train/data_parallel.h"

namespace furious {

class SafetensorsReader;

class Optimizer {
 public:
  // Resolved options. Moments are zero.
  Optimizer(const LanguageModel& model, const DataParallel& parallel, const TrainOptions& options);

  bool sharded() const { return shards_ != nullptr; }

  // A step: begin_step(), backward passes, update(). Nothing in it waits for the device.
  void begin_step();
  void begin_last_backward();  // gradients that it completes are final: sharded ones are sent from here on
  void fail();                 // sharded: this rank has no gradients, and all ranks get NaN
  // Clips by the norm of the whole gradient, which it writes to `norm`, and updates parameters and moments. Where
  // memory runs out, nothing has been changed yet, if they are not sharded.
  void update(const Tensor& norm, const Tensor& constants);
  // Without an update: only the norm. Not sharded.
  void finish_gradients(const Tensor& norm, const Tensor& constants);
  void clear_gradients();
  StepTimes end_step() { return shards_->end_step(); }  // sharded

  const std::vector<Tensor>& gradients() const { return gradients_; }  // of the last step and this rank alone

  // The moments by name, for checkpoints. All ranks call state(); with shards only rank 0 receives them.
  std::map<std::string, Tensor> state() const;
  void load(const SafetensorsReader& file);

 private:
  // What the update of a parameter depends on.
  struct Group {
    bool decays = true;               // it has weight decay
    std::vector<int64_t> row_blocks;  // of Muon: the rows that are orthogonalized together; empty: AdamW
    bool is_muon() const { return !row_blocks.empty(); }
  };
  struct Moments {
    Tensor first, second;  // Muon has one
  };
  Group group_of(const std::string& name) const;
  bool splits_decay() const { return options_.decay_on != "all"; }
  void collect_gradients();
  void update_group(bool decays, const Tensor& constants);
  void update_muon_shards(const Tensor& constants);

  const LanguageModel& model_;
  TrainOptions options_;
  std::vector<Group> groups_;     // of all parameters
  std::vector<Moments> moments_;  // of all parameters; empty with shards
  std::unique_ptr<ShardedOptimizer> shards_;
  std::vector<Tensor> gradients_;
};

// Bytes of the states of the optimizer, not sharded, and of what an update needs beside them.
struct OptimizerMemory {
  int64_t states = 0, scratch = 0;
};
OptimizerMemory optimizer_memory(const TrainOptions& options, const ModelConfig& config);

}  // namespace furious
