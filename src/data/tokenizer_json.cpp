#include "data/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <initializer_list>
#include <limits>
#include <optional>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/names.h"
#include "base/number.h"
#include "data/added_tokens.h"
#include "data/byte_pairs.h"
#include "data/composition.h"
#include "data/text_splitter.h"
#include "data/utf8.h"

namespace furious {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // ▁
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr uint64_t kMostIds = 1 << 20;
constexpr size_t kMostSteps = 16;       // of a normalizer, a pre-tokenizer or a decoder
constexpr size_t kMostGrowth = 16;      // of a text that a normalizer changes
constexpr size_t kLongestContent = 64;  // that a normalizer inserts
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::string replaced(std::string_view text, std::string_view pattern, std::string_view content) {
  std::string out;
  size_t done = 0;
  for (size_t at; (at = text.find(pattern, done)) != std::string_view::npos; done = at + pattern.size()) {
    out += text.substr(done, at - done);
    out += content;
  }
  return out += text.substr(done);
}

// The byte of a token such as <0x0A>; -1 for other tokens.
int fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const auto byte = parse_number<int>(token.substr(3, 2), 16);
  return byte && *byte >= 0 ? *byte : -1;
}

struct NormalizerStep {
  enum class Kind { compose, replace, prepend } kind;
  std::string pattern, content;
};

// What precedes the splitters: a text gets spaces replaced, and a space or its replacement put before it.
struct Prefix {
  enum class When { never, first, always } when = When::never;
  std::string text;   // " " or the replacement
  std::string space;  // the replacement of spaces; empty: they stay
};

struct DecoderSteps {
  bool byte_level = false;
  std::vector<std::pair<std::string, std::string>> replacements;
  bool byte_fallback = false;
  bool fused = false;
  std::string mark;  // of Metaspace: dropped from the first token, a space in others
  bool drops_mark = false;
  std::string strip;  // a character
  int64_t strip_start = 0, strip_stop = 0;
};

// What a tokenizer.json says, without the checks of whole texts.
struct Parsed {
  std::vector<NormalizerStep> normalizer;
  bool byte_level = false;
  Prefix prefix;
  std::vector<TextSplitter> splitters;
  DecoderSteps decoder;
  IdOfText vocabulary;  // token to id
  std::vector<Merge> merges;
  BytePairOptions options;
  std::vector<AddedToken> added;
  std::string first_special;  // that the template puts before a text; empty: none
};

class Parser {
 public:
  Parser(const nlohmann::json& json, const std::string& origin) : origin_(origin), root_(json, origin) {}

  Parsed parse() {
    if (root_.has("version") && root_.at("version").text() != "1.0") root_.at("version").unexpected("\"1.0\"");
    if (root_.has("normalizer")) normalizer(root_.at("normalizer"));
    if (root_.has("pre_tokenizer")) pre_tokenizer(root_.at("pre_tokenizer"), true);
    if (root_.has("post_processor")) post_processor(root_.at("post_processor"));
    require(root_.has("decoder"), "{}: it has no decoder, so tokens cannot become text; use a file that has one",
            origin_);
    decoder(root_.at("decoder"));
    model(root_.at("model"));
    if (root_.has("added_tokens")) added_tokens(root_.at("added_tokens"));
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what, std::string_view name, std::string_view supported) const {
    fail("{}: the {} \"{}\" is not supported; supported: {}", origin_, what, printable(name), supported);
  }
  void check_keys(const JsonValue& value, std::string_view what, std::initializer_list<std::string_view> known) const {
    for (const auto& [key, content] : value.json().items())
      require(key == "type" || std::ranges::find(known, key) != known.end(),
              "{}: the key \"{}\" of the {} is not supported; use a tokenizer without it", origin_, printable(key),
              what);
  }
  static bool flag_of(const JsonValue& value, const char* key, bool otherwise) {
    return value.has(key) ? value.at(key).flag() : otherwise;
  }
  // Of a Replace or Split; a literal.
  static std::string literal_of(const JsonValue& pattern) {
    const std::string text = pattern.at("String").text();
    if (text.empty()) pattern.at("String").unexpected("text");
    return text;
  }
  std::string inserted_text(const JsonValue& value) const {
    const std::string text = value.text();
    if (text.size() > kLongestContent) value.unexpected(fmt::format("at most {} bytes", kLongestContent));
    return text;
  }
  void check_steps(size_t count, std::string_view what) const {
    require(count < kMostSteps, "{}: more than {} steps of the {}; the file is damaged", origin_, kMostSteps, what);
  }

