// Training of a language model of the 2Mamba family.
//
// A run, as `furious train` does it:
//
//   furious::TrainOptions options;
//   options.arch = "2mamba";  options.data = "shards/";  options.out = "run/";
//   furious::train(options);
//
// A loop of your own, with batches of your own:
//
//   furious::Trainer trainer(options, {.vocabulary = 258});
//   for (…) std::cout << trainer.step({rows, length, ids}).loss << '\n';
//   trainer.save("checkpoint");
//
// A run is a folder:
//
//   RUN/run.toml           all options; `furious train --config` reads it
//   RUN/log.jsonl          one line per step; with TrainOptions::log also log.csv and event files of TensorBoard
//   RUN/step-00000500/     checkpoints: Hugging Face folders, with training.safetensors to resume from
//   RUN/latest             a link to the newest of them
//   RUN/latest/ema/        with TrainOptions::ema: a model with the average of the weights
//
// Exceptions: every failure is a furious::Error with a message for the user. Exceptions of callbacks are passed on.
// A callback must not call the object that calls it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "furious/array.h"
#include "furious/error.h"
#include "furious/export.h"

namespace furious {

struct TrainOptions {
  // The model.
  std::string arch = "2mamba";  // `furious presets` lists them
  std::string size = "tiny";    // tiny, mini, small or medium; dimensions below that are not 0 override it
  int64_t hidden = 0, intermediate = 0, heads = 0, layers = 0;
  int64_t qk_heads = 0;  // heads of Q and K, shared by the heads of V; 0: no sharing
  int64_t qk_dim = 0;    // dimension of Q and K in a head, which determines the size of the state; 0: that of V
  bool tie_embeddings = false;
  std::string switches;  // of the token-mixing block, to change: conv_window=3,norm=none (names of config.json)
  std::string init;      // start from the weights of this model
  // Initialization of new weights. furious: normal(0, 0.02), the convolution's bias zero; pytorch: layers as in the
  // authors' modules, nn.Linear (uniform ±1/√fan_in) and nn.Conv1d; identity: as furious, but the convolution starts as
  // the identity.
  std::string initialization = "furious";

  // The data.
  // A folder written by `furious tokenize`, several as a:0.7,b:0.3 (folders and their shares of the rows; without
  // shares, in proportion to their sizes), or synthetic:recall, :passkey or :lookup.
  std::string data;
  std::string packing = "packed";  // packed, isolated or rows
  bool bos = false;                // with packing rows: every row begins with bos
  int64_t batch = 8, length = 512;
  int64_t accumulate = 1;  // micro-batches in a batch (gradient accumulation)
  uint64_t seed = 123;     // of the weights and of the order of the data
  // The order of rows is shuffled within so many that follow one another in the data; 0: within all of it.
  int64_t shuffle_window = 0;

  // The learning rate: linear warm-up to lr, then by the schedule: constant, linear, cosine or wsd (warm-up, stable,
  // decay: constant, and linear at the end).
  int64_t steps = 1000;
  double lr = 1e-4;
  int64_t warmup = 100;  // steps of linear warm-up to lr
  std::string schedule = "linear";
  int64_t schedule_steps = 0;  // step at which the decay ends; 0: the last step
  int64_t decay_steps = 0;     // of the decay, before its end; 0: all after the warm-up, with wsd a fifth of all steps
  double min_lr = 0;           // with which the decay ends

  // The optimizer: adamw, or muon: Muon for the matrices of the layers and AdamW for the rest.
  std::string optimizer = "adamw";
  double weight_decay = 0.01, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  std::string decay_on = "all";  // parameters with weight decay: all, matrices, or layers (matrices of the layers)
  double muon_momentum = 0.95;
  double clip = 1;    // clip the gradient to this norm; 0: no clipping
  double z_loss = 0;  // factor of the squared log-sum-exp of the logits, added to the loss in training
  double ema = 0;     // decay of an exponential moving average of the weights; 0: none

