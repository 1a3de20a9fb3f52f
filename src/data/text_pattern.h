// The regular expressions of tokenizers, on PCRE2 with its just-in-time compiler.
//
// They are written for Oniguruma, whose meaning they keep: \s is Unicode's White_Space, classes are those of the
// Unicode version that PCRE2 knows. Constructs that the two libraries read differently are refused by name, and so is
// what no tokenizer needs and a damaged file could misuse: back references, recursion, verbs.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace furious {

class TextPattern {
 public:
  // An Error begins with `origin`.
  TextPattern(std::string_view pattern, const std::string& origin);
  ~TextPattern();
  TextPattern(TextPattern&&) noexcept;
  TextPattern& operator=(TextPattern&&) noexcept;

  struct Match {
    size_t begin = 0, end = 0;
  };
  // The first match that begins at `from` or later; false if there is none. `text` must be valid UTF-8. May be called
  // from several threads at once.
  bool find(std::string_view text, size_t from, Match& match) const;

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

// The pattern in the syntax of PCRE2.
std::string translate_pattern(std::string_view pattern, const std::string& origin);

}  // namespace furious
