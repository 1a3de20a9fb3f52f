#include "data/parquet.h"

#include "base/error.h"
#include "base/names.h"

#ifdef FURIOUS_PARQUET
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <parquet/arrow/reader.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>
#include <parquet/schema.h>

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

}  // namespace

struct ParquetColumn::State {
  std::string path;
  std::string column;
  std::unique_ptr<parquet::arrow::FileReader> file;
  std::shared_ptr<arrow::RecordBatchReader> rows;
};

ParquetColumn::ParquetColumn(const std::string& path, const std::string& column)
    : state_(std::make_unique<State>(State{path, column, nullptr, nullptr})) {
  auto input = arrow::io::ReadableFile::Open(path);
  check(input.status(), path);
  parquet::arrow::FileReaderBuilder builder;
  check(builder.Open(*input), path);
  parquet::ArrowReaderProperties properties;
  properties.set_batch_size(kRowsAtOnce);
  builder.properties(properties);
  check(builder.Build(&state_->file), path);
  const int index = state_->file->parquet_reader()->metadata()->schema()->ColumnIndex(column);
  if (index < 0) {
    std::shared_ptr<arrow::Schema> schema;
    check(state_->file->GetSchema(&schema), path);
    unknown_name("column of \"" + path + "\"", column, schema->field_names());
  }
  std::vector<int> groups(static_cast<size_t>(state_->file->num_row_groups()));
  for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<int>(i);
  auto rows = state_->file->GetRecordBatchReader(groups, {index});
  check(rows.status(), path);
  state_->rows = std::move(*rows);
}

bool ParquetColumn::next(std::string& bytes, std::vector<size_t>& ends) {
  std::shared_ptr<arrow::RecordBatch> batch;
  check(state_->rows->ReadNext(&batch), state_->path);
  if (!batch) return false;
  const arrow::Array& array = *batch->column(0);
  if (array.type_id() == arrow::Type::STRING)
    append_strings(static_cast<const arrow::StringArray&>(array), bytes, ends);
  else if (array.type_id() == arrow::Type::LARGE_STRING)
    append_strings(static_cast<const arrow::LargeStringArray&>(array), bytes, ends);
  else
    fail("\"{}\": column \"{}\" has type {}, expected string", state_->path, state_->column, array.type()->ToString());
  return true;
}

}  // namespace furious
#else

namespace furious {

struct ParquetColumn::State {};

ParquetColumn::ParquetColumn(const std::string& path, const std::string&) {
  fail(
      "cannot read \"{}\": this build has no Parquet; install Apache Arrow (libarrow-dev and libparquet-dev, "
      "https://arrow.apache.org/install), run cmake again and rebuild",
      path);
}

bool ParquetColumn::next(std::string&, std::vector<size_t>&) {
  return false;
}

}  // namespace furious
#endif

namespace furious {

ParquetColumn::~ParquetColumn() = default;

}  // namespace furious
