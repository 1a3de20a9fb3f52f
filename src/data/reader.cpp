#include "data/reader.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/json.h"
#include "base/names.h"
#include "data/byte_stream.h"
#include "data/parquet.h"
#include "data/utf8.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKnownFiles = ".txt, .jsonl (each also .gz or .zst) and .parquet";

std::optional<TextFormat> format_of(std::string name) {
  for (const std::string_view suffix : {".gz", ".zst"})
    if (name.ends_with(suffix)) {
      name.resize(name.size() - suffix.size());
      if (name.ends_with(".parquet")) return std::nullopt;
      break;
    }
  if (name.ends_with(".txt")) return TextFormat::text;
  if (name.ends_with(".jsonl")) return TextFormat::jsonl;
  if (name.ends_with(".parquet")) return TextFormat::parquet;
  return std::nullopt;
}

InputFile describe(const fs::path& path) {
  const auto format = format_of(path.filename().string());
  require(format.has_value(), "input \"{}\": unknown file type; supported are {}", path.string(), kKnownFiles);
  return {path.string(), *format, static_cast<int64_t>(fs::file_size(path)),
          static_cast<int64_t>(fs::last_write_time(path).time_since_epoch().count())};
}

void add_folder(const fs::path& folder, std::vector<InputFile>& files) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && format_of(entry.path().filename().string())) paths.push_back(entry.path());
  require(!paths.empty(), "input \"{}\": no supported files in this folder; supported are {}", folder.string(),
          kKnownFiles);
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths) files.push_back(describe(path));
}

std::vector<std::string> expand_glob(const std::string& pattern) {
  glob_t found = {};
  const int result = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<std::string> paths;
  if (result == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  return paths;
}

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\f' || c == '\v';
}

// The last position in [begin, end) of `text` where `good` holds; 0 if there is none.
template <class Good>
size_t last_place(size_t begin, size_t end, Good&& good) {
  for (size_t i = end; i-- > begin;)
    if (good(i)) return i;
  return 0;
}

// Where to cut a text longer than `limit`, in its last sixteenth below the limit: before a space between words, or a
// line break, or between two characters. The position depends on the text alone, not on how it was read.
size_t cut_point(std::string_view text, size_t limit) {
  const size_t begin = std::max<size_t>(1, limit - limit / 16);
  const auto between_words = [&](size_t i) { return !is_space(text[i - 1]) && !is_space(text[i + 1]); };
  const auto starts_character = [&](size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80; };
  if (const size_t i = last_place(begin, limit, [&](size_t at) { return text[at] == ' ' && between_words(at); }))
    return i;
  if (const size_t i = last_place(begin, limit, [&](size_t at) { return text[at] == '\n' && between_words(at); }))
    return i;
  if (const size_t i = last_place(begin, limit, [&](size_t at) {
        return starts_character(at) && !is_space(text[at]) && !is_space(text[at - 1]);
      }))
    return i;
  const size_t start = last_place(limit - std::min<size_t>(3, limit), limit + 1, starts_character);
  return start > 0 ? start : limit;
}

// The end of the last blank line of `text`; 0 if there is none.
size_t after_last_blank_line(std::string_view text) {
  for (size_t i = text.size(); i-- > 1;) {
    if (text[i] != '\n') continue;
    if (text[i - 1] == '\n' || (i >= 2 && text[i - 1] == '\r' && text[i - 2] == '\n')) return i + 1;
  }
  return 0;
}

