// A small model for tests of commands that write texts.
#pragma once

#include <filesystem>

#include "data/corpus.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"

namespace furious::testing {

// Bytes as tokens; only letters have a logit other than 0, so that what it writes can be read.
inline void save_letter_model(const std::string& folder) {
  std::filesystem::create_directories(folder);
  Random random(1);
  const auto weights = [&](const std::string& name, const Tensor& out) {
    copy(out, random.normal_tensor(out.shape(), 0.5));
    if (name != "lm_head.weight") return;
    fill(out.slice(0, 0, 'a'), 0);
    fill(out.slice(0, 'z' + 1, 257 - 'z'), 0);
  };
  save_model(folder, LanguageModel(model_config("2mamba", "tiny", 258), weights));
  save_tokenizer(folder, *load_tokenizer("byte"));
}

}  // namespace furious::testing
