#include "data/records.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/names.h"
#include "data/byte_stream.h"
#include "data/parquet.h"
#include "data/reader.h"

namespace furious {
namespace {

using Json = nlohmann::json;
using Records = std::vector<std::vector<std::string>>;

std::string text_of(const Json& value, const std::string& place, const std::string& field) {
  if (value.is_string()) return value.get<std::string>();
  require(value.is_number(), "{}: field \"{}\" is neither text nor a number", place, field);
  return value.dump();
}

std::vector<std::string> parse_line(const std::string& line, const std::string& place,
                                    const std::vector<std::string>& fields) {
  const Json record = Json::parse(line, nullptr, false);
  require(record.is_object(), "{}: is no JSON object: the file is damaged, or no .jsonl", place);
  std::vector<std::string> names, texts;
  for (const auto& [name, value] : record.items()) names.push_back(name);
  for (const std::string& field : fields) {
    if (!record.contains(field)) unknown_name("field of " + place, field, names);
    texts.push_back(text_of(record[field], place, field));
  }
  return texts;
}

Records read_lines(const std::string& path, const std::vector<std::string>& fields) {
  constexpr size_t kAtOnce = 1 << 20;
  const auto stream = open_byte_stream(path);
  std::string bytes;
  for (size_t got = kAtOnce; got == kAtOnce;) {
    const size_t before = bytes.size();
    bytes.resize(before + kAtOnce);
    got = stream->read(bytes.data() + before, kAtOnce);
    bytes.resize(before + got);
  }
  Records records;
  int64_t number = 0;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', begin), bytes.size());
    const std::string line = bytes.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    records.push_back(parse_line(line, fmt::format("\"{}\", line {}", path, number), fields));
  }
  return records;
}

Records read_parquet(const std::string& path, const std::vector<std::string>& fields) {
  Records records;
  for (const std::string& field : fields) {
    ParquetColumn column(path, field, ParquetColumn::Numbers::as_text);
    std::string bytes;
    std::vector<size_t> ends;
    while (column.next(bytes, ends)) {
    }
    records.resize(std::max(records.size(), ends.size()));
    for (size_t row = 0, begin = 0; row < ends.size(); begin = ends[row++])
      records[row].push_back(bytes.substr(begin, ends[row] - begin));
  }
  return records;
}

}  // namespace

Records read_records(const std::string& path, const std::vector<std::string>& fields) {
  const std::vector<InputFile> files = find_inputs({path});
  require(files.size() == 1 && files[0].format != TextFormat::text,
          "\"{}\": expected one .jsonl (also .gz or .zst) or .parquet file", path);
  return files[0].format == TextFormat::parquet ? read_parquet(files[0].path, fields)
                                                : read_lines(files[0].path, fields);
}

}  // namespace furious
