// Token shards: the format of a tokenized corpus on disk.
//
//   DIR/manifest.json          contents: tokenizer, options, counts, every shard with its size and CRC-32
//   DIR/tokenizer*             a copy of the tokenizer's files, unless it is "byte"
//   DIR/train-00000.tokens     a ShardHeader, then the token ids: little-endian u16, or u32 for large vocabularies
//   DIR/train-00000.documents  a ShardHeader, then for each document the index after its last token: little-endian u64
//   DIR/train-00000.checks     a ShardHeader, then the CRC-32 of each block of kBlockBytes of .tokens (without its
//                              header), then of .documents: little-endian u32
//   DIR/test-00000.…           the test split, likewise
//
// A document lies in one shard, whole. The manifest is written last: a folder without one is unfinished.
//
// All data is compared with a checksum before it is used. The manifest has one of itself, and is compared with
// the headers of all shards and with the CRC-32 of .checks when the folder is opened, which reads 0.03 % of it. A block
// of .tokens or .documents is checked when it is first touched (dataset.h): opening a large corpus stays fast, and a
// batch costs some microseconds for each row that reads a new block. A shard of an older version without .checks is one
// block.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/files.h"

namespace furious {

enum class Split { train, test };
inline constexpr std::array<Split, 2> kSplits = {Split::train, Split::test};

std::string name_of(Split split);  // "train", "test"

struct ShardHeader {
  std::array<char, 8> magic;
  uint32_t version = 1;
  uint32_t item_bytes = 0;
  uint64_t tokens = 0;
  uint64_t documents = 0;
  std::array<char, 32> zero = {};
};
static_assert(sizeof(ShardHeader) == 64);
inline constexpr std::array<char, 8> kTokensMagic = {'F', 'U', 'R', 'T', 'O', 'K', 'E', 'N'};
inline constexpr std::array<char, 8> kDocumentsMagic = {'F', 'U', 'R', 'D', 'O', 'C', 'U', 'M'};
inline constexpr std::array<char, 8> kChecksMagic = {'F', 'U', 'R', 'C', 'H', 'E', 'C', 'K'};
inline constexpr size_t kBlockBytes = 16 << 10;

struct ShardInfo {
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t bytes = 0;  // of text
  uint32_t tokens_crc = 0;
  uint32_t documents_crc = 0;
  int64_t checks_crc = -1;  // of .checks; −1: there is none
};

std::string tokens_file(Split split, int64_t shard);     // "train-00000.tokens"
std::string documents_file(Split split, int64_t shard);  // "train-00000.documents"
std::string checks_file(Split split, int64_t shard);     // "train-00000.checks"

int token_bytes_for(int32_t vocabulary_size);

// The contents of a split, and the state of writing it.
struct SplitInfo {
  std::vector<ShardInfo> shards;  // finished
  ShardInfo current;              // being written
  bool has_current = false;
  int64_t document_tokens = 0;  // of the document that is open, in the current shard

  ShardInfo total() const;  // of the finished ones; no CRC
};

// Writes the shards of one split. What was written up to a checkpoint can be continued after the process has died.
class SplitWriter {
 public:
  SplitWriter(std::string folder, Split split, int token_bytes, int64_t shard_tokens, SplitInfo start);

  void append(std::span<const int32_t> tokens, int64_t text_bytes);  // to the open document
  void end_document();  // an empty one is dropped; a full shard is finished
  void checkpoint();    // everything in info() is on the disk after it
  void finish();
  const SplitInfo& info() const { return info_; }

 private:
  void open_shard();
  void close_shard();
  void write_checks();
  void update_crcs();

  std::string folder_;
  Split split_;
  int token_bytes_;
  int64_t shard_tokens_;
  SplitInfo info_;
  AppendFile tokens_;
  AppendFile documents_;
};

struct TokenizerInfo {
  std::string kind;
  std::string fingerprint;
  int32_t vocabulary_size = 0;
  int32_t bos = -1;
  int32_t eos = -1;
};

struct Manifest {
  TokenizerInfo tokenizer;
  int token_bytes = 2;
  int64_t replaced = 0;  // broken UTF-8 sequences that became U+FFFD
  std::array<SplitInfo, 2> splits;

  const SplitInfo& operator[](Split split) const { return splits[static_cast<size_t>(split)]; }
};

// Throws if DIR has no manifest (unfinished, or not a tokenized corpus), or an invalid one.
Manifest read_manifest(const std::string& folder);
Manifest manifest_from_json(std::string_view text, const std::string& origin);  // its manifest.json

}  // namespace furious