  void normalizer(const JsonValue& value) {
    using Kind = NormalizerStep::Kind;
    const std::string type = value.at("type").text();
    if (type == "Sequence") {
      for (const JsonValue& item : value.at("normalizers").items()) normalizer(item);
      return;
    }
    check_steps(out_.normalizer.size(), "normalizer");
    if (type == "NFC") {
      out_.normalizer.push_back({Kind::compose, "", ""});
    } else if (type == "Prepend") {
      out_.normalizer.push_back({Kind::prepend, "", inserted_text(value.at("prepend"))});
    } else if (type == "Replace") {
      if (!value.at("pattern").has("String"))
        refuse("normalizer", "Replace with a regular expression", "Replace with a string");
      out_.normalizer.push_back({Kind::replace, literal_of(value.at("pattern")), inserted_text(value.at("content"))});
    } else {
      refuse("normalizer", type, "NFC, Prepend, Replace, Sequence");
    }
  }

  SplitBehavior behavior_of(const JsonValue& value) const {
    const std::string name = value.text();
    if (name == "Isolated") return SplitBehavior::isolated;
    if (name == "Removed") return SplitBehavior::removed;
    if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
    if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
    if (name == "Contiguous") return SplitBehavior::contiguous;
    refuse("behavior of Split", name, "Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous");
  }

  void pre_tokenizer(const JsonValue& value, bool last) {
    const std::string type = value.at("type").text();
    if (type == "Sequence") {
      const std::vector<JsonValue> items = value.at("pretokenizers").items();
      for (const JsonValue& item : items) pre_tokenizer(item, last && &item == &items.back());
      return;
    }
    check_steps(out_.splitters.size(), "pre-tokenizer");
    if (type == "Split") {
      check_keys(value, "pre-tokenizer Split", {"pattern", "behavior", "invert"});
      const SplitBehavior behavior = behavior_of(value.at("behavior"));
      const bool invert = flag_of(value, "invert", false);
      const JsonValue pattern = value.at("pattern");
      if (pattern.has("Regex"))
        out_.splitters.emplace_back(TextPattern(pattern.at("Regex").text(), origin_), behavior, invert);
      else
        out_.splitters.emplace_back(literal_of(pattern), behavior, invert);
    } else if (type == "Digits") {
      const bool each = flag_of(value, "individual_digits", false);
      out_.splitters.emplace_back(TextPattern(each ? "\\p{N}" : "\\p{N}+", origin_), SplitBehavior::isolated);
    } else if (type == "ByteLevel") {
      byte_level(value, last);
    } else if (type == "Metaspace") {
      metaspace(value, last);
    } else {
      refuse("pre-tokenizer", type, "ByteLevel, Digits, Metaspace, Sequence, Split");
    }
  }

  void byte_level(const JsonValue& value, bool last) {
    check_keys(value, "pre-tokenizer ByteLevel", {"add_prefix_space", "trim_offsets", "use_regex"});
    if (!last) refuse("pre-tokenizer", "ByteLevel before another", "ByteLevel as the last");
    if (flag_of(value, "add_prefix_space", true)) {
      if (!out_.splitters.empty())
        refuse("pre-tokenizer", "ByteLevel with add_prefix_space after another", "ByteLevel without add_prefix_space");
      out_.prefix = {Prefix::When::always, " ", ""};
    }
    if (flag_of(value, "use_regex", true))
      out_.splitters.emplace_back(TextPattern(kGpt2Pattern, origin_), SplitBehavior::isolated);
    out_.byte_level = true;
  }

