// The options of training by name, as text: what flags, run.toml and checkpoints have in common.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "furious/train.h"
#include "model/config.h"

namespace furious {

struct TrainOption {
  enum class Kind : uint8_t { text, number, flag };
  std::string name;  // without dashes in front: "schedule-steps"
  std::string help;
  Kind kind = Kind::text;
  // What it decides: changing it when a run is resumed would make another run of it.
  bool fixed = false;
  std::function<std::string(const TrainOptions&)> get;
  std::function<void(TrainOptions&, const std::string&)> set;  // an Error says what is wrong with the text
};

const std::vector<TrainOption>& train_options();

// Sets one option; an unknown name is answered with the nearest.
void set_train_option(TrainOptions& options, const std::string& name, const std::string& text);

// "a=1,b=2" in its parts.
struct KeyValue {
  std::string key, value;
};
std::vector<KeyValue> key_values(const std::string& text);

std::string to_toml(const TrainOptions& options);
// The options in the text that to_toml wrote; an Error names a line that is not of that kind.
TrainOptions from_toml(const std::string& text);
std::map<std::string, std::string> to_texts(const TrainOptions& options);  // as UTF-8, whatever bytes paths have

// What the options must fulfil, each and together. Throws with the reason.
void check_train_options(const TrainOptions& options);
// That so many ranks can share a batch.
void check_division(const TrainOptions& options, int ranks);
// With the device and dtype that "auto" stands for here; each of several ranks on a machine has a GPU of its own.
// Throws if there is no such device.
TrainOptions resolved(TrainOptions options, const Communicator& ranks = Communicator::alone());
// What a choice of precision costs on a GPU, and what to choose instead, of resolved options; empty where it is a fast
// one.
std::string slow_precision(const TrainOptions& options);
// A rank that was started with another program, other options (but for those that say where it runs) or other things
// than the first would do something else: all throw, and it is named.
void check_same_everywhere(const TrainOptions& options, std::map<std::string, std::string> things, Communicator& ranks);
// The number of threads for a ThreadLimit: those asked for, or all cores; of a rank no more than its share.
int threads_for(const TrainOptions& options, const Communicator& ranks = Communicator::alone());
ModelConfig model_config(const TrainOptions& options, int64_t vocabulary);

// Linear growth over the warm-up, then a linear fall that would reach zero at schedule_steps. Steps count from 1.
double learning_rate(const TrainOptions& options, int64_t step);

}  // namespace furious
