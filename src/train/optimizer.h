// AdamW over the parameters of a model. The moments are whole on this process, or sharded over ranks
// (dist/sharded_optimizer.h); both give the same bits for one rank.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dist/sharded_optimizer.h"
#include "model/language_model.h"
#include "train/data_parallel.h"

namespace furious {

class SafetensorsReader;

class Optimizer {
 public:
  // `reduce`: the dtype in which sharded gradients are sent. Moments are zero.
  Optimizer(const LanguageModel& model, const DataParallel& parallel, DType reduce);

  bool sharded() const { return shards_ != nullptr; }

  // A step: begin_step(), backward passes, update(). Nothing in it waits for the device.
  void begin_step();
  void begin_last_backward();  // gradients that it completes are final: sharded ones are sent from here on
  void fail();                 // sharded: this rank has no gradients, and all ranks get NaN
  // Clips by the norm of the whole gradient, which it writes to `norm`, and updates parameters and moments.
  void update(const Tensor& norm, const Tensor& constants, double clip);
  // Without an update: only the norm. Not sharded.
  void finish_gradients(const Tensor& norm, const Tensor& constants);
  void clear_gradients();
  StepTimes end_step() { return shards_->end_step(); }  // sharded

  const std::vector<Tensor>& gradients() const { return gradients_; }  // of the last step and this rank alone

  // The moments by name, for checkpoints. All ranks call state(); with shards only rank 0 receives them.
  std::map<std::string, Tensor> state() const;
  void load(const SafetensorsReader& file);

 private:
  void collect_gradients();

  struct Moments {
    Tensor first, second;
  };
  const LanguageModel& model_;
  std::vector<Moments> moments_;  // of all parameters; empty with shards
  std::unique_ptr<ShardedOptimizer> shards_;
  std::vector<Tensor> gradients_;
};

}  // namespace furious