  void metaspace(const JsonValue& value, bool last) {
    check_keys(value, "pre-tokenizer Metaspace",
               {"replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    if (!last || !out_.splitters.empty()) refuse("pre-tokenizer", "Metaspace beside another", "Metaspace alone");
    const std::string mark = mark_of(value);
    out_.prefix = {prepends(value), mark, mark};
    if (flag_of(value, "split", true)) out_.splitters.emplace_back(mark, SplitBehavior::merged_with_next);
  }
  static std::string mark_of(const JsonValue& value) {
    const std::string mark = value.at("replacement").text();
    if (mark.empty() || utf8_length(mark) != 1) value.at("replacement").unexpected("one character");
    return mark;
  }
  static Prefix::When prepends(const JsonValue& value) {
    if (!value.has("prepend_scheme"))
      return flag_of(value, "add_prefix_space", true) ? Prefix::When::always : Prefix::When::never;
    const std::string scheme = value.at("prepend_scheme").text();
    if (scheme == "always") return Prefix::When::always;
    if (scheme == "first") return Prefix::When::first;
    if (scheme != "never") value.at("prepend_scheme").unexpected("\"always\", \"first\" or \"never\"");
    return Prefix::When::never;
  }

  // Only the template matters for ids: ByteLevel changes offsets.
  void post_processor(const JsonValue& value) {
    const std::string type = value.at("type").text();
    if (type == "Sequence") {
      for (const JsonValue& item : value.at("processors").items()) post_processor(item);
    } else if (type == "TemplateProcessing") {
      const std::vector<JsonValue> items = value.at("single").items();
      if (!items.empty() && items[0].has("SpecialToken"))
        out_.first_special = items[0].at("SpecialToken").at("id").text();
    } else if (type != "ByteLevel") {
      refuse("post-processor", type, "ByteLevel, Sequence, TemplateProcessing");
    }
  }

  void decoder(const JsonValue& value) {
    DecoderSteps& steps = out_.decoder;
    const std::string type = value.at("type").text();
    if (type == "Sequence") {
      for (const JsonValue& item : value.at("decoders").items()) decoder(item);
      return;
    }
    check_steps(decoder_steps_++, "decoder");
    // Replace, ByteFallback, Fuse and Strip work in this order.
    const auto in_order = [&](bool order) {
      if (!order) refuse("decoder", type + " after what it follows here", "Replace, ByteFallback, Fuse, Strip");
    };
    if (type == "ByteLevel") {
      in_order(decoder_steps_ == 1);
      steps.byte_level = true;
    } else if (type == "Metaspace") {
      in_order(decoder_steps_ == 1);
      steps.mark = mark_of(value);
      steps.drops_mark = prepends(value) != Prefix::When::never;
    } else if (type == "Replace") {
      in_order(!steps.byte_level && steps.mark.empty() && !steps.byte_fallback && !steps.fused);
      if (!value.at("pattern").has("String"))
        refuse("decoder", "Replace with a regular expression", "Replace with a string");
      steps.replacements.emplace_back(literal_of(value.at("pattern")), inserted_text(value.at("content")));
    } else if (type == "ByteFallback") {
      in_order(!steps.byte_level && !steps.byte_fallback && !steps.fused);
      steps.byte_fallback = true;
    } else if (type == "Fuse") {
      in_order(!steps.fused);
      steps.fused = true;
    } else if (type == "Strip") {
      in_order(steps.fused && steps.strip.empty());
      steps.strip = value.at("content").text();
      if (steps.strip.empty() || utf8_length(steps.strip) != 1) value.at("content").unexpected("one character");
      steps.strip_start = value.at("start").integer(0, 1000);
      steps.strip_stop = value.at("stop").integer(0, 1000);
    } else {
      refuse("decoder", type, "ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip");
    }
  }

  void model(const JsonValue& value) {
    const std::string type = value.has("type") ? value.at("type").text() : value.has("merges") ? "BPE" : "";
    if (type != "BPE") refuse("model", type, "BPE");
    check_keys(value, "model",
               {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
                "ignore_merges", "vocab", "merges"});
    if (value.has("dropout") && value.at("dropout").number() != 0) refuse("model option", "dropout", "null");
    for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (value.has(affix) && !value.at(affix).text().empty()) refuse("model option", affix, "null");
    out_.options = {.byte_level = out_.byte_level,
                    .byte_fallback = flag_of(value, "byte_fallback", false),
                    .fuse_unknown = flag_of(value, "fuse_unk", false),
                    .whole_words = flag_of(value, "ignore_merges", false)};
    vocabulary(value.at("vocab"));
    merges(value.at("merges"));
    if (value.has("unk_token") && !value.at("unk_token").text().empty())
      out_.options.unknown = id_of(value.at("unk_token").text(), "unk_token");
  }

  int32_t id_of(const std::string& token, std::string_view where) const {
    const auto found = out_.vocabulary.find(token);
    require(found != out_.vocabulary.end(), "{}: the token \"{}\" of {} is not in the vocabulary; the file is damaged",
            origin_, printable(token), where);
    return found->second;
  }

  void vocabulary(const JsonValue& value) {
    if (!value.json().is_object() || value.json().empty()) value.unexpected("an object of tokens");
    out_.vocabulary.reserve(value.json().size());
    std::vector<bool> seen;
    for (const auto& [token, number] : value.json().items()) {
      const bool is_id = number.is_number_unsigned() && number.get<uint64_t>() < kMostIds;
      require(is_id, "{}: the id of the token \"{}\" is not an integer from 0 to {}; the file is damaged", origin_,
              printable(token), kMostIds - 1);
      const auto id = number.get<int64_t>();
      if (static_cast<size_t>(id) >= seen.size()) seen.resize(static_cast<size_t>(id) + 1);
      require(!seen[static_cast<size_t>(id)], "{}: the id {} is given twice; the file is damaged", origin_, id);
      seen[static_cast<size_t>(id)] = true;
      out_.vocabulary.emplace(token, static_cast<int32_t>(id));
    }
  }

  // "a b" or ["a", "b"].
  void merges(const JsonValue& value) {
    if (!value.json().is_array()) value.unexpected("a list");
    out_.merges.reserve(value.json().size());
    for (const nlohmann::json& item : value.json()) {
      std::string left, right;
      if (item.is_string()) {
        const std::string text = item.get<std::string>();
        if (text.starts_with("#version")) continue;
        const size_t space = text.find(' ');
        left = text.substr(0, space);
        right = space == std::string::npos ? "" : text.substr(space + 1);
      } else if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
        left = item[0].get<std::string>();
        right = item[1].get<std::string>();
      }
      require(!left.empty() && !right.empty(), "{}: merge {} is not a pair of tokens; the file is damaged", origin_,
              out_.merges.size());
      out_.merges.push_back({id_of(left, "a merge"), id_of(right, "a merge"), id_of(left + right, "a merge")});
    }
  }

  // Tokens of the vocabulary keep their id; others follow it in their order.
  void added_tokens(const JsonValue& value) {
    auto next = static_cast<int64_t>(out_.vocabulary.size());
    std::unordered_set<std::string> contents;
    for (const JsonValue& item : value.items()) {
      AddedToken token;
      token.content = item.at("content").text();
      if (token.content.empty()) continue;
      require(contents.insert(token.content).second, "{}: the added token \"{}\" is given twice; the file is damaged",
              origin_, printable(token.content));
      const auto known = out_.vocabulary.find(token.content);
      const int64_t id = known != out_.vocabulary.end() ? known->second : next++;
      require(item.at("id").integer(0, kMostIds - 1) == id,
              "{}: the added token \"{}\" has the id {}, expected {}, its place in the vocabulary; the file is damaged",
              origin_, printable(token.content), item.at("id").json().dump(), id);
      token.id = static_cast<int32_t>(id);
      token.single_word = flag_of(item, "single_word", false);
      token.left_strip = flag_of(item, "lstrip", false);
      token.right_strip = flag_of(item, "rstrip", false);
      token.special = flag_of(item, "special", false);
      token.normalized = flag_of(item, "normalized", !token.special);
      out_.added.push_back(std::move(token));
    }
  }

  std::string origin_;
  JsonValue root_;
  Parsed out_;
  size_t decoder_steps_ = 0;
};

class JsonTokenizer final : public Tokenizer {
 public:
  JsonTokenizer(std::string json, std::string config, const std::string& origin)
      : json_(std::move(json)), config_(std::move(config)) {
    const nlohmann::json document = parse_json(json_, origin);
    Parsed parsed = Parser(document, origin).parse();
    normalizer_ = std::move(parsed.normalizer);
    prefix_ = std::move(parsed.prefix);
    splitters_ = std::move(parsed.splitters);
    decoder_ = std::move(parsed.decoder);
    make_tokens(parsed);
    make_model(parsed);
    find_ends(parsed, origin);
    std::vector<AddedToken> raw, normalized, raw_blanks, normalized_blanks;
    for (AddedToken& token : parsed.added) {
      const bool blank = std::ranges::all_of(token.content, [](char c) { return c == ' ' || c == '\t' || c == '\n'; });
      if (!blank) special_.emplace(token.content, token.id);
      if (token.normalized) token.content = normalize(token.content, false);
      if (blank) (token.normalized ? normalized_blanks : raw_blanks).push_back(token);
      (token.normalized ? normalized : raw).push_back(std::move(token));
    }
    all_tokens_ = {AddedTokens(std::move(raw)), AddedTokens(std::move(normalized))};
    blank_tokens_ = {AddedTokens(std::move(raw_blanks)), AddedTokens(std::move(normalized_blanks))};
  }

