// What a model remembers of the texts it has read, as a safetensors file.
//
//   layers.N.state, .k, .v, .log_decay, .conv      the cache (MixerContents, ModelCache)
//   logits   f32 [sequences, vocabulary]           after the last token
//   history  i32 [sequences, kRepetitionWindow]    the last tokens; −1 before the first
//
// The metadata holds the version of the format, the model's configuration and fingerprint, the number of tokens, and a
// checksum of it all. Numbers there have a fixed width: the file of a state of constant size has a constant size.
#pragma once

#include <filesystem>
#include <string>

#include "model/language_model.h"

namespace furious {

class SafetensorsReader;

struct SavedState {
  ModelCache::Contents cache;
  Tensor logits;
  Tensor history;
};

// Equal for models of one configuration, the same weights and the same tokenizer.
std::string fingerprint(const LanguageModel& model, const std::string& tokenizer_fingerprint);

void save_state(const std::filesystem::path& file, const SavedState& state, const ModelConfig& config,
                const std::string& model_fingerprint);
// Refuses a file that is damaged or belongs to another model.
SavedState load_state(const std::filesystem::path& file, const ModelConfig& config,
                      const std::string& model_fingerprint);

bool is_state_file(const SafetensorsReader& reader);
std::vector<std::string> state_damage(const SafetensorsReader& reader);  // a line for each piece of it; reads all

}  // namespace furious
