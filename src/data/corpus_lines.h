// The lines of a corpus without blank ones: the training data of a tokenizer.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/reader.h"
#include "data/tokenizer.h"

namespace furious {

class CorpusLines final : public LineSource {
 public:
  CorpusLines(const std::vector<std::string>& inputs, const ReaderOptions& options,
              std::optional<TextFormat> format = {});  // as for find_inputs()

  bool next(std::string& line) override;
  int64_t bytes() const { return bytes_; }  // of the lines so far

 private:
  void split(std::string_view text);

  ReaderOptions options_;
  BlockReader reader_;
  Block block_;
  std::deque<std::string> lines_;
  int64_t bytes_ = 0;
};

}  // namespace furious
