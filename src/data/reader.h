// Documents from files: .txt, .jsonl, both also as .gz or .zst, and .parquet where the build has Apache Arrow.
//
// Reading has two halves. A BlockReader cuts the corpus into blocks of about a megabyte, in order, holding one at a
// time, so memory does not grow with the corpus. for_each_document_part then turns a block into text; it keeps nothing
// between calls, so blocks can be worked on in parallel.
//
// A document longer than a block comes in several parts, cut before a space near the end of a block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace furious {

enum class TextFormat { text, jsonl, parquet };

struct InputFile {
  std::string path;
  TextFormat format = TextFormat::text;
  int64_t size = 0;      // on disk
  int64_t modified = 0;  // nanoseconds, as the file system counts them
};

// The files that `inputs` name: files, folders (all known files below them, sorted) and globs, in the order given.
// Throws if an input names none.
std::vector<InputFile> find_inputs(const std::vector<std::string>& inputs);

struct ReaderOptions {
  std::string field = "text";        // of a .jsonl line, or the column of a .parquet file
  bool split_on_blank_line = false;  // .txt: a document ends at a blank line, not at the end of the file
  size_t block_bytes = 1 << 20;
  size_t longest_line = 1 << 30;  // of a .jsonl file: a line is held in memory whole
};

// A position between two blocks of the corpus.
struct CorpusPosition {
  int64_t file = 0;
  int64_t offset = 0;   // bytes into the decompressed file; rows of a .parquet file
  int64_t line = 0;     // lines before it
  bool inside = false;  // in the middle of a document

  bool operator==(const CorpusPosition&) const = default;
};

struct Block {
  TextFormat format = TextFormat::text;
  std::string path;
  std::string bytes;
  std::vector<size_t> ends;  // .parquet: where each document ends in `bytes`
  CorpusPosition begin;
  CorpusPosition end;
  int64_t consumed = 0;  // bytes on disk of all files up to here
};

class BlockReader {
 public:
  BlockReader(std::vector<InputFile> files, ReaderOptions options, CorpusPosition start = {});
  ~BlockReader();
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  bool next(Block& block);  // false at the end of the corpus

 private:
  class Source;
  class LineSource;
  class TextSource;
  class ParquetSource;
  std::unique_ptr<Source> open(const InputFile& file) const;

  std::vector<InputFile> files_;
  ReaderOptions options_;
  CorpusPosition position_;
  int64_t finished_bytes_ = 0;
  std::unique_ptr<Source> source_;
};

// A document, or a part of a long one.
struct DocumentPart {
  std::string_view text;  // valid UTF-8
  bool first = true;      // the document begins with it
  bool last = true;       // and ends with it
};

// visit(part) for all documents of a block. Returns how many broken UTF-8 sequences were replaced by U+FFFD.
int64_t for_each_document_part(Block& block, const ReaderOptions& options,
                               const std::function<void(const DocumentPart&)>& visit);

}  // namespace furious