  std::vector<int32_t> encode(std::string_view text) const override { return encode_text(text, true, all_tokens_); }
  std::vector<int32_t> encode_continuation(std::string_view text) const override {
    return encode_text(text, false, all_tokens_);
  }
  std::vector<int32_t> encode_literal(std::string_view text, bool start) const override {
    return encode_text(text, start, blank_tokens_);
  }
  int32_t special(std::string_view content) const override {
    const auto found = special_.find(std::string(content));
    return found != special_.end() ? found->second : -1;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text, bytes;
    const auto end_bytes = [&] {  // of byte tokens in a row, which are a character only together
      if (valid_utf8_prefix(bytes) == bytes.size())
        text += bytes;
      else
        for (size_t i = 0; i < bytes.size(); ++i) text += kReplacement;
      bytes.clear();
    };
    bool first = true;
    for (const int32_t id : ids) {
      const Token& token = token_of(id);
      if (token.special) continue;
      if (token.is_byte) {
        bytes += token.piece;
      } else {
        end_bytes();
        text += first ? without_mark(token) : token.piece;
      }
      first = false;
    }
    end_bytes();
    strip(text, decoder_.strip_start, decoder_.strip_stop);
    int64_t broken = 0;
    return decoder_.byte_level ? replace_invalid_utf8(text, broken) : text;
  }