// Extracts one string field of a JSON object without building the rest of it.
class FieldReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit FieldReader(std::string_view field) : field_(field) {}

  std::optional<std::string> value;
  std::vector<std::string> fields;
  std::string wrong_type;
  std::string problem;
  size_t problem_at = 0;
  bool is_object = false;

  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool number_integer(number_integer_t) override { return other("a number"); }
  bool number_unsigned(number_unsigned_t) override { return other("a number"); }
  bool number_float(number_float_t, const string_t&) override { return other("a number"); }
  bool binary(binary_t&) override { return other("binary"); }
  bool string(string_t& text) override {
    if (wanted_) value = std::move(text);
    wanted_ = false;
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ == 0) is_object = true;
    return open("an object");
  }
  bool start_array(size_t) override { return open("a list"); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (depth_ != 1 || !is_object) return true;
    wanted_ = name == field_;
    if (fields.size() < 20) fields.push_back(std::move(name));
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    problem = error.what();
    problem_at = position;
    return false;
  }

 private:
  bool other(const char* type) {
    if (wanted_) wrong_type = type;
    wanted_ = false;
    return true;
  }
  bool open(const char* type) {
    other(type);
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  std::string_view field_;
  int depth_ = 0;
  bool wanted_ = false;
};

// JSON as some programs write it has halves of surrogate pairs, \ud83d alone, which are not valid text. Each such
// escape becomes \ufffd.
std::string replace_lone_surrogates(std::string_view line, int64_t& replaced) {
  std::string result(line);
  const auto surrogate_at = [&](size_t at, char low, char high) {
    if (at + 6 > result.size() || result[at] != '\\' || result[at + 1] != 'u') return false;
    const char third = static_cast<char>(std::tolower(static_cast<unsigned char>(result[at + 3])));
    return (result[at + 2] == 'd' || result[at + 2] == 'D') && third >= low && third <= high;
  };
  for (size_t at = 0; at < result.size(); ++at) {
    if (result[at] != '\\') continue;
    if (surrogate_at(at, '8', 'b') && surrogate_at(at + 6, 'c', 'f')) {
      at += 11;
    } else if (surrogate_at(at, '8', 'f')) {
      result.replace(at + 2, 4, "fffd");
      ++replaced;
      at += 5;
    } else {
      ++at;  // the escaped character, which may be a backslash
    }
  }
  return result;
}

class LineParser {
 public:
  LineParser(const Block& block, const ReaderOptions& options) : block_(block), options_(options) {}

  // The field's text; none for a blank line.
  std::optional<std::string> parse(std::string_view line, int64_t number, int64_t offset) {
    if (std::all_of(line.begin(), line.end(), is_space)) return std::nullopt;
    std::string repaired;
    if (valid_utf8_prefix(line) != line.size()) line = repaired = replace_invalid_utf8(line, replaced);
    FieldReader reader(options_.field);
    bool good = nlohmann::json::sax_parse(line, &reader);
    if (!good && reader.problem.find("surrogate") != std::string::npos) {
      const std::string without = replace_lone_surrogates(line, replaced);
      reader = FieldReader(options_.field);
      good = nlohmann::json::sax_parse(without, &reader);
    }
    const auto where = [&](size_t column) {
      return fmt::format("\"{}\", line {}, byte {}", block_.path, number, offset + static_cast<int64_t>(column));
    };
    if (!good) fail("{}: broken JSON: {}", where(reader.problem_at), json_reason(reader.problem));
    require(reader.is_object, "{}: expected a JSON object with a field \"{}\"", where(0), options_.field);
    require(reader.wrong_type.empty(), "{}: field \"{}\" is {}, expected a string", where(0), options_.field,
            reader.wrong_type);
    if (!reader.value) unknown_name(fmt::format("field (--field) at {}:", where(0)), options_.field, reader.fields);
    return std::move(reader.value);
  }

  int64_t replaced = 0;

 private:
  const Block& block_;
  const ReaderOptions& options_;
};

using Visitor = std::function<void(const DocumentPart&)>;

// A whole document, in as many parts as it needs.
void visit_document(std::string_view text, size_t limit, const Visitor& visit) {
  if (text.empty()) return;
  bool first = true;
  while (text.size() > limit) {
    const size_t cut = cut_point(text, limit);
    visit({text.substr(0, cut), first, false});
    text.remove_prefix(cut);
    first = false;
  }
  visit({text, first, true});
}