  // Device and precision.
  std::string device = "auto";  // cpu, cuda, cuda:1, …; auto: a GPU if there is one
  // Dtype of matrix products, on a GPU also of activations: f32 or bf16; auto: bf16 on a GPU. tf32, on a GPU: f32 with
  // products in TF32.
  std::string dtype = "auto";
  // Precision of the products inside the mixer, on a GPU: bf16, tf32, tf32x3 or f32; auto: that of the activations.
  std::string mixer_precision = "auto";
  int64_t threads = 0;     // CPU threads; 0: all cores that the program may use, or a rank's share of them
  bool recompute = false;  // activation checkpointing: store only the inputs of layers; a third more computation

  // Data-parallel training with processes started by mpirun or srun.
  std::string reduce = "f32";  // dtype in which gradients are sent: f32 or bf16
  double timeout = 600;        // seconds after which a process that does not answer counts as lost

  // The run.
  std::string out;
  bool resume = false;  // from the newest checkpoint in `out`, if there is one, with the same bits as an uninterrupted
                        // run
  bool resume_previous = false;  // with `resume`: from the newest undamaged checkpoint older than the newest, which is
                                 // renamed
  int64_t eval_every = 100, eval_batches = 32;     // steps between test losses; batches of one, 0: all
  int64_t save_every = 500, keep = 2;              // steps between checkpoints; how many are kept
  int64_t sample_every = 500, sample_tokens = 48;  // steps between samples of text; 0: none
  bool log_values = false;                         // log the RMS of values with every test loss
  std::string log;  // copies of the log for other programs: csv, tensorboard, or both with a comma
};

// Computation time of the processes in a step, without waiting.
struct RankTimes {
  int64_t ranks = 1;
  int64_t slowest = 0, fastest = 0;  // which
  double slowest_seconds = 0, fastest_seconds = 0;
  double waiting_seconds = 0;  // of rank 0, for sums and parameters
};

struct TrainStep {
  int64_t step = 0;  // 1, 2, …
  double loss = 0, lr = 0, gradient_norm = 0;
  int64_t tokens = 0;  // targets of the batch
  double tokens_per_second = 0;
  double mfu = 0;      // FLOP/s of the model divided by the rate of a large matrix product on this device
  int64_t memory = 0;  // largest memory of tensors in the step, in bytes, on the device of this process
  // Of a run, since its start and over interruptions; 0 in the steps of a Trainer.
  double seconds = 0;        // wall-clock time of steps, test losses, samples and checkpoints
  double time = 0;           // of day at which the step was done, in seconds since 1970
  int64_t total_tokens = 0;  // rows × length of all steps, padding included
  double total_flops = 0;    // of forward and backward passes, without recomputation
  std::optional<double> test_loss;
  std::string sample;  // text, where one was made
  // For each layer, the RMS of the values that enter its mixer (after discretization); with log_values.
  std::vector<double> value_rms;
  std::optional<RankTimes> ranks;  // with several processes
};

struct TrainObserver {
  std::function<void(const std::string&)> message;  // lines about the run
  std::function<void(const TrainStep&)> step;
  std::function<bool()> stop;  // called after each step; true: save and return
  // Called in a single process while the model is made, before each parameter, and between micro-batches; true: end
  // now. furious::Cancelled is thrown, and the steps since the newest checkpoint are lost.
  std::function<bool()> cancel;
  // Called by the thread that trains, and on all ranks, before the first step, with its number; not if all are done.
  // From here on `stop` is answered after a step.
  std::function<void(int64_t step)> begin;
};

// Work that was ended by a callback.
class FURIOUS_API Cancelled : public Error {
 public:
  using Error::Error;
};

struct TrainResult {
  int64_t steps = 0;  // done since the start of the run
  bool stopped = false;
  TrainStep last;
  std::string checkpoint;  // the newest
};

// Several threads may train a model each on the CPU; on a GPU one at a time. Threads and signals: see furious/model.h.
//
// Processes that mpirun or srun has started together all call it with the same options. Only the observer of rank 0 is
// called for steps and messages.
FURIOUS_API TrainResult train(const TrainOptions& options, const TrainObserver& observer = {});

// The options to resume the run in a folder: those of its newest checkpoint, or of the one that `resume_previous`
// selects, with `resume` set; of a run that was ended before its first checkpoint those of its run.toml. None if it has
// neither. A damaged checkpoint is an Error that names an older good one.
FURIOUS_API std::optional<TrainOptions> options_of_run(const std::string& folder, bool previous = false);

// Rows of token ids, and what is to be predicted.
struct TokenBatch {
  int64_t rows = 0, length = 0;
  std::vector<int32_t> ids;  // [rows, length]
  // [rows, length], −1: none. Empty: after each token the next one of its row and document; the last has none.
  std::vector<int32_t> targets = {};
  // [rows, length]: factors of the losses. The loss is the mean of weight · cross-entropy over the targets that are not
  // −1. Empty: 1. They may be 0 or negative.
  std::vector<float> weights = {};
  // Positions in ids at which a document starts, in increasing order: nothing passes from one to the next. Rows always
  // start one. Empty: each row is one document.
  std::vector<int64_t> documents = {};
};

struct TrainerSetup {
  int64_t vocabulary = 0;  // number of token ids; 0: that of the tokenizer, of TrainOptions::data or of ::init
  // Saved with checkpoints, so that Model::load finds it: "byte", a SentencePiece model, a tokenizer.json or a folder
  // with one of them; empty: that of TrainOptions::data or ::init, if there is one.
  std::string tokenizer = {};
  std::function<bool()> cancel = {};  // as TrainObserver::cancel
};

// A model in training, step by step, on one device in one process. The options are those of a run; of them `batch` and
// `length` are the largest batch that is expected (the estimate of memory uses them), `accumulate` divides the rows of
// every batch into micro-batches, and `out` and what follows it are not used. Same options, same batches, same device:
// same bits as in a run.
//
// Threads: a Trainer is used by one thread at a time; several may train a model each on the CPU. A Trainer that was
// moved from answers every call with an Error.
class FURIOUS_API Trainer {
 public:
  // New weights, or those of options.init.
  explicit Trainer(const TrainOptions& options, const TrainerSetup& setup = {});
  // Goes on from a checkpoint that save() or a run has written (of a run: the newest), with the same bits as if it had
  // not been interrupted. Without options: those of the checkpoint.
  static Trainer resume(const std::string& checkpoint, const std::optional<TrainOptions>& options = {},
                        const TrainerSetup& setup = {});
  ~Trainer();
  Trainer(Trainer&&) noexcept;
  Trainer& operator=(Trainer&&) noexcept;

