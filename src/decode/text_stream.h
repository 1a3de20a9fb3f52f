// Streaming text of one sequence: bytes of tokens in, complete UTF-8 characters out, up to a stop string.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/utf8.h"

namespace furious {

// Text that may be the beginning of a stop string is held back, however it is split into tokens.
class TextStream {
 public:
  explicit TextStream(std::vector<std::string> stop);

  std::string push(std::string_view bytes);  // returns the text that can be shown
  std::string finish();                      // returns the text that was held back
  bool stopped() const { return stopped_; }  // a stop string occurred; push returns nothing from then on

 private:
  std::string release(std::string_view text);

  std::vector<std::string> stop_;
  Utf8Streamer characters_;
  std::string waiting_;
  bool stopped_ = false;
};

}  // namespace furious
