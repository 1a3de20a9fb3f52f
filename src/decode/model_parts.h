// The implementation of furious::Model.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "furious/model.h"
#include "model/language_model.h"

namespace furious {

struct Model::Parts {
  // `published`: the model is in the format of another program, whose tokenizer.json says how texts begin.
  Parts(LanguageModel model, std::shared_ptr<const Tokenizer> its_tokenizer, bool bos, int threads = 0,
        bool published = false);

  LanguageModel language_model;
  int threads = 0;  // LoadOptions::threads
  std::shared_ptr<const Tokenizer> tokenizer;
  // The token before the first of a text: bos if the model was trained with it; otherwise eos, which precedes every
  // document but the first in a packed corpus. With the tokenizer.json of a published model bos where that puts it, and
  // nothing else. -1: none.
  int32_t start = -1;

  // Of language_model and tokenizer as they are at the first call (decode/state_file.h).
  const std::string& fingerprint() const;
  // The ids of a text at the start of a document: after `start`. Those of an empty text are a token to go on from,
  // eos where there is no `start`.
  std::vector<int32_t> prompt(std::string_view text) const;

 private:
  mutable std::once_flag fingerprinted_;
  mutable std::string fingerprint_;
};

}  // namespace furious
