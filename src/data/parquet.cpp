#include "data/parquet.h"

#include "base/error.h"
#include "base/names.h"

#ifdef FURIOUS_PARQUET
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/reader.h>
#include <parquet/arrow/reader.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>
#include <parquet/schema.h>

#include <iterator>

namespace furious {
namespace {

constexpr int64_t kRowsAtOnce = 256;

void check(const arrow::Status& status, const std::string& path) {
  require(status.ok(), "cannot read \"{}\": {}", path, status.ToString());
}

template <class Array>
void append_strings(const Array& array, std::string& bytes, std::vector<size_t>& ends) {
  for (int64_t row = 0; row < array.length(); ++row) {
    if (!array.IsNull(row)) bytes.append(array.GetView(row));
    ends.push_back(bytes.size());
  }
}

template <class Array>
void append_numbers(const arrow::Array& any, std::string& bytes, std::vector<size_t>& ends) {
  const auto& array = static_cast<const Array&>(any);
  for (int64_t row = 0; row < array.length(); ++row) {
    if (!array.IsNull(row)) fmt::format_to(std::back_inserter(bytes), "{}", array.Value(row));
    ends.push_back(bytes.size());
  }
}

// False where the column holds something else.
bool append_any_numbers(const arrow::Array& array, std::string& bytes, std::vector<size_t>& ends) {
  switch (array.type_id()) {
    case arrow::Type::INT32:
      append_numbers<arrow::Int32Array>(array, bytes, ends);
      return true;
    case arrow::Type::INT64:
      append_numbers<arrow::Int64Array>(array, bytes, ends);
      return true;
    case arrow::Type::FLOAT:
      append_numbers<arrow::FloatArray>(array, bytes, ends);
      return true;
    case arrow::Type::DOUBLE:
      append_numbers<arrow::DoubleArray>(array, bytes, ends);
      return true;
    default:
      return false;
  }
}

}  // namespace

struct ParquetColumn::State {
  std::string path;
  std::string column;
  Numbers numbers;
  std::unique_ptr<parquet::arrow::FileReader> file;
  std::shared_ptr<arrow::RecordBatchReader> rows;
  int index = 0;  // of the column in a batch of rows

  void open_stream(const std::shared_ptr<arrow::io::ReadableFile>& input);
  void open_parquet(const std::shared_ptr<arrow::io::ReadableFile>& input);
};

ParquetColumn::ParquetColumn(const InputFile& file, const std::string& column, Numbers numbers)
    : state_(std::make_unique<State>(State{file.path, column, numbers, nullptr, nullptr})) {
  auto input = arrow::io::ReadableFile::Open(file.path);
  check(input.status(), file.path);
  if (file.format == TextFormat::arrow)
    state_->open_stream(*input);
  else
    state_->open_parquet(*input);
}

// An IPC stream, as datasets.save_to_disk writes it.
void ParquetColumn::State::open_stream(const std::shared_ptr<arrow::io::ReadableFile>& input) {
  auto stream = arrow::ipc::RecordBatchStreamReader::Open(input);
  check(stream.status(), path);
  const auto schema = (*stream)->schema();
  index = schema->GetFieldIndex(column);
  if (index < 0) unknown_name("column of \"" + path + "\"", column, schema->field_names());
  rows = *stream;
}

void ParquetColumn::State::open_parquet(const std::shared_ptr<arrow::io::ReadableFile>& input) {
  parquet::arrow::FileReaderBuilder builder;
  check(builder.Open(input), path);
  parquet::ArrowReaderProperties properties;
  properties.set_batch_size(kRowsAtOnce);
  builder.properties(properties);
  check(builder.Build(&file), path);
  const int found = file->parquet_reader()->metadata()->schema()->ColumnIndex(column);
  if (found < 0) {
    std::shared_ptr<arrow::Schema> schema;
    check(file->GetSchema(&schema), path);
    unknown_name("column of \"" + path + "\"", column, schema->field_names());
  }
  std::vector<int> groups(static_cast<size_t>(file->num_row_groups()));
  for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<int>(i);
  auto reader = file->GetRecordBatchReader(groups, {found});
  check(reader.status(), path);
  rows = std::move(*reader);
}

bool ParquetColumn::next(std::string& bytes, std::vector<size_t>& ends) {
  std::shared_ptr<arrow::RecordBatch> batch;
  check(state_->rows->ReadNext(&batch), state_->path);
  if (!batch) return false;
  const arrow::Array& array = *batch->column(state_->index);
  if (array.type_id() == arrow::Type::STRING)
    append_strings(static_cast<const arrow::StringArray&>(array), bytes, ends);
  else if (array.type_id() == arrow::Type::LARGE_STRING)
    append_strings(static_cast<const arrow::LargeStringArray&>(array), bytes, ends);
  else if (state_->numbers == Numbers::refused || !append_any_numbers(array, bytes, ends))
    fail("\"{}\": column \"{}\" has type {}, expected string", state_->path, state_->column, array.type()->ToString());
  return true;
}

}  // namespace furious
#else

namespace furious {

struct ParquetColumn::State {};

ParquetColumn::ParquetColumn(const InputFile& file, const std::string&, Numbers) {
  fail(
      "cannot read \"{}\": this build has no Parquet and no Arrow; install Apache Arrow (libarrow-dev and "
      "libparquet-dev, "
      "https://arrow.apache.org/install), run cmake again and rebuild",
      file.path);
}

bool ParquetColumn::next(std::string&, std::vector<size_t>&) {
  return false;
}

}  // namespace furious
#endif

namespace furious {

ParquetColumn::~ParquetColumn() = default;

}  // namespace furious
