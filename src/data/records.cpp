#include "data/records.h"

#include <algorithm>

#include "base/error.h"
#include "base/json.h"
#include "base/names.h"
#include "data/byte_stream.h"
#include "data/parquet.h"
#include "data/reader.h"

namespace furious {
namespace {

using Json = nlohmann::json;

std::string text_of(const Json& value, const std::string& place, const std::string& field) {
  if (value.is_string()) return value.get<std::string>();
  require(value.is_number(), "{}: field \"{}\" is neither a string nor a number", place, field);
  return value.dump();
}

std::vector<std::string> parse_line(const std::string& line, const std::string& place,
                                    const std::vector<std::string>& fields) {
  const Json record = parse_json(line, place);
  require(record.is_object(), "{}: is not a JSON object; the file is damaged, or not .jsonl", place);
  std::vector<std::string> names, texts;
  for (const auto& [name, value] : record.items()) names.push_back(name);
  for (const std::string& field : fields) {
    if (!record.contains(field)) unknown_name("field of " + place, field, names);
    texts.push_back(text_of(record[field], place, field));
  }
  return texts;
}

// The lines of a file, one at a time.
class Lines {
 public:
  explicit Lines(const std::string& path) : path_(path), stream_(open_byte_stream(path)) {}

  // False at the end. A last line need not end in a line break.
  bool next(std::string& line) {
    line.clear();
    for (;;) {
      const size_t end = std::min(buffer_.find('\n', begin_), buffer_.size());
      line.append(buffer_, begin_, end - begin_);
      require(line.size() <= kLongestLine,
              "{} is longer than {} bytes; the file is damaged, or not .jsonl: "
              "expected one JSON object per line",
              place(number_ + 1), kLongestLine);
      begin_ = end + 1;
      if (end < buffer_.size()) break;
      buffer_.resize(kAtOnce);
      buffer_.resize(stream_->read(buffer_.data(), kAtOnce));
      begin_ = 0;
      if (!buffer_.empty()) continue;
      if (line.empty()) return false;
      break;
    }
    ++number_;
    return true;
  }
  std::string place() const { return place(number_); }

 private:
  static constexpr size_t kAtOnce = 1 << 20;
  static constexpr size_t kLongestLine = 64 << 20;

  std::string place(int64_t number) const { return fmt::format("\"{}\", line {}", path_, number); }

  std::string path_;
  std::unique_ptr<ByteStream> stream_;
  std::string buffer_;
  size_t begin_ = 0;
  int64_t number_ = 0;  // of the line, from 1 on
};

int64_t visit_lines(const std::string& path, const std::vector<std::string>& fields, int64_t number,
                    const RecordVisitor& visitor) {
  for_each_line(path, [&](const std::string& line, const std::string& place) {
    if (visitor.wanted(number)) {
      std::vector<std::string> texts = parse_line(line, place, fields);
      visitor.visit(number, texts);
    }
    ++number;
  });
  return number;
}

int64_t visit_parquet(const InputFile& file, const std::vector<std::string>& fields, int64_t number,
                      const RecordVisitor& visitor) {
  std::vector<std::vector<std::string>> records;
  for (const std::string& field : fields) {
    ParquetColumn column(file, field, ParquetColumn::Numbers::as_text);
    size_t row = 0;
    std::string bytes;
    std::vector<size_t> ends;
    for (; column.next(bytes, ends); bytes.clear(), ends.clear()) {
      records.resize(std::max(records.size(), row + ends.size()));
      for (size_t i = 0, begin = 0; i < ends.size(); begin = ends[i++], ++row)
        if (visitor.wanted(number + static_cast<int64_t>(row)))
          records[row].push_back(bytes.substr(begin, ends[i] - begin));
    }
  }
  for (std::vector<std::string>& record : records) {
    if (visitor.wanted(number)) visitor.visit(number, record);
    ++number;
  }
  return number;
}

}  // namespace

void for_each_line(const std::string& path, const LineVisitor& visit) {
  Lines lines(path);
  for (std::string line; lines.next(line);)
    if (line.find_first_not_of(" \t\r") != line.npos) visit(line, lines.place());
}

int64_t for_each_record(const std::string& path, const std::vector<std::string>& fields, const RecordVisitor& visitor) {
  int64_t number = 0;
  for (const InputFile& file : find_inputs({path})) {
    require(file.format == TextFormat::jsonl || file.is_columnar(),
            "\"{}\": expected .jsonl (also .gz or .zst), .parquet or .arrow files", file.path);
    number = file.is_columnar() ? visit_parquet(file, fields, number, visitor)
                                : visit_lines(file.path, fields, number, visitor);
  }
  return number;
}

}  // namespace furious
