// Checkpoints of training: a model directory (model/checkpoint.h) with training.safetensors beside the weights, which
// holds the optimizer's moments, the average of the weights, the step, the options and the fingerprint of the data. The
// folder ema in it is a model directory with the average of the weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "furious/train.h"
#include "model/language_model.h"
#include "model/safetensors.h"
#include "train/train_data.h"

namespace furious {

// The metadata of training.safetensors.
struct TrainingState {
  int64_t step = 0;
  std::string data;   // its fingerprint
  std::string model;  // checksum of model.safetensors; empty in checkpoints without one
  std::map<std::string, std::string> options;
};

SafetensorsReader open_training_file(const std::filesystem::path& checkpoint);
TrainingState training_state(const SafetensorsReader& file);
TrainOptions saved_options(const std::filesystem::path& checkpoint);

// Writes all files of a checkpoint into an existing directory. The position in the data is the step: batches are a pure
// function of it.
void write_checkpoint(const std::filesystem::path& directory, const LanguageModel& model,
                      const std::map<std::string, Tensor>& states, int64_t step, const TrainData& data,
                      const TrainOptions& options);
inline constexpr const char* kAverageFolder = "ema";
// Writes that folder of a checkpoint.
void write_average(const std::filesystem::path& directory, const LanguageModel& average, const TrainData& data);

std::string checkpoint_name(int64_t step);  // "step-00000500"
bool is_checkpoint_name(const std::string& name);
int64_t step_of_checkpoint(const std::filesystem::path& checkpoint);  // by its name, which must be one

// Files of a checkpoint that were not saved together, a line each. Reads no tensors; throws if a file is unreadable.
std::vector<std::string> checkpoint_mismatches(const std::filesystem::path& checkpoint);
// All damage in a checkpoint, a line each. Reads all of it.
std::vector<std::string> checkpoint_damage(const std::filesystem::path& checkpoint);

}  // namespace furious