  std::string piece(int32_t id) const override { return token_of(id).piece; }
  std::string first_piece(int32_t id) const override {
    std::string text = without_mark(token_of(id));
    if (!token_of(id).is_byte) strip(text, decoder_.strip_start, 0);
    return text;
  }

  int32_t vocabulary_size() const override { return static_cast<int32_t>(tokens_.size()); }
  int32_t bos() const override { return bos_; }
  int32_t eos() const override { return eos_; }
  bool begins_with_bos() const override { return begins_with_bos_; }
  std::string kind() const override { return "tokenizer.json"; }
  std::string fingerprint() const override {
    return fmt::format("fnv1a64:{:016x}", hash_of(fmt::format("{:016x} {} {}", hash_of(json_), bos_, eos_)));
  }
  TokenizerFiles files(bool) const override { return {{"tokenizer.json", json_}, {"tokenizer_config.json", config_}}; }

 private:
  struct Token {
    std::string piece;  // the bytes it adds in the middle of a text
    bool special = false;
    bool is_byte = false;  // piece is a byte that may be a part of a character
    bool has_mark = false;
  };

  // Added tokens, by the text in which they are searched.
  struct Added {
    AddedTokens raw, normalized;
  };

  const Token& token_of(int32_t id) const {
    require(id >= 0 && id < vocabulary_size(), "tokenizer: id {} is outside the vocabulary 0..{}", id,
            vocabulary_size() - 1);
    return tokens_[static_cast<size_t>(id)];
  }

