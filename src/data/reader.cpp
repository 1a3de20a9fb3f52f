#include "data/reader.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "base/names.h"
#include "data/csv.h"
#include "data/html.h"
#include "data/json_records.h"
#include "data/parquet.h"
#include "data/utf8.h"

namespace furious {
namespace {

// Of a block and a record of it, for messages.
std::string place_of(const Block& block, int64_t line) {
  const bool is_record = block.file.format == TextFormat::json;
  return fmt::format("\"{}\", {} {}", block.file.path, is_record ? "record" : "line", line);
}

char separator_of(TextFormat format) {
  return format == TextFormat::tsv ? '\t' : ',';
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

// Extracts one string field of a JSON object without building the rest of it. A string alone is the value.
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
    if (wanted_ || depth_ == 0) value = std::move(text);
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
      const std::string place = place_of(block_, number);
      if (block_.file.format == TextFormat::json) return place;  // its bytes are not those of the file
      return fmt::format("{}, byte {}", place, offset + static_cast<int64_t>(column));
    };
    if (!good) fail("{}: broken JSON: {}", where(reader.problem_at), json_reason(reader.problem));
    if (reader.value && !reader.is_object) return std::move(reader.value);
    require(reader.is_object, "{}: expected a JSON object with a field \"{}\", or a string", where(0), options_.field);
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

// The text of a record or row: a whole document, in as many parts as it needs.
void visit_document(std::string_view text, size_t limit, BlockCounts& counts, const Visitor& visit) {
  if (text.empty()) {
    ++counts.empty;
    return;
  }
  bool first = true;
  while (text.size() > limit) {
    const size_t cut = cut_point(text, limit);
    visit({text.substr(0, cut), first, false});
    text.remove_prefix(cut);
    first = false;
  }
  visit({text, first, true});
}

BlockCounts visit_lines(const Block& block, const ReaderOptions& options, const Visitor& visit) {
  LineParser parser(block, options);
  BlockCounts counts;
  const std::string_view bytes = block.bytes;
  int64_t number = block.begin.line;
  for (size_t at = 0; at < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', at), bytes.size());
    const auto text = parser.parse(bytes.substr(at, end - at), ++number, block.begin.offset + static_cast<int64_t>(at));
    if (text) visit_document(*text, options.block_bytes, counts, visit);
    at = end + 1;
  }
  counts.replaced = parser.replaced;
  return counts;
}

BlockCounts visit_csv(const Block& block, const ReaderOptions& options, const Visitor& visit) {
  const char separator = separator_of(block.file.format);
  const std::string_view bytes = block.bytes;
  int64_t line = block.begin.line;
  BlockCounts counts;
  for (size_t at = 0; at < bytes.size();) {
    const size_t end = std::min(csv_record_end(bytes, at, separator), bytes.size());
    const std::string_view record = bytes.substr(at, end - at);
    if (record != "\n" && record != "\r\n") {
      const std::string place = place_of(block, line + 1);
      CsvField field = csv_field(record, separator, block.column.index, place);
      require(field.fields == block.column.columns, "{}: {} fields, but the first line names {} columns", place,
              field.fields, block.column.columns);
      if (valid_utf8_prefix(field.text) != field.text.size())
        field.text = replace_invalid_utf8(field.text, counts.replaced);
      visit_document(field.text, options.block_bytes, counts, visit);
    }
    line += std::count(record.begin(), record.end(), '\n');
    at = end;
  }
  return counts;
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

BlockCounts visit_strings(const Block& block, const ReaderOptions& options, const Visitor& visit) {
  BlockCounts counts;
  size_t begin = 0;
  for (const size_t end : block.ends) {
    const std::string text =
        replace_invalid_utf8(std::string_view(block.bytes).substr(begin, end - begin), counts.replaced);
    visit_document(text, options.block_bytes, counts, visit);
    begin = end;
  }
  return counts;
}

// Text from a filter that is fed with the bytes of a file.
template <class Filter>
class FilteredStream final : public ByteStream {
 public:
  FilteredStream(std::unique_ptr<ByteStream> stream, Filter filter)
      : stream_(std::move(stream)), filter_(std::move(filter)) {}

  size_t read(char* out, size_t bytes) override {
    while (text_.size() - begin_ < bytes && !ended_) {
      text_.erase(0, std::exchange(begin_, 0));
      input_.resize(kAtOnce);
      input_.resize(stream_->read(input_.data(), kAtOnce));
      ended_ = input_.size() < kAtOnce;
      filter_.feed(input_, text_);
      if (ended_) filter_.finish(text_);
    }
    const size_t count = std::min(bytes, text_.size() - begin_);
    std::copy_n(text_.data() + begin_, count, out);
    begin_ += count;
    return count;
  }
  int64_t consumed() const override { return stream_->consumed(); }

 private:
  static constexpr size_t kAtOnce = 256 << 10;

  std::unique_ptr<ByteStream> stream_;
  Filter filter_;
  std::string input_, text_;
  size_t begin_ = 0;  // of the text that was not given out yet
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> open_text_stream(const InputFile& file) {
  auto stream = open_byte_stream(file.path);
  if (file.format == TextFormat::html) return std::make_unique<FilteredStream<HtmlText>>(std::move(stream), HtmlText());
  if (file.format == TextFormat::json)
    return std::make_unique<FilteredStream<JsonRecords>>(std::move(stream), JsonRecords(file.path));
  return stream;
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
  TextSource(const InputFile& file, const ReaderOptions& options, const CorpusPosition& position)
      : TextSource(file, options) {
    stream_->skip(position.offset);
  }

  bool next(Block& block, CorpusPosition& position) override {
    fill(options_.block_bytes + 1);
    if (waiting_.empty()) return false;
    size_t cut = waiting_.size();
    position.inside = false;
    const int64_t to_test = file_.test_from - position.offset;  // where a document ends and another begins
    if (to_test > 0 && to_test <= static_cast<int64_t>(std::min(cut, options_.block_bytes))) {
      cut = static_cast<size_t>(to_test);
    } else if (cut > options_.block_bytes) {
      const size_t blank = options_.split_on_blank_line ? after_last_blank_line(waiting_) : 0;
      cut = blank > 0 ? blank : cut_point(waiting_, options_.block_bytes);
      position.inside = blank == 0;
    }
    give(cut, block, position);
    return true;
  }
  int64_t consumed() const override { return stream_->consumed(); }

 protected:
  TextSource(const InputFile& file, const ReaderOptions& options)
      : options_(options), file_(file), stream_(open_text_stream(file)) {}

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
  const InputFile file_;
  std::string waiting_;
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
      require(waiting_.size() < options_.longest_line, "\"{}\", line {}, byte {}: a line of more than {} bytes",
              file_.path, position.line + 1, position.offset, options_.longest_line);
      wanted *= 2;
    }
  }
};

// Whole records, after the first one, which names the columns.
class BlockReader::CsvSource final : public TextSource {
 public:
  CsvSource(const InputFile& file, const ReaderOptions& options, const CorpusPosition& position)
      : TextSource(file, options), separator_(separator_of(file.format)) {
    header_ = records(1, [](size_t) { return false; });
    if (header_ > 0) find_column();
    const auto offset = static_cast<size_t>(position.offset);
    const size_t have = std::min(offset, waiting_.size());
    waiting_.erase(0, have);
    stream_->skip(static_cast<int64_t>(offset - have));
  }

