// Lines from the user: edited with a history on a terminal, as they come from a pipe.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace furious::cli {

class LineEditor {
 public:
  LineEditor();
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  bool terminal() const { return terminal_; }
  // Without its line break; nothing at the end. On a terminal, Ctrl-C gives an empty line.
  std::optional<std::string> next(const std::string& prompt);

 private:
  struct Edit;
  std::optional<std::string> next_of_pipe();

  bool terminal_;
  std::unique_ptr<Edit> edit_;
};

}  // namespace furious::cli