  Token make_token(const std::string& content, bool special) const {
    Token token;
    token.special = special;
    if (special) return token;
    token.piece = content;
    if (decoder_.byte_level) {
      token.piece = bytes_of_letters(content).value_or(content);
      return token;
    }
    for (const auto& [pattern, by] : decoder_.replacements) token.piece = replaced(token.piece, pattern, by);
    if (!decoder_.mark.empty()) {
      token.has_mark = content.find(decoder_.mark) != std::string::npos;
      token.piece = replaced(content, decoder_.mark, " ");
    }
    if (const int byte = decoder_.byte_fallback ? fallback_byte(token.piece) : -1; byte >= 0) {
      token.piece = std::string(1, static_cast<char>(byte));
      token.is_byte = true;
    }
    return token;
  }

  void make_tokens(const Parsed& parsed) {
    const auto set = [&](int32_t id, const std::string& content, bool special) {
      if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
      tokens_[static_cast<size_t>(id)] = make_token(content, special);
    };
    for (const auto& [content, id] : parsed.vocabulary) set(id, content, false);
    for (const AddedToken& token : parsed.added) set(token.id, token.content, token.special);
    for (const auto& [content, id] : parsed.vocabulary)
      if (tokens_[static_cast<size_t>(id)].has_mark) marked_[id] = replaced(content, decoder_.mark, "");
  }

  void make_model(const Parsed& parsed) {
    std::array<int32_t, 256> byte_tokens;
    byte_tokens.fill(-1);
    IdOfText vocabulary;
    bool has_mark = false;
    for (const auto& [token, id] : parsed.vocabulary) {
      if (const int byte = fallback_byte(token); byte >= 0 && token == fmt::format("<0x{:02X}>", byte))
        byte_tokens[static_cast<size_t>(byte)] = id;
      std::optional<std::string> text = parsed.byte_level ? bytes_of_letters(token) : token;
      has_mark = has_mark || token == kSpaceMark;
      if (text && !text->empty()) vocabulary.emplace(*std::move(text), id);
    }
    find_cuts(parsed, std::ranges::none_of(byte_tokens, [](int32_t id) { return id < 0; }), has_mark);
    model_ = BytePairs(std::move(vocabulary), parsed.merges, byte_tokens, parsed.options);
  }

