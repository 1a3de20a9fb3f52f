// What is behind furious::Model.
#pragma once

#include <memory>

#include "data/tokenizer.h"
#include "furious/model.h"
#include "model/language_model.h"

namespace furious {

struct Model::Parts {
  Parts(LanguageModel model, std::shared_ptr<const Tokenizer> its_tokenizer, bool bos, int threads = 0);

  LanguageModel language_model;
  int threads = 0;  // as LoadOptions
  std::shared_ptr<const Tokenizer> tokenizer;
  // What stands before a text: bos where the model was trained so; otherwise eos, which precedes every document but the
  // first of a packed corpus. -1: nothing.
  int32_t start = -1;
};

}  // namespace furious
