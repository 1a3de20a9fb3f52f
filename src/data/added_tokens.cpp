#include "data/added_tokens.h"

#include <algorithm>

#include "data/utf8.h"

namespace furious {
namespace {

unsigned byte_at(std::string_view text, size_t at) {
  return static_cast<unsigned char>(text[at]);
}

size_t previous_character(std::string_view text, size_t at) {
  do --at;
  while ((byte_at(text, at) & 0xC0) == 0x80);
  return at;
}

size_t white_space_begin(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t before = previous_character(text, end);
    if (!is_white_space(first_code_point(text.substr(before)))) break;
    end = before;
  }
  return end;
}

size_t white_space_end(std::string_view text, size_t at) {
  while (at < text.size() && is_white_space(first_code_point(text.substr(at)))) at += utf8_bytes_of(text[at]);
  return at;
}

}  // namespace

AddedTokens::AddedTokens() = default;

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::erase_if(tokens_, [](const AddedToken& token) { return token.content.empty(); });
  std::ranges::sort(tokens_, {}, &AddedToken::content);
  for (const AddedToken& token : tokens_) {
    const unsigned first = byte_at(token.content, 0) << 8;
    if (token.content.size() > 1)
      starts_.set(first | byte_at(token.content, 1));
    else
      for (unsigned second = 0; second < 256; ++second) starts_.set(first | second);
  }
  if (std::ranges::any_of(tokens_, &AddedToken::single_word))
    word_.emplace(
        "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\u200C\u200D\u24B6-\u24E9\U0001F130-\U0001F149\U0001F150-\U0001F169"
        "\U0001F170-\U0001F189]",
        "added tokens");
}

const AddedToken* AddedTokens::find(std::string_view text, size_t at) const {
  const AddedToken* longest = nullptr;
  auto first = tokens_.begin(), last = tokens_.end();
  for (size_t depth = 0; first != last && at + depth < text.size(); ++depth) {
    // All from first to last begin with the bytes before `depth`; of these, one that ends here sorts first.
    const auto byte = static_cast<int>(byte_at(text, at + depth));
    const auto byte_of = [&](const AddedToken& token) {
      return depth < token.content.size() ? static_cast<int>(byte_at(token.content, depth)) : -1;
    };
    first = std::partition_point(first, last, [&](const AddedToken& token) { return byte_of(token) < byte; });
    last = std::partition_point(first, last, [&](const AddedToken& token) { return byte_of(token) <= byte; });
    if (first != last && first->content.size() == depth + 1) longest = &*first;
  }
  return longest;
}

bool AddedTokens::is_word_beside(std::string_view text, size_t begin, size_t end) const {
  TextPattern::Match match;
  const auto is_word = [&](size_t at) { return word_->find(text.substr(at, utf8_bytes_of(text[at])), 0, match); };
  return (begin > 0 && is_word(previous_character(text, begin))) || (end < text.size() && is_word(end));
}

void AddedTokens::split(std::string_view text, std::vector<Part>& parts) const {
  parts.clear();
  size_t done = 0;
  const auto finish = [&] {
    if (done < text.size()) parts.push_back({done, text.size(), -1});
  };
  if (tokens_.empty()) return finish();
  for (size_t at = 0; at < text.size();) {
    const unsigned second = at + 1 < text.size() ? byte_at(text, at + 1) : 0;
    const AddedToken* const token = starts_[byte_at(text, at) << 8 | second] ? find(text, at) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + token->content.size();
    at = end;
    if (token->single_word && is_word_beside(text, begin, end)) continue;
    if (token->left_strip) begin = std::max(white_space_begin(text, begin), done);
    if (token->right_strip) end = white_space_end(text, end);
    if (done < begin) parts.push_back({done, begin, -1});
    parts.push_back({begin, end, token->id});
    done = end;  // the search goes on at the end of the token itself
  }
  finish();
}

}  // namespace furious
