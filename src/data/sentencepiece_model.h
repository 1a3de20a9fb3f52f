// A look into the file of a SentencePiece model, for what the library does not tell, and does not check.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace furious {

// Whether a text can be encoded in parts, cut before spaces and line breaks, with the ids of the whole: byte pairs, no
// normalization, a space put before the text, and no piece that reaches over such a place. The Llama 2 model is so.
bool encodes_word_by_word(std::string_view model);

// Byte pairs with bytes for unknown characters, no normalization, a space put before the text, and no piece that is
// matched before all others: what a tokenizer.json can represent.
bool is_plain_byte_pair_model(std::string_view model);

// The pieces that are found in a text before all others, sorted.
std::vector<std::string> user_defined_pieces(std::string_view model);

// Throws unless the library (0.1.97) can work with this model without reading outside of its memory: it trusts the
// table of its normalizer, and how many pieces begin with one another. Errors begin with `origin`. What the library
// checks by itself (missing and duplicate pieces) is left to it.
void check_sentencepiece_model(std::string_view model, const std::string& origin);

}  // namespace furious
