// Tokenizers of Hugging Face: tokenizer.json with byte-pair encoding.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"

namespace furious {

// `json`: the content of tokenizer.json; errors begin with `origin`. `config`: that of tokenizer_config.json or
// special_tokens_map.json, which name bos and eos; empty where there is none. docs/tokenizers.md lists the supported
// components; others are refused by name. The ids are those of the tokenizers package.
std::shared_ptr<const Tokenizer> make_tokenizer_json(std::string json, std::string config, const std::string& origin);

}  // namespace furious