int64_t visit_lines(const Block& block, const ReaderOptions& options, const Visitor& visit) {
  LineParser parser(block, options);
  const std::string_view bytes = block.bytes;
  int64_t number = block.begin.line;
  for (size_t at = 0; at < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', at), bytes.size());
    const auto text = parser.parse(bytes.substr(at, end - at), ++number, block.begin.offset + static_cast<int64_t>(at));
    if (text) visit_document(*text, options.block_bytes, visit);
    at = end + 1;
  }
  return parser.replaced;
}

// Documents are runs of lines that are not blank.
void visit_paragraphs(std::string_view bytes, bool inside, bool goes_on, const Visitor& visit) {
  bool open = inside;
  bool first = !inside;
  size_t begin = 0;
  size_t end = 0;
  for (size_t at = 0; at < bytes.size();) {
    const size_t line_end = std::min(bytes.find('\n', at), bytes.size());
    const std::string_view line = bytes.substr(at, line_end - at);
    if (!std::all_of(line.begin(), line.end(), is_space)) {
      if (!open) begin = at;
      open = true;
      end = line_end;
    } else if (open) {
      visit({bytes.substr(begin, end - begin), first, true});
      open = false;
      first = true;
    }
    at = line_end + 1;
  }
  if (!open) return;
  visit({goes_on ? bytes.substr(begin) : bytes.substr(begin, end - begin), first, !goes_on});
}

void visit_strings(const Block& block, const ReaderOptions& options, int64_t& replaced, const Visitor& visit) {
  size_t begin = 0;
  for (const size_t end : block.ends) {
    const std::string text = replace_invalid_utf8(std::string_view(block.bytes).substr(begin, end - begin), replaced);
    visit_document(text, options.block_bytes, visit);
    begin = end;
  }
}

}  // namespace

std::vector<InputFile> find_inputs(const std::vector<std::string>& inputs) {
  std::vector<InputFile> files;
  for (const std::string& input : inputs) {
    const bool exists = fs::exists(input);
    const std::vector<std::string> paths = exists ? std::vector<std::string>{input} : expand_glob(input);
    require(!paths.empty(), "input \"{}\" does not exist", input);
    for (const std::string& path : paths) {
      if (fs::is_directory(path))
        add_folder(path, files);
      else
        files.push_back(describe(path));
    }
  }
  require(!files.empty(), "no input files were given");
  return files;
}

// One open file, giving its blocks from `position` on.
class BlockReader::Source {
 public:
  virtual ~Source() = default;
  virtual bool next(Block& block, CorpusPosition& position) = 0;
  virtual int64_t consumed() const = 0;
};

// Bytes that were read and not given out yet.
class BlockReader::TextSource : public Source {
 public:
  TextSource(const std::string& path, const ReaderOptions& options, const CorpusPosition& position)
      : options_(options), path_(path), stream_(open_byte_stream(path)) {
    stream_->skip(position.offset);
  }

  bool next(Block& block, CorpusPosition& position) override {
    fill(options_.block_bytes + 1);
    if (waiting_.empty()) return false;
    size_t cut = waiting_.size();
    position.inside = false;
    if (cut > options_.block_bytes) {
      const size_t blank = options_.split_on_blank_line ? after_last_blank_line(waiting_) : 0;
      cut = blank > 0 ? blank : cut_point(waiting_, options_.block_bytes);
      position.inside = blank == 0;
    }
    give(cut, block, position);
    return true;
  }
  int64_t consumed() const override { return stream_->consumed(); }

 protected:
  void fill(size_t wanted) {
    const size_t have = waiting_.size();
    if (have >= wanted) return;
    waiting_.resize(wanted);
    waiting_.resize(have + stream_->read(waiting_.data() + have, wanted - have));
  }
  void give(size_t cut, Block& block, CorpusPosition& position) {
    block.bytes.assign(waiting_, 0, cut);
    waiting_.erase(0, cut);
    position.offset += static_cast<int64_t>(cut);
    position.line += std::count(block.bytes.begin(), block.bytes.end(), '\n');
  }

