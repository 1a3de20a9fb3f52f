// One model in training: weights, optimizer and place in the data, advanced step by step. Where it is kept and what is
// shown of it is run.cpp's business.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "data/batches.h"
#include "data/dataset.h"
#include "dist/shards.h"
#include "furious/train.h"
#include "model/cost.h"
#include "model/language_model.h"
#include "tensor/feed.h"
#include "tensor/graph.h"

namespace furious {

class SafetensorsReader;

// What a model is trained on and tested with.
struct TrainData {
  std::unique_ptr<Dataset> dataset;  // not there for a synthetic task
  std::unique_ptr<BatchSource> batches;
  std::unique_ptr<BatchSource> test;  // not there if nothing was held out
  int64_t test_batches = 0;           // that there are; 0: endless
  std::string fingerprint;            // of the data

  // `ranks`: that share a batch of the test part.
  static TrainData open(const TrainOptions& options, int ranks = 1);
};

// Who trains: this process alone, or one of several that each take some rows of every batch.
struct Team {
  Communicator& ranks = Communicator::alone();
  bool sharded = ranks.size() > 1;  // gradients and moments as several ranks have them (dist/shards.h)
  int64_t bucket = 0;               // of gradients; 0: what suits the device
};

// The loss is no number, or has left all bounds: training has failed.
class Diverged : public Error {
 public:
  using Error::Error;
};

// Does what all ranks do together. What only one of them fails with ends them all; what all fail with is thrown.
void together(Communicator& ranks, const std::function<void()>& work);

class Trainer {
 public:
  // Begins anew, or with options.init; on the data that the options name, or on other data. Talks to no other rank.
  explicit Trainer(const TrainOptions& options, const Team& team = {})
      : Trainer(options, TrainData::open(options, team.ranks.size()), team) {}
  Trainer(const TrainOptions& options, TrainData data, const Team& team = {});
  // Continues from a checkpoint that save() wrote, by as many ranks as may be.
  Trainer(const TrainOptions& options, const std::filesystem::path& checkpoint, const Team& team = {});

  // All ranks call step, test_loss and save together. What has diverged on one throws on all.
  TrainStep step();  // one step of the optimizer; without test loss and sample
  // Mean loss on the test part, per token; nothing if there is none.
  std::optional<double> test_loss() const;
  std::vector<double> value_rms() const;     // of the rows of the last step's batch that are computed first
  std::string sample(int64_t tokens) const;  // what the model writes now; empty without a tokenizer

  void save(const std::filesystem::path& directory) const;  // into an existing directory; rank 0 writes

  int64_t steps_done() const { return step_; }
  const LanguageModel& model() const { return *model_; }
  const TrainData& data() const { return data_; }
  TrainingMemory memory() const;  // what it needs, about
  // On a GPU a step is captured in a graph and launched as a whole, unless this is called: the same bits.
  void launch_one_by_one() { one_by_one_ = true; }

 private:
  struct Moments {
    Tensor first, second;
  };

  // What a step is given, in one piece of memory: here to be written, on the device to be worked on.
  struct Given {
    Given(const Tensor& memory, const TrainOptions& options);
    static int64_t size(const TrainOptions& options);

    std::vector<Tensor> inputs, targets;  // i32 [rows, length] of each part
    Tensor weights;                       // f32 [parts], of the losses of the parts
    Tensor numbers;                       // of the optimizer (adamw.h)
  };
  // What of it the host must know too.
  struct Fetched {
    int64_t step = -1;
    std::vector<float> weights;
    std::vector<Tensor> boundaries;
  };

  void prepare();
  void add_moments(const SafetensorsReader* file);
  int64_t rows() const { return own_.batch / own_.accumulate; }
  Batch batch_of(int64_t step, int64_t part) const;
  void fetch(int64_t step);
  void launch();
  void drop_graph();
  void forget_gradients();
  void compute();
  void compute_parts(const Given& given);
  Variable part_loss(Tape& tape, const Given& given, int64_t part) const;
  void check_finite(const Batch& batch) const;
  [[noreturn]] void loss_not_finite(const Batch& batch) const;
  void check_gradients() const;
  void check_divergence(const TrainStep& done) const;
  enum class Of { rank, all };
  [[noreturn]] void diverged(const std::string& what, Of whom = Of::rank) const;
  void agree(const std::string& failure) const;
  double add_losses(const Tensor& results);
  void add_times(TrainStep& done) const;

  Team team_;
  TrainOptions options_;  // resolved
  TrainOptions own_;      // with the part of the batch that is this rank's
  Device device_;
  TrainData data_;
  std::unique_ptr<LanguageModel> model_;
  std::vector<Moments> moments_;    // of all parameters; none where shards have them
  std::unique_ptr<Shards> shards_;  // outlives graph_, which works on it
  std::string failure_;             // of this rank in this step
  int64_t step_ = 0;

  Tensor given_;                // Given, on the device
  std::unique_ptr<Feed> feed_;  // to it
  Fetched next_, now_;          // on its way; in its place
  Tensor results_;              // f64 [1 + parts]: norm of the gradient, loss of each part
  bool one_by_one_ = false;
  bool warm_ = false;      // a step was made
  size_t step_bytes_ = 0;  // of memory that it took at most, beside what was there before
  std::optional<Graph> graph_;
  std::vector<Tensor> gradients_;  // of the last step; in the graph's memory, and gone before it
  double flops_ = 0;               // of a step
  double flops_rate_ = 0;          // of this machine
};

// The options that a checkpoint was trained with.
TrainOptions saved_options(const std::filesystem::path& checkpoint);

std::string checkpoint_name(int64_t step);  // "step-00000500"
bool is_checkpoint_name(const std::string& name);
// Files of a checkpoint that do not belong together, a line each. Reads no tensors; what cannot be read at all throws.
std::vector<std::string> checkpoint_disagreements(const std::filesystem::path& checkpoint);
// Everything that is wrong with a checkpoint, a line each. Reads all of it.
std::vector<std::string> checkpoint_damage(const std::filesystem::path& checkpoint);

}  // namespace furious
