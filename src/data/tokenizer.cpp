#include "data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <system_error>
#include <unordered_map>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/names.h"
#include "base/number.h"
#include "data/sentencepiece_model.h"
#include "data/tokenizer_files.h"
#include "data/tokenizer_json.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModelFile = "tokenizer.model";
constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr const char* kJsonFile = "tokenizer.json";
constexpr uint64_t kMostModelBytes = 64 << 20;
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // ▁, SentencePiece's space

void check_id(const Tokenizer& tokenizer, int32_t id) {
  require(id >= 0 && id < tokenizer.vocabulary_size(), "tokenizer: id {} is outside the vocabulary 0..{}", id,
          tokenizer.vocabulary_size() - 1);
}

// The library's message without its prefix of source line and condition.
std::string reason_of(const sentencepiece::util::Status& status) {
  const std::string message = status.message();
  const size_t bracket = message.rfind("] ");
  return bracket == std::string::npos || bracket + 2 == message.size() ? message : message.substr(bracket + 2);
}

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    for (size_t i = 0; i < text.size(); ++i) ids[i] = static_cast<unsigned char>(text[i]);
    return ids;
  }
  std::vector<int32_t> encode_continuation(std::string_view text) const override { return encode(text); }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) text += piece(id);
    return text;
  }
  std::string piece(int32_t id) const override {
    check_id(*this, id);
    return id < 256 ? std::string(1, static_cast<char>(id)) : std::string();
  }

  int32_t vocabulary_size() const override { return 258; }
  int32_t bos() const override { return 256; }
  int32_t eos() const override { return 257; }
  std::string kind() const override { return "byte"; }
  std::string fingerprint() const override { return "byte"; }
  TokenizerFiles files(bool bos) const override { return byte_tokenizer_files(bos); }
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string model, const std::string& origin) : model_(std::move(model)) {
    require(!model_.empty(), "tokenizer \"{}\" is an empty file, expected a SentencePiece model", origin);
    check_sentencepiece_model(model_, origin);
    try {
      const auto status = processor_.LoadFromSerializedProto(model_);
      require(status.ok(), "tokenizer \"{}\" is not a SentencePiece model: {}", origin, reason_of(status));
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {  // of the tries that the library builds
      fail("tokenizer \"{}\" is not a SentencePiece model: {}", origin, error.what());
    }
    require(processor_.GetPieceSize() > 0, "tokenizer \"{}\" is not a SentencePiece model: it has no pieces", origin);
    const std::vector<std::string> probe = processor_.EncodeAsPieces("a");
    adds_space_ = !probe.empty() && probe[0].starts_with(kSpaceMark);
    const std::vector<std::string> line_break = processor_.EncodeAsPieces("\n");
    word_by_word_ = encodes_word_by_word(model_) && line_break.size() == 2 && line_break[0] == kSpaceMark;
    symbols_ = user_defined_pieces(model_);
    std::erase_if(symbols_, [](const std::string& symbol) {  // blanks, and single characters, which cannot be cut
      return symbol.find_first_not_of(" \t\n") == std::string::npos || symbol.size() <= utf8_bytes_of(symbol[0]);
    });
  }

  std::vector<int32_t> encode(std::string_view text) const override {
    if (!word_by_word_ || text.find(kSpaceMark) != std::string_view::npos) return encode_whole(text);
    std::vector<int32_t> ids;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = word_end(text, begin);
      const std::string_view word = text.substr(begin, end - begin);
      // The model puts a space before what it is given: at the start of the text it belongs there, it stands for the
      // first space of a word, and before a line break it is one too many.
      const bool own_space = begin > 0 && word[0] == ' ';
      const std::span<const int32_t> part = encode_word(own_space ? word.substr(1) : word);
      ids.insert(ids.end(), part.begin() + (begin > 0 && !own_space ? 1 : 0), part.end());
      begin = end;
    }
    return ids;
  }

  // The space that the model puts before a text replaces the one the continuation begins with; before
  // anything else it is dropped where it is a token of its own.
  std::vector<int32_t> encode_continuation(std::string_view text) const override {
    if (!adds_space_) return encode(text);
    if (text.starts_with(' ')) return encode(text.substr(1));
    std::vector<int32_t> ids = encode(text);
    if (!ids.empty() && processor_.IdToPiece(ids[0]) == kSpaceMark) ids.erase(ids.begin());
    return ids;
  }

  // The library always finds user-defined symbols: the text is cut inside of them.
  std::vector<int32_t> encode_literal(std::string_view text, bool start) const override {
    std::vector<int32_t> ids;
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
      end = symbol_cut(text, begin);
      const std::string_view part = text.substr(begin, end - begin);
      const std::vector<int32_t> own = start && begin == 0 ? encode(part) : encode_continuation(part);
      ids.insert(ids.end(), own.begin(), own.end());
    }
    return ids;
  }
  int32_t special(std::string_view content) const override {
    const int32_t id = processor_.PieceToId(content);
    const bool named = id >= 0 && id < vocabulary_size() && processor_.IdToPiece(id) == content;
    return named && (processor_.IsControl(id) || std::ranges::binary_search(symbols_, content)) ? id : -1;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    for (const int32_t id : ids) check_id(*this, id);
    std::string text;
    const auto status = processor_.Decode(std::vector<int>(ids.begin(), ids.end()), &text);
    require(status.ok(), "tokenizer: decoding failed: {}", reason_of(status));
    return text;
  }

  std::string piece(int32_t id) const override {
    check_id(*this, id);
    if (processor_.IsControl(id)) return {};
    if (processor_.IsUnknown(id)) return decode(std::span(&id, 1));
    const std::string& piece = processor_.IdToPiece(id);
    if (processor_.IsByte(id))
      return std::string(1, static_cast<char>(*parse_number<int>(std::string_view(piece).substr(3, 2), 16)));
    std::string text;
    for (size_t at = 0; at < piece.size();) {
      const bool space = piece.compare(at, kSpaceMark.size(), kSpaceMark) == 0;
      text += space ? ' ' : piece[at];
      at += space ? kSpaceMark.size() : 1;
    }
    return text;
  }

  int32_t vocabulary_size() const override { return processor_.GetPieceSize(); }
  int32_t bos() const override { return processor_.bos_id(); }
  int32_t eos() const override { return processor_.eos_id(); }
  std::string kind() const override { return "sentencepiece"; }
  std::string fingerprint() const override { return fmt::format("fnv1a64:{:016x}", hash_of(model_)); }
  TokenizerFiles files(bool bos) const override { return sentencepiece_files(model_, bos); }

 private:
  // Words repeat, so each thread caches those of the tokenizer it used last, up to a few megabytes.
  struct WordCache {
    static constexpr size_t kMostWords = 1 << 16;
    static constexpr size_t kLongestWord = 32;
    uint64_t owner = 0;
    std::unordered_map<std::string, std::vector<int32_t>> words;
    std::string key;
    std::vector<int32_t> other;  // the last word that was not kept
  };

  static uint64_t next_number() {
    static std::atomic<uint64_t> last = 0;
    return ++last;
  }

  // A word ends before a space or a line break that no space precedes; a single space at the end of the text stays with
  // the word before it.
  static size_t word_end(std::string_view text, size_t begin) {
    for (size_t i = begin + 1; i < text.size(); ++i) {
      if (text[i - 1] == ' ') continue;
      if (text[i] == '\n' || (text[i] == ' ' && i + 1 < text.size())) return i;
    }
    return text.size();
  }

  // The first place after `begin` that lies inside of a user-defined symbol, after its first character.
  size_t symbol_cut(std::string_view text, size_t begin) const {
    size_t cut = text.size();
    for (const std::string& symbol : symbols_) {
      const size_t at = text.find(symbol, begin);
      if (at != std::string_view::npos) cut = std::min(cut, at + utf8_bytes_of(symbol[0]));
    }
    return cut;
  }

  std::vector<int32_t> encode_whole(std::string_view text) const {
    std::vector<int> ids;
    const auto status = processor_.Encode(text, &ids);
    require(status.ok(), "tokenizer: encoding failed: {}", reason_of(status));
    return ids;
  }

  // Valid until the next call on this thread.
  std::span<const int32_t> encode_word(std::string_view word) const {
    thread_local WordCache cache;
    if (cache.owner != number_) {
      cache.words.clear();
      cache.owner = number_;
    }
    if (word.size() > WordCache::kLongestWord) return cache.other = encode_whole(word);
    cache.key.assign(word);
    const auto known = cache.words.find(cache.key);
    if (known != cache.words.end()) return known->second;
    if (cache.words.size() >= WordCache::kMostWords) return cache.other = encode_whole(word);
    return cache.words[cache.key] = encode_whole(word);
  }

  std::string model_;
  sentencepiece::SentencePieceProcessor processor_;
  std::vector<std::string> symbols_;  // user-defined pieces that are words
  uint64_t number_ = next_number();
  bool adds_space_ = false;
  bool word_by_word_ = false;
};

