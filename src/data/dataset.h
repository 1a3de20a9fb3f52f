// An opened tokenized corpus: its tokens and documents as one sequence per split, memory-mapped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/token_shards.h"
#include "data/tokenizer.h"

namespace furious {

// Tokens [begin, end) of a split.
struct DocumentRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t length() const { return end - begin; }
  bool operator==(const DocumentRange&) const = default;
};

// The tokens of one split, over all its shards. Copies share the mapping.
class TokenView {
 public:
  int64_t size() const;
  int64_t documents() const;
  int64_t text_bytes() const;

  // Tokens [begin, begin + count) to `out`. What is read for the first time is compared with its checksum
  // (token_shards.h): damage is an error that names the shard and the bytes. From any number of threads.
  void copy(int64_t begin, int64_t count, int32_t* out) const;
  DocumentRange document(int64_t index) const;
  int64_t document_at(int64_t token) const;  // the index of the document that holds it

  const std::string& name() const;  // "DIR (train)", for messages

 private:
  friend class Dataset;
  struct Mapping;
  std::shared_ptr<const Mapping> mapping_;
};

class Dataset {
 public:
  // Checks the manifest, the presence, headers and sizes of all shards, and that the tokenizer is the one of the
  // manifest.
  explicit Dataset(const std::string& folder);

  const TokenView& tokens(Split split) const { return views_[static_cast<size_t>(split)]; }
  const Manifest& manifest() const { return manifest_; }
  std::shared_ptr<const Tokenizer> tokenizer() const { return tokenizer_; }

  // Throws if the text was tokenized otherwise than the model in this folder expects; a model without tokenizer passes.
  void check_tokenizer_of(const std::filesystem::path& model) const;

  // Reads everything and compares checksums: a line for each range of damaged bytes.
  std::vector<std::string> damage() const;

 private:
  std::string folder_;
  Manifest manifest_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<TokenView> views_;
};

}  // namespace furious
