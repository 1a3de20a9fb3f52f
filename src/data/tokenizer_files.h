// What is written for tokenizers of our own so that AutoTokenizer of transformers gives the same ids: a tokenizer.json
// that the tokenizers package reads, and a tokenizer_config.json of the class that uses it unchanged.
#pragma once

#include <string>

#include "data/tokenizer.h"

namespace furious {

// The key of tokenizer_config.json with the kind of a tokenizer that we wrote: "byte" or "sentencepiece".
inline constexpr const char* kSavedKindKey = "furious_tokenizer";

TokenizerFiles byte_tokenizer_files(bool bos);
// Models of other kinds than byte pairs with a space put before the text have no tokenizer.json but a class of their
// own (tokenization_furious.h), so that the library asks before it opens them and does not give other ids.
TokenizerFiles sentencepiece_files(const std::string& model, bool bos);

}  // namespace furious
