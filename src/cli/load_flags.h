// Flags of every command that loads a model: what its files do not say, and the notes on loading it.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "cli/flags.h"
#include "furious/model.h"
#include "model/checkpoint.h"

namespace furious::cli {

inline void add_load_flags(CLI::App& command, LoadOptions& load) {
  command.add_option("--arch", load.arch,
                     "Architecture of weights without a config.json: a preset, or an attention_type of the authors' "
                     "release");
  command
      .add_option("--heads", load.heads,
                  "Number of heads of weights without a config.json, where their shapes do not determine it")
      ->check(CLI::Range(1, 1 << 14));
  command.add_flag("--bos", load.bos, "Begin every text with bos, as Llama models and the authors' release expect");
}

inline void add_model(CLI::App& command, std::string& model) {
  command.add_option("model", model, "A checkpoint directory, a training run or a .safetensors file")->required();
}

inline void show_notes(const std::string& model) {
  for (const std::string& note : load_notes(model)) fmt::print(stderr, "note: {}\n", note);
}

}  // namespace furious::cli
