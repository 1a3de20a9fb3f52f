// The text of an HTML page, piece by piece, in memory that does not grow with the page.
//
// Tags, comments, scripts and styles are dropped, and character references decoded. White space is collapsed as a
// browser does, except in <pre>; block elements begin a line, paragraphs and headings leave a blank one, and cells of a
// table are separated by a tab. Damaged markup is read as browsers read it: nothing is an error.
#pragma once

#include <string>
#include <string_view>

namespace furious {

class HtmlText {
 public:
  void feed(std::string_view bytes, std::string& out);  // appends the text that is known by now
  void finish(std::string& out);                        // the end of the page

 private:
  void read(bool at_end, std::string& out);
  bool read_markup(size_t& at, bool at_end);
  bool read_tag(size_t& at);
  bool read_reference(size_t& at, bool at_end, std::string& out);
  void end_tag();
  void put(std::string_view text, std::string& out);
  void put_word(std::string_view word, std::string& out);

  std::string waiting_;  // not read yet
  std::string until_;    // what ends a comment, script or style, where inside one; lower case
  bool in_tag_ = false;
  std::string tag_;         // its name in lower case, with a slash in front if it closes
  char quote_ = 0;          // inside a tag: of the attribute's value
  char before_ = 0;         // inside a tag: the last character that is no space
  int preformatted_ = 0;    // open <pre> elements
  bool after_pre_ = false;  // a line break that follows <pre> does not count
  int breaks_ = 0;          // lines to end before the next character
  char space_ = 0;          // to write before the next character
  bool empty_ = true;       // nothing was written yet
};

std::string html_to_text(std::string_view page);

}  // namespace furious
