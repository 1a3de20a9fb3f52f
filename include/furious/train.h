// Training of a language model of the 2Mamba family: the function behind `furious train`.
//
//   furious::TrainOptions options;
//   options.arch = "2mamba";  options.data = "shards/";  options.out = "run/";
//   furious::train(options);
//
// A run is a folder:
//
//   RUN/run.toml           all options; `furious train --config` reads it
//   RUN/log.jsonl          one line per step
//   RUN/step-00000500/     checkpoints: Hugging Face folders, with training.safetensors to resume from
//   RUN/latest             a link to the newest of them
//
// Every failure is a furious::Error with a message for the user. Exceptions of callbacks are passed on.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

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
  std::string data;                // a folder written by `furious tokenize`, or synthetic:recall, :passkey or :lookup
  std::string packing = "packed";  // packed, isolated or rows
  bool bos = false;                // with packing rows: every row begins with bos
  int64_t batch = 8, length = 512;
  int64_t accumulate = 1;  // micro-batches in a batch (gradient accumulation)
  uint64_t seed = 123;     // of the weights and of the order of the data

  // The optimizer: AdamW.
  int64_t steps = 1000;
  double lr = 1e-4;
  int64_t warmup = 100;        // steps of linear warm-up to lr
  int64_t schedule_steps = 0;  // step at which the linear decay reaches zero; 0: the last step
  double weight_decay = 0.01, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double clip = 0;  // clip the gradient to this norm; 0: no clipping

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
  double tokens_per_second = 0;
  double mfu = 0;  // FLOP/s of the model divided by the rate of a large matrix product on this device
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
// selects, with `resume` set. None if it has no checkpoint. A damaged checkpoint is an Error that names an older good
// one.
FURIOUS_API std::optional<TrainOptions> options_of_run(const std::string& folder, bool previous = false);

}  // namespace furious