  const ReaderOptions& options_;
  std::string path_;
  std::string waiting_;

 private:
  std::unique_ptr<ByteStream> stream_;
};

// Whole lines; smaller blocks, as many short documents fill them evenly.
class BlockReader::LineSource final : public TextSource {
 public:
  using TextSource::TextSource;

  bool next(Block& block, CorpusPosition& position) override {
    size_t wanted = std::max<size_t>(1, options_.block_bytes / 4);
    while (true) {
      fill(wanted);
      if (waiting_.empty()) return false;
      const bool at_end = waiting_.size() < wanted;
      const size_t newline = waiting_.rfind('\n');
      if (at_end || newline != std::string::npos) {
        give(at_end ? waiting_.size() : newline + 1, block, position);
        return true;
      }
      require(waiting_.size() < options_.longest_line, "\"{}\", line {}, byte {}: a line of more than {} bytes", path_,
              position.line + 1, position.offset, options_.longest_line);
      wanted *= 2;
    }
  }
};

class BlockReader::ParquetSource final : public Source {
 public:
  ParquetSource(const InputFile& file, const ReaderOptions& options, const CorpusPosition& position)
      : rows_(file.path, options.field), size_(file.size), skip_(position.offset) {}

  bool next(Block& block, CorpusPosition& position) override {
    do {
      block.bytes.clear();
      block.ends.clear();
      if (!rows_.next(block.bytes, block.ends)) return false;
      row_ += static_cast<int64_t>(block.ends.size());
    } while (row_ <= skip_);
    position.offset = row_;
    return true;
  }
  int64_t consumed() const override { return size_; }

 private:
  ParquetColumn rows_;
  int64_t size_;
  int64_t skip_;
  int64_t row_ = 0;
};

BlockReader::BlockReader(std::vector<InputFile> files, ReaderOptions options, CorpusPosition start)
    : files_(std::move(files)), options_(std::move(options)), position_(start) {
  for (int64_t i = 0; i < position_.file; ++i) finished_bytes_ += files_[i].size;
}

BlockReader::~BlockReader() = default;

std::unique_ptr<BlockReader::Source> BlockReader::open(const InputFile& file) const {
  if (file.format == TextFormat::parquet) return std::make_unique<ParquetSource>(file, options_, position_);
  if (file.format == TextFormat::jsonl) return std::make_unique<LineSource>(file.path, options_, position_);
  return std::make_unique<TextSource>(file.path, options_, position_);
}

bool BlockReader::next(Block& block) {
  while (position_.file < static_cast<int64_t>(files_.size())) {
    const InputFile& file = files_[position_.file];
    if (!source_) source_ = open(file);
    block.begin = position_;
    block.ends.clear();
    if (source_->next(block, position_)) {
      block.format = file.format;
      block.path = file.path;
      block.end = position_;
      block.consumed = finished_bytes_ + source_->consumed();
      return true;
    }
    source_.reset();
    finished_bytes_ += file.size;
    position_ = {position_.file + 1, 0, 0, false};
  }
  return false;
}

int64_t for_each_document_part(Block& block, const ReaderOptions& options, const Visitor& visit) {
  if (block.format == TextFormat::jsonl) return visit_lines(block, options, visit);
  int64_t replaced = 0;
  if (block.format == TextFormat::parquet) {
    visit_strings(block, options, replaced, visit);
    return replaced;
  }
  if (valid_utf8_prefix(block.bytes) != block.bytes.size()) block.bytes = replace_invalid_utf8(block.bytes, replaced);
  if (options.split_on_blank_line)
    visit_paragraphs(block.bytes, block.begin.inside, block.end.inside, visit);
  else
    visit({block.bytes, !block.begin.inside, !block.end.inside});
  return replaced;
}

}  // namespace furious
