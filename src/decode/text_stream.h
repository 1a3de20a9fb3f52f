// The text of one sequence on its way to the reader: bytes of tokens in, whole characters out, up to a stop string.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/utf8.h"

namespace furious {

// What may turn out to be the beginning of a stop string waits, whatever the tokens it is made of.
class TextStream {
 public:
  explicit TextStream(std::vector<std::string> stop);

  std::string push(std::string_view bytes);  // what can be shown by now
  std::string finish();                      // the end of the text: what still waited
  bool stopped() const { return stopped_; }  // a stop string came; nothing is shown after it

 private:
  std::string release(std::string_view text);

  std::vector<std::string> stop_;
  Utf8Streamer characters_;
  std::string waiting_;
  bool stopped_ = false;
};

}  // namespace furious