  bool next(Block& block, CorpusPosition& position) override {
    if (position.offset == 0) {
      give(header_, block, position);
      block.begin = position;
    }
    const size_t wanted = std::max<size_t>(1, options_.block_bytes / 4);
    const size_t end = records(wanted, [&](size_t at) { return at < waiting_.size(); });
    if (end == 0) return false;
    give(end, block, position);
    block.column = column_;
    return true;
  }

 private:
  // The end of the first record and of all that follow while more(end) says so, once `wanted` bytes are there; 0 at the
  // end of the file. The last record need not end in a line break.
  template <class More>
  size_t records(size_t wanted, More&& more) {
    while (true) {
      fill(wanted);
      const bool at_end = waiting_.size() < wanted;
      size_t end = 0;
      do {
        const size_t next = csv_record_end(waiting_, end, separator_);
        if (next == waiting_.npos) break;
        end = next;
      } while (more(end));
      if (at_end && (end == 0 || more(end))) return waiting_.size();
      if (end > 0) return end;
      require(waiting_.size() < options_.longest_line,
              "\"{}\": a record of more than {} bytes; is there a quote that does not close?", file_.path,
              options_.longest_line);
      wanted = 2 * waiting_.size();
    }
  }

  void find_column() {
    constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
    std::string_view record = std::string_view(waiting_).substr(0, header_);
    if (record.starts_with(kByteOrderMark)) record.remove_prefix(kByteOrderMark.size());
    const std::vector<std::string> names = csv_fields(record, separator_, fmt::format("\"{}\", line 1", file_.path));
    const auto found = std::ranges::find(names, options_.field);
    if (found == names.end())
      unknown_name(fmt::format("column (--column) of \"{}\":", file_.path), options_.field, names);
    column_ = {static_cast<size_t>(found - names.begin()), names.size()};
  }

  char separator_;
  size_t header_ = 0;  // bytes of the first record
  CsvColumn column_;
};

class BlockReader::ColumnSource final : public Source {
 public:
  ColumnSource(const InputFile& file, const ReaderOptions& options, const CorpusPosition& position)
      : rows_(file, options.field), size_(file.size), skip_(position.offset) {}

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
  switch (file.format) {
    case TextFormat::parquet:
    case TextFormat::arrow:
      return std::make_unique<ColumnSource>(file, options_, position_);
    case TextFormat::jsonl:
    case TextFormat::json:
      return std::make_unique<LineSource>(file, options_, position_);
    case TextFormat::csv:
    case TextFormat::tsv:
      return std::make_unique<CsvSource>(file, options_, position_);
    case TextFormat::text:
    case TextFormat::html:
      break;
  }
  return std::make_unique<TextSource>(file, options_, position_);
}

bool BlockReader::next(Block& block) {
  while (position_.file < static_cast<int64_t>(files_.size())) {
    const InputFile& file = files_[position_.file];
    if (!source_) source_ = open(file);
    block.begin = position_;
    block.ends.clear();
    if (source_->next(block, position_)) {
      block.file = file;
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

BlockCounts for_each_document_part(Block& block, const ReaderOptions& options, const Visitor& visit) {
  const TextFormat format = block.file.format;
  if (format == TextFormat::jsonl || format == TextFormat::json) return visit_lines(block, options, visit);
  if (format == TextFormat::csv || format == TextFormat::tsv) return visit_csv(block, options, visit);
  if (block.file.is_columnar()) return visit_strings(block, options, visit);
  BlockCounts counts;
  if (valid_utf8_prefix(block.bytes) != block.bytes.size())
    block.bytes = replace_invalid_utf8(block.bytes, counts.replaced);
  if (options.split_on_blank_line)
    visit_paragraphs(block.bytes, block.begin.inside, block.end.inside, visit);
  else
    visit({block.bytes, !block.begin.inside, !block.end.inside});
  return counts;
}

}  // namespace furious
