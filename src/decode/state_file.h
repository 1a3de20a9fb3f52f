// What a model remembers of the texts it has read, as a safetensors file.
//
//   S.layers.N.state, .k, .v, .log_decay, .conv    of sequence S: what its slot holds (SlotContents)
//   S.logits   f32 [vocabulary]                    after the last token
//   S.history  i32 [kRepetitionWindow]             the last tokens; −1 before the first
//
// The metadata holds the version of the format, the model's configuration and fingerprint, the number of tokens of each
// sequence, and a checksum of it all. Numbers there have a fixed width: the file of a state of constant size has a
// constant size.
#pragma once

#include <filesystem>
#include <string>

#include "decode/decoder.h"

namespace furious {

class SafetensorsReader;

// Equal for models of one configuration, the same weights and the same tokenizer.
std::string fingerprint(const LanguageModel& model, const std::string& tokenizer_fingerprint);

void save_state(const std::filesystem::path& file, const std::vector<SlotContents>& sequences,
                const ModelConfig& config, const std::string& model_fingerprint);
// Refuses a file that is damaged or belongs to another model.
std::vector<SlotContents> load_state(const std::filesystem::path& file, const ModelConfig& config,
                                     const std::string& model_fingerprint);

bool is_state_file(const SafetensorsReader& reader);
std::vector<std::string> state_damage(const SafetensorsReader& reader);  // a line for each piece of it; reads all

}  // namespace furious