  // One step of the optimizer. Batches may have different sizes; each new size allocates memory. A loss or gradient
  // that is not finite is an Error, and so is a loss far above that of a uniform prediction if the batch has no
  // weights. In the first case parameters are unchanged; in the second they have been updated, and the step counts.
  // After an Error for memory, or Cancelled, nothing has changed, and the step can be repeated.
  TrainStep step(const TokenBatch& batch);
  // The same without the update: the loss, its gradients and their norm.
  TrainStep backward(const TokenBatch& batch);
  double evaluate(const TokenBatch& batch) const;  // the loss alone

  // The batch with which a run on options.data would do a step, 1, 2, …; an Error without data.
  TokenBatch data_batch(int64_t step) const;
  std::optional<double> test_loss() const;  // mean over the test split of the data; none without one

  // Overrides the schedule of the options, which ends with a rate of 0 after `steps`, from the next step on; none: the
  // schedule again. Not saved.
  void set_learning_rate(std::optional<double> rate);

  // Copies by name, as in the checkpoint. Gradients are those of the last step() or backward(), before clipping.
  std::vector<std::string> parameter_names() const;
  NamedArray parameter(const std::string& name) const;
  void set_parameter(const std::string& name, const std::vector<float>& values);
  NamedArray gradient(const std::string& name) const;

  void save(const std::string& directory) const;  // replaced as a whole if it exists

  int64_t steps_done() const;
  int64_t vocabulary() const;
  TrainOptions options() const;  // with device and dtype as chosen

 private:
  struct Memory;
  explicit Trainer(std::unique_ptr<Memory> memory);
  Memory& own() const;  // an Error where the trainer was moved from
  std::unique_ptr<Memory> memory_;
};

}  // namespace furious
