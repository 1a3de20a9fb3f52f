// One step of a pre-tokenizer: cuts a text at the matches of a pattern.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_pattern.h"

namespace furious {

enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

class TextSplitter {
 public:
  TextSplitter(TextPattern pattern, SplitBehavior behavior, bool invert = false)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}
  TextSplitter(std::string literal, SplitBehavior behavior, bool invert = false)  // not empty
      : literal_(std::move(literal)), behavior_(behavior), invert_(invert) {}

  // Calls piece(std::string_view) for each, in order; none is empty.
  template <class Piece>
  void split(std::string_view text, Piece&& piece) const {
    if (behavior_ != SplitBehavior::isolated && behavior_ != SplitBehavior::removed) {
      for (const std::string_view part : merged(text)) piece(part);
      return;
    }
    const bool keep_all = behavior_ == SplitBehavior::isolated;
    scan(text, [&](std::string_view part, bool matches) {
      if (!part.empty() && (keep_all || !matches)) piece(part);
    });
  }

 private:
  // Calls part(std::string_view, matches) for every match and everything between two; matches may be empty.
  template <class Part>
  void scan(std::string_view text, Part&& part) const {
    size_t done = 0;
    TextPattern::Match match;
    for (size_t from = 0; from <= text.size() && find(text, from, match);) {
      if (done < match.begin) part(text.substr(done, match.begin - done), invert_);
      part(text.substr(match.begin, match.end - match.begin), !invert_);
      done = match.end;
      from = match.end > match.begin ? match.end : after(text, match.end);
    }
    if (done < text.size()) part(text.substr(done), invert_);
  }
  bool find(std::string_view text, size_t from, TextPattern::Match& match) const {
    if (pattern_) return pattern_->find(text, from, match);
    match.begin = text.find(literal_, from);
    match.end = match.begin + literal_.size();
    return match.begin != std::string_view::npos;
  }
  static size_t after(std::string_view text, size_t at);  // the next character
  std::vector<std::string_view> merged(std::string_view text) const;

  std::optional<TextPattern> pattern_;
  std::string literal_;
  SplitBehavior behavior_;
  bool invert_;
};

}  // namespace furious
