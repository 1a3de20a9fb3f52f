#include "cli/line_editor.h"

#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>

#ifdef FURIOUS_EDIT
#include <histedit.h>
#endif

namespace furious::cli {

#ifdef FURIOUS_EDIT

struct LineEditor::Edit {
  Edit() : editor(::el_init("furious", stdin, stdout, stderr)), lines(::history_init()) {
    HistEvent event;
    ::history(lines, &event, H_SETSIZE, 1000);
    ::history(lines, &event, H_SETUNIQUE, 1);
    ::el_set(editor, EL_CLIENTDATA, this);
    ::el_set(
        editor, EL_PROMPT, +[](EditLine* own) {
          Edit* edit = nullptr;
          ::el_get(own, EL_CLIENTDATA, &edit);
          return edit->prompt.data();
        });
    ::el_set(editor, EL_EDITOR, "emacs");
    ::el_set(editor, EL_HIST, ::history, lines);
    ::el_set(editor, EL_SIGNAL, 1);
    ::el_set(editor, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    ::el_source(editor, nullptr);  // ~/.editrc
  }
  ~Edit() {
    ::history_end(lines);
    ::el_end(editor);
  }

  EditLine* editor;
  History* lines;
  std::string prompt;
};

#else

struct LineEditor::Edit {};

#endif

LineEditor::LineEditor() : terminal_(::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0) {
#ifdef FURIOUS_EDIT
  if (!terminal_) return;
  std::setlocale(LC_CTYPE, "");  // characters of several bytes
  edit_ = std::make_unique<Edit>();
#endif
}

LineEditor::~LineEditor() = default;

std::optional<std::string> LineEditor::next(const std::string& prompt) {
#ifdef FURIOUS_EDIT
  if (edit_) {
    edit_->prompt = prompt;
    int length = 0;
    errno = 0;
    const char* const text = ::el_gets(edit_->editor, &length);
    if (text == nullptr || length <= 0) {
      const bool interrupted = length < 0 && errno == EINTR;
      std::fputs("\n", stdout);
      return interrupted ? std::optional<std::string>("") : std::nullopt;
    }
    std::string line(text, static_cast<size_t>(length));
    while (line.ends_with('\n') || line.ends_with('\r')) line.pop_back();
    HistEvent event;
    if (!line.empty()) ::history(edit_->lines, &event, H_ENTER, line.c_str());
    return line;
  }
#endif
  if (terminal_) {
    std::fputs(prompt.c_str(), stdout);
    std::fflush(stdout);
  }
  return next_of_pipe();
}

std::optional<std::string> LineEditor::next_of_pipe() {
  std::string line;
  for (int c; (c = std::fgetc(stdin)) != EOF;) {
    if (c == '\n') return line;
    line += static_cast<char>(c);
  }
  if (line.empty()) return std::nullopt;
  return line;
}

}  // namespace furious::cli
