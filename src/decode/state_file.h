// State files: the state of a session's sequences as a safetensors file, on disk or in memory.
//
//   S.layers.N.state, .k, .v, .log_decay, .conv    contents of the slot of sequence S (SlotContents)
//   S.logits   f32 [vocabulary]                    after the last token
//   S.history  i32 [kRepetitionWindow]             the last tokens; −1 before the first
//   S.ids      i32 [tokens]                        all that was read, where it is known
//   S.text     i32 [⌈bytes / 4⌉]                   a name for that, four bytes to a number; its length is in the
//   metadata
//
// The metadata contains the version of the format, the model's configuration and fingerprint, the number of tokens of
// each sequence and how they were read, where that is known, and a checksum of everything. Its numbers have a fixed
// width, so that files of states of equal size have equal size.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decode/decoder.h"

namespace furious {

class SafetensorsReader;

// Equal for models with equal configuration, weights and tokenizer.
std::string fingerprint(const LanguageModel& model, const std::string& tokenizer_fingerprint);

// What a sequence has read, where it is known: its ids, bytes of the caller that identify it, and a number for how.
struct ReadTokens {
  std::vector<int32_t> ids;
  std::string text;
  uint64_t passes = 0;  // a number of the caller for how they were read; 0: not known
};
// Of the first sequence, without reading anything else of the file; nothing where the file does not tell. An Error if
// the file is damaged as far as it was read.
std::optional<ReadTokens> read_tokens(const SafetensorsReader& reader);

// `read`: of each sequence, or empty.
void save_state(const std::filesystem::path& file, const std::vector<SlotContents>& sequences,
                const ModelConfig& config, const std::string& model_fingerprint,
                const std::vector<ReadTokens>& read = {});
// An Error if the file is damaged or belongs to another model.
std::vector<SlotContents> load_state(const std::filesystem::path& file, const ModelConfig& config,
                                     const std::string& model_fingerprint);

// The same in memory.
std::vector<std::byte> state_bytes(const std::vector<SlotContents>& sequences, const ModelConfig& config,
                                   const std::string& model_fingerprint, const std::vector<ReadTokens>& read = {});
std::vector<SlotContents> load_state(std::span<const std::byte> bytes, const ModelConfig& config,
                                     const std::string& model_fingerprint);

bool is_state_file(const SafetensorsReader& reader);
std::vector<std::string> state_damage(const SafetensorsReader& reader);  // one line per defect; reads the whole file

}  // namespace furious
