// Documents from files of any format (inputs.h); .parquet and .arrow where the build has Apache Arrow.
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

#include "data/byte_stream.h"
#include "data/inputs.h"

namespace furious {

struct ReaderOptions {
  std::string field = "text";        // of a JSON record, or the column of a table
  bool split_on_blank_line = false;  // text: a document ends at a blank line, not at the end of the file
  size_t block_bytes = 1 << 20;
  size_t longest_line = 1 << 30;  // a JSON record or a record of a .csv file is held in memory whole
};

// A position between two blocks of the corpus.
struct CorpusPosition {
  int64_t file = 0;
  int64_t offset = 0;   // bytes into the decompressed text; rows of a columnar file
  int64_t line = 0;     // lines before it; records of a .json file
  bool inside = false;  // in the middle of a document

  bool operator==(const CorpusPosition&) const = default;
};

// A column of a .csv or .tsv file, from its first record.
struct CsvColumn {
  size_t index = 0;
  size_t columns = 0;
};

struct Block {
  InputFile file;
  std::string bytes;
  std::vector<size_t> ends;  // of a columnar file: where each document ends in `bytes`
  CsvColumn column;
  CorpusPosition begin;
  CorpusPosition end;
  int64_t consumed = 0;  // bytes on disk of all files up to here

  // In the part of a file that is held out.
  bool is_held_out() const { return file.test_from >= 0 && begin.offset >= file.test_from; }
};

// The decompressed text of a file that is not columnar: of an .html page its text, of a .json file a record per line.
std::unique_ptr<ByteStream> open_text_stream(const InputFile& file);

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
  class CsvSource;
  class ColumnSource;
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

// What was found in a block beside its documents.
struct BlockCounts {
  int64_t replaced = 0;  // broken UTF-8 sequences, by U+FFFD
  int64_t empty = 0;     // records and rows without text, which are no documents
};

// visit(part) for all documents of a block.
BlockCounts for_each_document_part(Block& block, const ReaderOptions& options,
                                   const std::function<void(const DocumentPart&)>& visit);

}  // namespace furious