// The kind of the tokenizer that save_tokenizer wrote into a folder; empty if something else did.
std::string saved_kind(const fs::path& folder) {
  const fs::path path = folder / kConfigFile;
  if (!fs::exists(path)) return {};
  const nlohmann::json parsed = read_json(path, {.python_words = true});
  const JsonValue json(parsed, path.string());
  if (json.has(kSavedKindKey)) return json.at(kSavedKindKey).text();
  return json.has("tokenizer_class") && json.at("tokenizer_class").text() == "byte" ? "byte" : "";
}

// tokenizer.json with what lies beside it and names bos and eos.
std::shared_ptr<const Tokenizer> load_tokenizer_json(const fs::path& path) {
  std::string config;
  for (const char* name : {kConfigFile, "special_tokens_map.json"}) {
    const fs::path beside = path.parent_path() / name;
    if (!config.empty() || !fs::exists(beside)) continue;
    config = read_text(beside, kMostModelBytes);
  }
  return make_tokenizer_json(read_text(path, JsonLimits().bytes), std::move(config), path.string());
}

// Passes lines to the trainer; an exception is kept until the trainer, which is not exception-safe, has returned.
class TrainerLines final : public sentencepiece::SentenceIterator {
 public:
  explicit TrainerLines(LineSource& lines) : lines_(lines) { Next(); }
  bool done() const override { return done_; }
  void Next() override {
    try {
      done_ = !lines_.next(line_);
      count_ += done_ ? 0 : 1;
    } catch (...) {
      exception_ = std::current_exception();
      done_ = true;
    }
  }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