  // A text can be cut, with the ids of the whole, between two characters that are neighbours in no token made by a
  // merge: no merge reaches over the cut. Short parts repeat, so they come from the cache.
  void find_cuts(const Parsed& parsed, bool has_all_bytes, bool has_mark) {
    const BytePairOptions& options = parsed.options;
    // Runs of unknown characters that become one token must stay together.
    const bool no_runs = options.byte_fallback ? has_all_bytes : !options.fuse_unknown || options.unknown < 0;
    if (parsed.byte_level || options.whole_words || !no_runs) return;
    cuts_ = true;
    cuts_before_mark_ = has_mark;
    std::vector<bool> merged(tokens_.size());
    for (const Merge& merge : parsed.merges) merged[static_cast<size_t>(merge.result)] = true;
    for (const auto& [token, id] : parsed.vocabulary) {
      if (!merged[static_cast<size_t>(id)]) continue;
      for (size_t i = 1; i < token.size(); ++i) joined_.set(byte_pair(token, i));
      std::string_view word = token;
      while (word.starts_with(kSpaceMark)) word.remove_prefix(kSpaceMark.size());
      if (word.find(kSpaceMark) != std::string_view::npos) cuts_before_mark_ = false;
    }
    for (size_t first = 0; first < 256; ++first)  // not inside of a character
      for (size_t second = 0x80; second < 0xC0; ++second) joined_.set(first << 8 | second);
  }
  static size_t byte_pair(std::string_view text, size_t at) {
    return size_t{static_cast<unsigned char>(text[at - 1])} << 8 | static_cast<unsigned char>(text[at]);
  }

  void find_ends(const Parsed& parsed, const std::string& origin) {
    const auto id_of = [&](const std::string& content) {
      for (const AddedToken& token : parsed.added)
        if (token.content == content) return token.id;
      const auto found = parsed.vocabulary.find(content);
      return found == parsed.vocabulary.end() ? -1 : found->second;
    };
    if (!parsed.first_special.empty()) bos_ = id_of(parsed.first_special);
    const int32_t first = bos_;
    nlohmann::ordered_json names = nlohmann::ordered_json::object();
    if (!config_.empty()) names = parse_json(config_, origin + "'s configuration", {.python_words = true});
    const nlohmann::json document = names;
    const JsonValue config(document, origin + "'s configuration");
    const auto named = [&](const char* key) {
      if (!config.has(key)) return -1;
      const JsonValue value = config.at(key);
      return id_of(value.json().is_object() ? value.at("content").text() : value.text());
    };
    if (const int32_t id = named("bos_token"); id >= 0) bos_ = id;
    eos_ = named("eos_token");
    // AutoTokenizer needs a class, and others than this one replace parts of tokenizer.json.
    const char* const unchanged = "PreTrainedTokenizerFast";
    if (!config.has("tokenizer_class") || config.at("tokenizer_class").json() != unchanged) {
      names["tokenizer_class"] = unchanged;
      config_ = names.dump(2) + "\n";
    }
    begins_with_bos_ = first >= 0 && first == bos_;
  }

  // `bare`: nothing is put before the text.
  std::string normalize(std::string_view given, bool bare) const {
    using Kind = NormalizerStep::Kind;
    std::string text(given);
    for (const NormalizerStep& step : normalizer_) {
      if (step.kind == Kind::compose)
        text = canonical_composition(std::move(text));
      else if (step.kind == Kind::replace)
        text = replaced(text, step.pattern, step.content);
      else if (!bare && !text.empty())
        text.insert(0, step.content);
      require(text.size() <= given.size() * kMostGrowth + 4096,
              "tokenizer: its normalizer makes {} bytes of {}; the file is damaged", text.size(), given.size());
    }
    return text;
  }

  std::vector<int32_t> encode_text(std::string_view text, bool start, const Added& added) const {
    require(text.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()) / kMostGrowth,
            "tokenizer: a text of {} bytes is too long; encode it in parts", text.size());
    std::string repaired;
    if (valid_utf8_prefix(text) != text.size()) {
      int64_t broken = 0;
      text = repaired = replace_invalid_utf8(text, broken);
    }
    std::vector<int32_t> ids;
    ids.reserve(text.size() / 3);
    std::vector<AddedTokens::Part> parts, inner;
    added.raw.split(text, parts);
    for (const AddedTokens::Part& part : parts) {
      if (part.id >= 0) {
        ids.push_back(part.id);
        continue;
      }
      std::string_view segment = text.substr(part.begin, part.end - part.begin);
      const bool bare = part.begin == 0 && !start;
      std::string normalized;
      if (!normalizer_.empty()) segment = normalized = normalize(segment, bare);
      added.normalized.split(segment, inner);
      for (const AddedTokens::Part& inside : inner) {
        const std::string_view words = segment.substr(inside.begin, inside.end - inside.begin);
        const bool first = part.begin == 0 && inside.begin == 0;
        if (inside.id >= 0)
          ids.push_back(inside.id);
        else
          encode_segment(words, first && start, first && !start, ids);
      }
    }
    return ids;
  }

