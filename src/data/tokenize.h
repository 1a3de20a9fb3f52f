// Encodes a corpus into token shards: `furious tokenize`.
//
// Blocks of text are encoded in parallel and written in the order of the input, so the shards do not depend on the
// number of threads. Output is checkpointed with the position in the corpus; after an interruption the same call
// resumes and produces the same bytes. Standard input is copied to the folder first, and starts again.
//
// Neither split is empty, except for a test split that was not asked for (a fraction of 0): an error says what to do.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/hold_out.h"
#include "data/reader.h"
#include "data/token_shards.h"

namespace furious {

struct TokenizeOptions {
  std::vector<std::string> inputs;
  std::vector<std::string> test_inputs;  // files of the test split; may be empty
  std::string tokenizer;                 // for load_tokenizer
  std::string out;
  ReaderOptions reader;
  std::optional<TextFormat> format;  // of the inputs given by name, and of standard input
  double test_fraction = 0.001;
  int64_t least_tail = 0;  // of HoldOut
  uint64_t seed = 123;
  int64_t shard_tokens = 100'000'000;
  bool bos = false;  // begin documents with bos; they end with eos in any case
  int threads = 0;   // 0: one per core
};

struct TokenizeProgress {
  int64_t disk_bytes = 0;        // of the input files, done
  int64_t disk_bytes_start = 0;  // of them done by an earlier, interrupted run
  int64_t disk_bytes_total = 0;
  int64_t text_bytes = 0;  // by this run
  int64_t tokens = 0;      // by this run
};

struct TokenizeHooks {
  std::function<bool()> stop;  // asked after each block; true: checkpoint and throw Stopped
  std::function<void(const TokenizeProgress&)> progress;
};

// The work was stopped from outside; the same call continues it.
class Stopped : public Error {
 public:
  using Error::Error;
};

struct TokenizeResult {
  Manifest manifest;
  TokenizeProgress progress;
  bool was_complete = false;  // nothing was left to do
  int64_t empty = 0;          // records without text, which are no documents; not known of a complete result
  InputFile divided;          // the file whose tail is the test split; none: an empty path
};

TokenizeResult tokenize_corpus(const TokenizeOptions& options, const TokenizeHooks& hooks = {});

}  // namespace furious
