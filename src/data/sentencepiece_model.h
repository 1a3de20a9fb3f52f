// A look into the file of a SentencePiece model, for what the library does not tell.
#pragma once

#include <string_view>

namespace furious {

// Whether a text can be encoded in parts, cut before spaces and line breaks, with the ids of the whole: byte pairs, no
// normalization, a space put before the text, and no piece that reaches over such a place. The Llama 2 model is so.
bool encodes_word_by_word(std::string_view model);

}  // namespace furious
