#include "decode/text_stream.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace furious {

TextStream::TextStream(std::vector<std::string> stop) : stop_(std::move(stop)) {
  for (const std::string& text : stop_) {
    require(!text.empty(), "generate: a stop string is empty; remove it");
    require(valid_utf8_prefix(text) == text.size(), "generate: a stop string is not valid UTF-8");
  }
}

std::string TextStream::push(std::string_view bytes) {
  return release(characters_.push(bytes));
}

std::string TextStream::finish() {
  return release(characters_.flush()) + std::exchange(waiting_, {});
}

std::string TextStream::release(std::string_view text) {
  if (stopped_) return {};
  waiting_ += text;
  // The stop string that ends first counts, so that the result does not depend on how the text is split into tokens.
  size_t begin = 0, end = std::string::npos;
  for (const std::string& stop : stop_) {
    const size_t found = waiting_.find(stop);
    if (found == std::string::npos || found + stop.size() > end) continue;
    begin = found + stop.size() < end ? found : std::min(begin, found);
    end = found + stop.size();
  }
  if (end != std::string::npos) {
    stopped_ = true;
    return std::exchange(waiting_, {}).substr(0, begin);
  }
  size_t kept = 0;  // bytes at the end that begin a stop string
  for (const std::string& stop : stop_)
    for (size_t count = std::min(stop.size() - 1, waiting_.size()); count > kept; --count)
      if (waiting_.ends_with(std::string_view(stop).substr(0, count))) kept = count;
  std::string shown = waiting_.substr(0, waiting_.size() - kept);
  waiting_.erase(0, shown.size());
  return shown;
}

}  // namespace furious
