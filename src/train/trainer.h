// One model in training: weights, optimizer and place in the data, advanced step by step. Where it is kept and what is
// shown of it is run.cpp's business.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "data/batches.h"
#include "data/dataset.h"
#include "furious/train.h"
#include "model/cost.h"
#include "model/language_model.h"

namespace furious {

// What a model is trained on and tested with.
struct TrainData {
  std::unique_ptr<Dataset> dataset;  // not there for a synthetic task
  std::unique_ptr<BatchSource> batches;
  std::unique_ptr<BatchSource> test;  // not there if nothing was held out
  int64_t test_batches = 0;           // that there are; 0: endless
  std::string fingerprint;            // of the data

  static TrainData open(const TrainOptions& options);
};

// The loss is no number, or has left all bounds: training has failed.
class Diverged : public Error {
 public:
  using Error::Error;
};

class Trainer {
 public:
  // Begins anew, or with options.init; on the data that the options name, or on other data.
  explicit Trainer(const TrainOptions& options) : Trainer(options, TrainData::open(options)) {}
  Trainer(const TrainOptions& options, TrainData data);
  // Continues from a checkpoint that save() wrote.
  Trainer(const TrainOptions& options, const std::filesystem::path& checkpoint);

  TrainStep step();  // one step of the optimizer; without test loss and sample
  // Mean loss on the test part, per token; nothing if there is none.
  std::optional<double> test_loss() const;
  std::vector<double> value_rms() const;     // of the rows of the last step's batch that are computed first
  std::string sample(int64_t tokens) const;  // what the model writes now; empty without a tokenizer

  void save(const std::filesystem::path& directory) const;  // into an existing directory

  int64_t steps_done() const { return step_; }
  const LanguageModel& model() const { return *model_; }
  const TrainData& data() const { return data_; }
  TrainingMemory memory() const;  // what it needs, about

 private:
  struct Moments {
    Tensor first, second;
  };

  // A part of a batch, and its loss, on the device.
  struct Part {
    Batch batch;
    float weight = 0;
    Tensor loss;
  };

  void prepare();
  std::vector<Part> accumulate_gradients();
  Tensor part_loss(const Batch& batch, float weight);
  double total_loss(const std::vector<Part>& parts) const;
  void check_finite(const Batch& batch) const;
  void check_loss(double loss, const Batch& batch) const;
  void update(double gradient_scale, double lr);
  [[noreturn]] void diverged(const std::string& what) const;

  TrainOptions options_;  // resolved
  Device device_;
  TrainData data_;
  std::unique_ptr<LanguageModel> model_;
  std::vector<Moments> moments_;
  int64_t step_ = 0;
  double flops_ = 0;       // of a step
  double flops_rate_ = 0;  // of this machine
};

// The options that a checkpoint was trained with.
TrainOptions saved_options(const std::filesystem::path& checkpoint);

}  // namespace furious
