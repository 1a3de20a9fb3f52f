// Shared by the data tests: temporary folders, random text, compressors, a small tokenizer.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "data/reader.h"
#include "support.h"

namespace furious::testing {

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string path(std::string_view name) const { return root_ + "/" + std::string(name); }
  std::string write(std::string_view name, std::string_view content) const;  // returns the path

 private:
  std::string root_;
};

std::string read_file(const std::string& path);
std::map<std::string, std::string> read_folder(const std::string& path);  // name -> content, with folders in it

std::string zstd_of(std::string_view text);
std::string gzip_of(std::string_view text);

std::string random_sentence(Random& random, int64_t words);
std::vector<std::string> random_documents(Random& random, int64_t count);
std::string json_line(std::string_view text);  // {"text": …} and a line break
std::string json_lines(const std::vector<std::string>& documents);

struct ReadResult {
  std::vector<std::string> documents;
  std::vector<int> pieces;  // of each
  int64_t replaced = 0;
};
ReadResult read_all(const std::vector<std::string>& inputs, const ReaderOptions& options = {},
                    CorpusPosition start = {});

const std::string& small_model();  // a SentencePiece model of 400 ids, trained once per process

}  // namespace furious::testing
