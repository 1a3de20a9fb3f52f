// Text to token ids and back: SentencePiece models (the Llama 2 vocabulary is one), or plain bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/utf8.h"

namespace furious {

// All functions may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // For the continuation of a text: without what the tokenizer adds at the start of a text.
  virtual std::vector<int32_t> encode_continuation(std::string_view text) const = 0;
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  // The bytes that one id adds in the middle of a text, for streaming through a Utf8Streamer. Empty for ids that stand
  // for no text, such as eos.
  virtual std::string piece(int32_t id) const = 0;
  // The same for the first id of a text: without the space that a tokenizer puts before it.
  std::string first_piece(int32_t id) const;

  virtual int32_t vocabulary_size() const = 0;
  virtual int32_t bos() const = 0;  // -1 where there is none
  virtual int32_t eos() const = 0;
  virtual std::string kind() const = 0;         // "sentencepiece" or "byte"
  virtual std::string fingerprint() const = 0;  // equal for equal tokenizers, whatever their files are called
  virtual std::string model() const = 0;        // the content of its model file; empty where it needs none
};

// "byte": 0..255 are the bytes, 256 is bos, 257 is eos. Otherwise the path of a SentencePiece model, or of a folder
// that save_tokenizer wrote or that has a tokenizer.model in it.
std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& name_or_path);
bool has_tokenizer(const std::filesystem::path& folder);

// Writes tokenizer_config.json, which says the kind, and tokenizer.model where the tokenizer has one, into an existing
// directory.
// SentencePiece models as transformers' LlamaTokenizer reads them, with the same ids; `bos`: texts begin with it.
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
