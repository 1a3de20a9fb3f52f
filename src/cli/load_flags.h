// Flags of every command that loads a model: what its files do not say, and the notes on loading it.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "cli/flags.h"
#include "cli/progress.h"
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

// Of those that read and write texts: also its tokenizer, and where and how it computes.
inline void add_text_model_flags(CLI::App& command, LoadOptions& load) {
  add_load_flags(command, load);
  command.add_option("--tokenizer", load.tokenizer,
                     "Tokenizer to use instead of that of the checkpoint: a SentencePiece model, a tokenizer.json, a "
                     "folder with one, or \"byte\"");
  add_threads(command, load.threads);
  add_device(command, load.device);
  add_dtype(command, load.dtype);
}

inline void add_model(CLI::App& command, std::string& model) {
  command.add_option("model", model, "A checkpoint directory, a training run or a .safetensors file")->required();
}

inline void show_notes(const std::string& model) {
  for (const std::string& note : load_notes(model)) fmt::print(stderr, "note: {}\n", note);
}

// What a load shows of itself; the line must outlive it. Small models are there before anybody could read it.
inline LoadProgress show_loading(ProgressLine& line) {
  return [&line](int64_t done, int64_t all) {
    constexpr int64_t kWorthShowing = 1'000'000'000;
    if (all >= kWorthShowing && line.due())
      line.show(
          fmt::format("loading: {:.1f} of {:.1f} GB", static_cast<double>(done) / 1e9, static_cast<double>(all) / 1e9));
  };
}

inline Model load_and_show(const std::string& command, const std::string& model, LoadOptions options) {
  show_notes(model);
  ProgressLine line(command);
  options.progress = show_loading(line);
  return Model::load(model, options);
}

}  // namespace furious::cli
