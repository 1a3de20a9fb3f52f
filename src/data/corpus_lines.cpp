#include "data/corpus_lines.h"

#include <algorithm>

namespace furious {

CorpusLines::CorpusLines(const std::vector<std::string>& inputs, const ReaderOptions& options,
                         std::optional<TextFormat> format)
    : options_(options), reader_(find_inputs(inputs, format), options) {}

bool CorpusLines::next(std::string& line) {
  while (lines_.empty()) {
    if (!reader_.next(block_)) return false;
    for_each_document_part(block_, options_, [&](const DocumentPart& part) { split(part.text); });
  }
  line = std::move(lines_.front());
  lines_.pop_front();
  bytes_ += static_cast<int64_t>(line.size());
  return true;
}

void CorpusLines::split(std::string_view text) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    if (end > 0) lines_.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

}  // namespace furious
