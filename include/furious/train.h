// Training a language model of the 2Mamba family, start to end: what `furious train` does.
//
//   furious::TrainOptions options;
//   options.arch = "2mamba";  options.data = "shards/";  options.out = "run/";
//   furious::train(options);
//
// A run is a folder:
//
//   RUN/run.toml           the options, all of them; `furious train --config` takes it
//   RUN/log.jsonl          one line per step
//   RUN/step-00000500/     checkpoints: Hugging Face folders, with training.safetensors for going on
//   RUN/latest             a link to the newest of them
//
// Whatever goes wrong is thrown as furious::Error, with words for the user. What a callback throws comes out as it is.
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
  std::string size = "tiny";    // tiny, mini, small or medium; the dimensions below, where not 0, replace its own
  int64_t hidden = 0, intermediate = 0, heads = 0, layers = 0;
  int64_t qk_heads = 0;  // heads of Q and K that the others share; 0: as many as there are
  int64_t qk_dim = 0;    // dimension of Q and K in a head, which decides the size of the state; 0: that of V
  bool tie_embeddings = false;
  std::string switches;  // of the token-mixing block, where not the arch's: conv_window=3,norm=none (as config.json)
  std::string init;      // begin with the weights of this model instead of new ones
  // How new weights are drawn. furious: normal(0, 0.02), the convolution's bias zero; pytorch: inside the layers as the
  // authors' modules start, linear layers uniform ±1/√fan_in and convolutions as nn.Conv1d; identity: as furious, but
  // the convolution starts by passing the current token on.
  std::string initialization = "furious";

  // The data.
  std::string data;                // a folder of `furious tokenize`, or synthetic:recall, :passkey or :lookup
  std::string packing = "packed";  // packed, isolated or rows
  bool bos = false;                // with rows: each begins with bos
  int64_t batch = 8, length = 512;
  int64_t accumulate = 1;  // parts that a batch is computed in, one after the other
  uint64_t seed = 123;     // of the weights and of the order of the data

  // The optimizer: AdamW.
  int64_t steps = 1000;
  double lr = 1e-4;
  int64_t warmup = 100;        // steps of linear growth to lr
  int64_t schedule_steps = 0;  // where the linear fall after it reaches zero; 0: at the last step
  double weight_decay = 0.01, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double clip = 0;  // the largest norm of the gradient; 0: any

  // How it is computed.
  std::string device = "auto";  // cpu, cuda, cuda:1, …; auto: a GPU if there is one
  // f32 or bf16, of matrix products and on a GPU of activations; auto: bf16 on a GPU. tf32, on a GPU: f32 with products
  // in TF32.
  std::string dtype = "auto";
  // Of the products inside the mixer, on a GPU: bf16, tf32, tf32x3 or f32; auto: as the activations.
  std::string mixer_precision = "auto";
  int64_t threads = 0;     // of a CPU; 0: all cores that the program may use, or a rank's share of them
  bool recompute = false;  // keep only the inputs of layers: less memory, a third more work

  // With several processes, started by mpirun or srun: a batch is shared by all of them.
  std::string reduce = "f32";  // what gradients are sent in: f32 or bf16
  double timeout = 600;        // seconds after which a process that does not answer counts as lost

  // The run.
  std::string out;
  bool resume = false;  // go on from the newest checkpoint in `out`, if there is one, with the bits of a run that never
                        // stopped
  bool resume_previous = false;  // with `resume`: from the newest undamaged checkpoint before the newest, which is kept
                                 // under another name
  int64_t eval_every = 100, eval_batches = 32;     // steps between test losses; batches of one, 0: all
  int64_t save_every = 500, keep = 2;              // steps between checkpoints; how many stay
  int64_t sample_every = 500, sample_tokens = 48;  // steps between samples of text; 0: none
  bool log_values = false;                         // how large values are, with every test loss
};

// How long the processes of a step worked, waiting not counted.
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
  double mfu = 0;  // flops of the model per second, as a part of what a large matrix product reaches here
  std::optional<double> test_loss;
  std::string sample;  // text, where one was made
  // For each layer, √ of the mean square of the values that enter its mixer (after discretization); where asked for.
  std::vector<double> value_rms;
  std::optional<RankTimes> ranks;  // with several processes
};

struct TrainObserver {
  std::function<void(const std::string&)> message;  // what is about to happen, in a few lines
  std::function<void(const TrainStep&)> step;
  std::function<bool()> stop;  // asked after each step; true: save and return
};

struct TrainResult {
  int64_t steps = 0;  // done, by all parts of the run together
  bool stopped = false;
  TrainStep last;
  std::string checkpoint;  // the newest
};

// Several threads may each train a model of their own on the CPU; on a GPU one at a time. Threads and signals: as
// furious/model.h says.
//
// In each of the processes that mpirun or srun has started together; they must be given the same options. The observer
// hears of steps and messages in the first of them only.
FURIOUS_API TrainResult train(const TrainOptions& options, const TrainObserver& observer = {});

// The options that go on with the run in a folder: those of its newest checkpoint, or of the one that `resume_previous`
// takes, with `resume`. Nothing if it has no checkpoint. A damaged checkpoint is an Error that names an older good one.
FURIOUS_API std::optional<TrainOptions> options_of_run(const std::string& folder, bool previous = false);

}  // namespace furious
