// The options of training by name, as text: shared by flags, run.toml and checkpoints.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "furious/train.h"
#include "model/language_model.h"

namespace furious {

struct TrainOption {
  enum class Kind : uint8_t { text, number, flag };
  std::string name;   // without dashes in front: "schedule-steps"
  std::string alias;  // another name for it; empty: none
  std::string help;
  Kind kind = Kind::text;
  // Cannot be changed when a run is resumed.
  bool fixed = false;
  std::function<std::string(const TrainOptions&)> get;
  std::function<void(TrainOptions&, const std::string&)> set;  // an invalid text is an Error
};

const std::vector<TrainOption>& train_options();

// Sets one option; an unknown name is answered with the nearest.
void set_train_option(TrainOptions& options, const std::string& name, const std::string& text);

// The pairs of "a=1,b=2".
struct KeyValue {
  std::string key, value;
};
std::vector<KeyValue> key_values(const std::string& text);

std::string to_toml(const TrainOptions& options);
// Parses the output of to_toml; an Error names an invalid line.
TrainOptions from_toml(const std::string& text);
std::map<std::string, std::string> to_texts(const TrainOptions& options);  // in UTF-8, whatever bytes a path has

// Throws if an option, or a combination of options, is invalid.
void check_train_options(const TrainOptions& options);
// Throws if the batch cannot be divided among so many ranks.
void check_division(const TrainOptions& options, int ranks);
// Replaces "auto" by a device and a dtype; each rank on a machine gets its own GPU. Throws if the device does not
// exist.
TrainOptions resolved(TrainOptions options, const Communicator& ranks = Communicator::alone());
// A warning about a slow precision on a GPU, and the one to use instead; empty for a fast one. For resolved options.
std::string slow_precision(const TrainOptions& options);
// A warning that the warm-up is longer than the run; empty if it is not.
std::string low_rate(const TrainOptions& options);
// Throws on all ranks if one was started with another program, other options (except for device, threads and path of
// the data) or other `things` than rank 0; the message names it.
void check_same_everywhere(const TrainOptions& options, std::map<std::string, std::string> things, Communicator& ranks);
// The number of threads for a ThreadLimit: that of the options, or all cores; at most the rank's share of them.
int threads_for(const TrainOptions& options, const Communicator& ranks = Communicator::alone());
ModelConfig model_config(const TrainOptions& options, int64_t vocabulary);
// The options that say what a model is; for a run with --init.
const std::vector<std::string>& model_option_names();
TrainOptions model_options(const ModelConfig& config);  // of a model like this one, as far as options can say it
// The precision and recomputation of resolved options.
Compute compute_options(const TrainOptions& options, Device device);

// The steps after which the learning rate begins to fall, and after which it has reached min_lr.
struct DecayRange {
  int64_t begin = 0, end = 0;
};
DecayRange decay_range(const TrainOptions& options);
// Whether the rates before the decay are the same for any number of steps: a run then goes on from there.
bool has_stable_phase(const TrainOptions& options);

// Of step 1, 2, …, with `done` = step − 1 steps before it:
//   warm-up    lr · step / warmup                                       done < warmup
//   then       min_lr + (lr − min_lr) · f(left)                         left = (end − done) / (end − begin), in [0, 1]
//   f          linear, wsd: left     cosine: (1 + cos(π (1 − left))) / 2     constant: 1
double learning_rate(const TrainOptions& options, int64_t step);

}  // namespace furious