  // A part of a text without added tokens. `first`: it begins the text; `bare`: nothing is put before it.
  void encode_segment(std::string_view segment, bool first, bool bare, std::vector<int32_t>& ids) const {
    std::string own;
    if (!prefix_.space.empty() && segment.find(' ') != std::string_view::npos)
      segment = own = replaced(segment, " ", prefix_.space);
    const bool wanted = prefix_.when == Prefix::When::always || (prefix_.when == Prefix::When::first && first);
    if (wanted && !bare && !segment.starts_with(prefix_.text)) segment = own = prefix_.text + std::string(segment);
    split_from(0, segment, ids);
  }

  void split_from(size_t stage, std::string_view text, std::vector<int32_t>& ids) const {
    if (stage == splitters_.size()) return encode_words(text, ids);
    splitters_[stage].split(text, [&](std::string_view piece) { split_from(stage + 1, piece, ids); });
  }

  void encode_words(std::string_view text, std::vector<int32_t>& ids) const {
    size_t begin = 0;
    for (size_t i = 1; cuts_ && i < text.size(); ++i) {
      if (joined_[byte_pair(text, i)] && !(cuts_before_mark_ && begins_word(text, i))) continue;
      model_.encode(text.substr(begin, i - begin), ids);
      begin = i;
    }
    model_.encode(text.substr(begin), ids);
  }
  static bool begins_word(std::string_view text, size_t at) {
    return text[at] == kSpaceMark[0] && text.substr(at).starts_with(kSpaceMark) &&
           !text.substr(0, at).ends_with(kSpaceMark);
  }

  std::string without_mark(const Token& token) const {
    if (!token.has_mark || !decoder_.drops_mark) return token.piece;
    return marked_.at(static_cast<int32_t>(&token - tokens_.data()));
  }

  void strip(std::string& text, int64_t start, int64_t stop) const {
    if (decoder_.strip.empty()) return;
    const std::string_view mark = decoder_.strip;
    size_t begin = 0, end = text.size();
    for (; start > 0 && std::string_view(text).substr(begin).starts_with(mark); --start) begin += mark.size();
    for (; stop > 0 && end > begin && std::string_view(text).substr(begin, end - begin).ends_with(mark); --stop)
      end -= mark.size();
    text = text.substr(begin, end - begin);
  }

  std::string json_, config_;
  std::vector<NormalizerStep> normalizer_;
  Prefix prefix_;
  std::vector<TextSplitter> splitters_;
  DecoderSteps decoder_;
  std::vector<Token> tokens_;
  std::unordered_map<int32_t, std::string> marked_;  // the text of tokens with the mark of Metaspace, without it
  Added all_tokens_;
  Added blank_tokens_;                                // those that consist of white space
  std::unordered_map<std::string, int32_t> special_;  // the others
  BytePairs model_;
  bool cuts_ = false, cuts_before_mark_ = false;
  std::bitset<1 << 16> joined_;  // the last byte of a character and the first of the next: no cut between them
  int32_t bos_ = -1, eos_ = -1;
  bool begins_with_bos_ = false;
};

}  // namespace

std::shared_ptr<const Tokenizer> make_tokenizer_json(std::string json, std::string config, const std::string& origin) {
  return std::make_shared<JsonTokenizer>(std::move(json), std::move(config), origin);
}

}  // namespace furious
