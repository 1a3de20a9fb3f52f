// Text to token ids and back: SentencePiece models (the Llama 2 vocabulary is one), tokenizer.json of Hugging Face
// (tokenizer_json.h), or plain bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/utf8.h"

namespace furious {

using TokenizerFiles = std::map<std::string, std::string>;  // name to content

// All functions may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // For the continuation of a text: without what the tokenizer adds at the start of a text.
  virtual std::vector<int32_t> encode_continuation(std::string_view text) const = 0;
  // Text of strangers: like encode, or encode_continuation if it is not the start of a text, but what looks like a
  // special token is encoded as the letters that it consists of.
  virtual std::vector<int32_t> encode_literal(std::string_view text, bool start) const;
  // The id of a special token such as "<|im_end|>"; -1 where there is none of this name.
  virtual int32_t special(std::string_view content) const;
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  // The bytes that one id adds in the middle of a text, for streaming through a Utf8Streamer. Empty for ids that stand
  // for no text, such as eos.
  virtual std::string piece(int32_t id) const = 0;
  // The same for the first id of a text: without the space that a tokenizer puts before it.
  virtual std::string first_piece(int32_t id) const;

  virtual int32_t vocabulary_size() const = 0;
  virtual int32_t bos() const = 0;  // -1 where there is none
  virtual int32_t eos() const = 0;
  // Whether upstream's tokenizer puts bos before a text by itself; encode never does.
  virtual bool begins_with_bos() const { return false; }
  virtual std::string kind() const = 0;         // "sentencepiece", "tokenizer.json" or "byte"
  virtual std::string fingerprint() const = 0;  // equal for equal tokenizers, whatever their files are called
  // What a checkpoint contains for load_tokenizer, and for AutoTokenizer of transformers, with the same ids. `bos`:
  // texts begin with it.
  virtual TokenizerFiles files(bool bos) const = 0;
};

// "byte": 0..255 are the bytes, 256 is bos, 257 is eos. Otherwise the path of a SentencePiece model, of a
// tokenizer.json or of a folder: what save_tokenizer wrote there, else its tokenizer.json, else its tokenizer.model.
std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& name_or_path);
bool has_tokenizer(const std::filesystem::path& folder);

// The names of all files that a tokenizer may have in a folder.
inline constexpr const char* kTokenizerFiles[] = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json",
                                                  "tokenization_furious.py"};

// Writes the tokenizer's files into an existing directory, and removes those of another tokenizer.
void save_tokenizer(const std::filesystem::path& directory, const Tokenizer& tokenizer, bool bos = false);

// From the content of a model file; errors name `origin`.
std::shared_ptr<const Tokenizer> make_sentencepiece(std::string model, const std::string& origin);

struct TokenizerTraining {
  int32_t vocabulary_size = 8192;
  int64_t sentences = 2000000;  // at most; more are sampled, so that memory stays bounded
  int threads = 1;
};

// Gives the next line of text; false at the end.
class LineSource {
 public:
  virtual ~LineSource() = default;
  virtual bool next(std::string& line) = 0;
};

// A byte-pair model made like Llama 2's (bytes for rare characters, digits one by one, no normalization); returns the
// content of its model file.
std::string train_sentencepiece(LineSource& lines, const TokenizerTraining& training);

}  // namespace furious