  int64_t count() const { return count_; }
  void rethrow() const {
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  LineSource& lines_;
  std::string line_;
  std::exception_ptr exception_;
  int64_t count_ = 0;
  bool done_ = false;
};

}  // namespace

std::vector<int32_t> Tokenizer::encode_literal(std::string_view text, bool start) const {
  return start ? encode(text) : encode_continuation(text);
}

int32_t Tokenizer::special(std::string_view) const {
  return -1;
}

std::string Tokenizer::first_piece(int32_t id) const {
  const std::string inside = piece(id);
  if (!inside.starts_with(' ')) return inside;  // decoding would also replace a byte that is no character by itself
  return decode(std::span(&id, 1));
}

std::shared_ptr<const Tokenizer> make_sentencepiece(std::string model, const std::string& origin) {
  return std::make_shared<SentencePieceTokenizer>(std::move(model), origin);
}

std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& name_or_path) {
  const bool is_folder = fs::is_directory(name_or_path);
  const std::string saved = is_folder ? saved_kind(name_or_path) : "";
  if (name_or_path == "byte" || saved == "byte") return std::make_shared<ByteTokenizer>();
  fs::path path = name_or_path;
  if (is_folder) path /= saved.empty() && fs::exists(path / kJsonFile) ? kJsonFile : kModelFile;
  if (!fs::exists(path)) {
    const std::vector<std::string> built_in = {"byte"};
    const std::string near = nearest_name(name_or_path, built_in);
    fail("tokenizer \"{}\" does not exist{}; give a SentencePiece model file, a tokenizer.json, or \"byte\"",
         path.string(), near.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", near));
  }
  if (path.extension() == ".json") return load_tokenizer_json(path);
  return make_sentencepiece(read_text(path, kMostModelBytes), path.string());
}

bool has_tokenizer(const fs::path& folder) {
  return std::ranges::any_of(kTokenizerFiles, [&](const char* name) { return fs::exists(folder / name); });
}

void save_tokenizer(const fs::path& directory, const Tokenizer& tokenizer, bool bos) {
  const TokenizerFiles files = tokenizer.files(bos);
  for (const char* name : kTokenizerFiles)
    if (!files.contains(name)) fs::remove(directory / name);
  for (const auto& [name, content] : files) write_text(directory / name, content);
}

std::string train_sentencepiece(LineSource& lines, const TokenizerTraining& training) {
  constexpr int32_t kLeast = 3 + 256;  // unknown, bos, eos and the bytes
  require(training.vocabulary_size > kLeast,
          "tokenizer train: --vocab {}, expected more than {} (bytes and special tokens)", training.vocabulary_size,
          kLeast);
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(training.vocabulary_size)},
      {"byte_fallback", "true"},
      {"split_digits", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"character_coverage", "0.9999"},
      {"input_sentence_size", std::to_string(training.sentences)},
      {"max_sentence_length", "65536"},
      {"num_threads", std::to_string(training.threads)},
      {"minloglevel", "2"},
  };
  sentencepiece::SetRandomGeneratorSeed(1);
  TrainerLines iterator(lines);
  iterator.rethrow();
  require(!iterator.done(), "tokenizer train: the input has no text; give files with text");
  std::string model;
  sentencepiece::util::Status status;
  try {
    status = sentencepiece::SentencePieceTrainer::Train(options, &iterator, &model);
  } catch (const std::system_error& error) {
    fail("tokenizer train: cannot start {} threads: {}; use fewer with --threads", training.threads,
         error.code().message());
  }
  iterator.rethrow();
  require(status.ok(), "tokenizer train: vocabulary of {} from {} lines: {}", training.vocabulary_size,
          iterator.count(), reason_of(status));
  return model;
}

}  // namespace furious
