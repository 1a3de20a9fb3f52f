#include "data/text_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/names.h"
#include "data/utf8.h"

namespace furious {
namespace {

constexpr size_t kMostPatternBytes = 4096;
constexpr uint32_t kMostRepeats = 256;  // a{n}: each costs memory of the compiled pattern
// Steps of one search, so that a hostile pattern ends; a run of spaces needs one for each.
constexpr uint64_t kMostSearchSteps = 1000000, kMostStepsPerByte = 16;

// \s without U+180E, which PCRE2 counts as a space.
constexpr std::string_view kSpaces =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

constexpr std::array<std::string_view, 37> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cn", "Co", "Cs"};

bool is_ascii_punctuation(char c) {
  return c > ' ' && c < 0x7F && !(c >= '0' && c <= '9') && !(c >= 'A' && c <= 'Z') && !(c >= 'a' && c <= 'z');
}

class Translation {
 public:
  Translation(std::string_view pattern, const std::string& origin) : pattern_(pattern), origin_(origin) {}

  std::string result() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape(false);
      } else if (c == '[') {
        character_class();
      } else if (c == '(') {
        group();
      } else if (c == '{') {
        repeats();
      } else if (c == '^' || c == '$' || c == '.') {
        refuse(1);
      } else {
        out_ += c;
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(size_t bytes) const {
    fail(
        "{}: the regular expression {} has \"{}\" at byte {}, which is not supported; convert the tokenizer to one of "
        "the supported kinds",
        origin_, printable(pattern_), printable(pattern_.substr(at_, bytes)), at_);
  }
  bool has(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  void copy(size_t bytes) {
    out_ += pattern_.substr(at_, bytes);
    at_ += bytes;
  }

  void group() {
    for (const std::string_view start : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"})
      if (has(start)) return copy(start.size());
    if (has("(?") || has("(*")) refuse(3);
    copy(1);
  }

  // {n}, {n,} or {n,m}. What follows it means something else in Oniguruma: {n}? is optional, {n}+ is repeated.
  void repeats() {
    const size_t close = pattern_.find('}', at_);
    if (close == std::string_view::npos) refuse(1);
    const std::string_view inside = pattern_.substr(at_ + 1, close - at_ - 1);
    const bool digits = std::ranges::all_of(inside, [](char c) { return c == ',' || (c >= '0' && c <= '9'); });
    if (!digits || inside.empty() || inside[0] == ',' || std::ranges::count(inside, ',') > 1 || inside.size() > 9)
      refuse(close + 1 - at_);
    for (size_t begin = 0; begin < inside.size();) {
      const size_t end = std::min(inside.find(',', begin), inside.size());
      uint32_t count = 0;
      for (const char c : inside.substr(begin, end - begin)) count = count * 10 + static_cast<uint32_t>(c - '0');
      if (count > kMostRepeats) refuse(close + 1 - at_);
      begin = end + 1;
    }
    copy(close + 1 - at_);
    if (at_ < pattern_.size() && std::string_view("?+*{").find(pattern_[at_]) != std::string_view::npos) refuse(1);
  }

  void escape(bool in_class) {
    if (at_ + 1 == pattern_.size()) refuse(1);
    const char c = pattern_[at_ + 1];
    if (c == 's' || (c == 'S' && !in_class)) {
      out_ += in_class ? std::string(kSpaces) : fmt::format("[{}{}]", c == 'S' ? "^" : "", kSpaces);
      at_ += 2;
    } else if (c == 'p' || c == 'P') {
      const size_t close = pattern_.find('}', at_);
      const bool braces = at_ + 2 < pattern_.size() && pattern_[at_ + 2] == '{' && close != std::string_view::npos;
      if (!braces) refuse(2);
      std::string_view name = pattern_.substr(at_ + 3, close - at_ - 3);
      if (name.starts_with('^')) name.remove_prefix(1);
      if (std::ranges::find(kCategories, name) == kCategories.end()) refuse(close + 1 - at_);
      copy(close + 1 - at_);
    } else if (c == 'r' || c == 'n' || c == 't' || c == 'd' || c == 'D' || is_ascii_punctuation(c)) {
      copy(2);
    } else {
      refuse(2);
    }
  }

  void character_class() {
    copy(1);
    if (at_ < pattern_.size() && pattern_[at_] == '^') copy(1);
    if (at_ < pattern_.size() && pattern_[at_] == ']') refuse(1);
    for (; at_ < pattern_.size() && pattern_[at_] != ']';) {
      if (pattern_[at_] == '[' || has("&&")) refuse(2);  // a nested class, an intersection
      if (pattern_[at_] == '\\')
        escape(true);
      else
        copy(1);
    }
    if (at_ == pattern_.size()) fail("{}: the regular expression {} ends inside of []", origin_, printable(pattern_));
    copy(1);
  }

  std::string_view pattern_;
  const std::string& origin_;
  size_t at_ = 0;
  std::string out_;
};

std::string message_of(int code) {
  std::array<unsigned char, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

// What a search needs besides the pattern, for each thread.
struct Search {
  Search() : data(pcre2_match_data_create(1, nullptr)), context(pcre2_match_context_create(nullptr)) {
    if (data == nullptr || context == nullptr) throw std::bad_alloc();
  }
  ~Search() {
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  pcre2_match_data* data;
  pcre2_match_context* context;
};

}  // namespace

std::string translate_pattern(std::string_view pattern, const std::string& origin) {
  require(pattern.size() <= kMostPatternBytes, "{}: a regular expression of {} bytes, expected at most {}", origin,
          pattern.size(), kMostPatternBytes);
  return Translation(pattern, origin).result();
}

struct TextPattern::Compiled {
  ~Compiled() { pcre2_code_free(code); }
  pcre2_code* code = nullptr;
  bool jit = false;
};

TextPattern::TextPattern(std::string_view pattern, const std::string& origin)
    : compiled_(std::make_unique<Compiled>()) {
  const std::string translated = translate_pattern(pattern, origin);
  int error = 0;
  size_t place = 0;
  compiled_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE, &error, &place, nullptr);
  require(compiled_->code != nullptr, "{}: the regular expression {} is damaged: {}", origin, printable(pattern),
          message_of(error));
  // A system may forbid memory that is both written and executed; then the interpreter works.
  compiled_->jit = pcre2_jit_compile(compiled_->code, PCRE2_JIT_COMPLETE) == 0;
}

TextPattern::~TextPattern() = default;
TextPattern::TextPattern(TextPattern&&) noexcept = default;
TextPattern& TextPattern::operator=(TextPattern&&) noexcept = default;

bool TextPattern::find(std::string_view text, size_t from, Match& match) const {
  thread_local const Search search;
  const uint64_t steps = kMostSearchSteps + kMostStepsPerByte * text.size();
  pcre2_set_match_limit(search.context,
                        static_cast<uint32_t>(std::min<uint64_t>(steps, std::numeric_limits<uint32_t>::max())));
  const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int result =
      compiled_->jit
          ? pcre2_jit_match(compiled_->code, subject, text.size(), from, 0, search.data, search.context)
          : pcre2_match(compiled_->code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, search.data, search.context);
  if (result == PCRE2_ERROR_NOMATCH) return false;
  if (result < 0) fail("tokenizer: its regular expression fails on this text: {}", message_of(result));
  const size_t* const ends = pcre2_get_ovector_pointer(search.data);
  match = {ends[0], ends[1]};
  return true;
}

}  // namespace furious
