// Files written by Arrow itself, read through our reader.
#ifdef FURIOUS_PARQUET
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/writer.h>
#include <parquet/arrow/writer.h>

#include <optional>

#include "data/corpus.h"
#include "data/records.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::Random;
using testing::random_documents;
using testing::read_all;
using testing::TemporaryFolder;

using Texts = std::vector<std::optional<std::string>>;

void check(const arrow::Status& status) {
  require(status.ok(), "{}", status.ToString());
}

template <class Builder>
std::shared_ptr<arrow::Array> text_column(const Texts& texts) {
  Builder builder;
  for (const auto& text : texts) check(text ? builder.Append(*text) : builder.AppendNull());
  return builder.Finish().ValueOrDie();
}

std::shared_ptr<arrow::Array> row_numbers(size_t rows) {
  arrow::Int64Builder builder;
  for (size_t i = 0; i < rows; ++i) check(builder.Append(static_cast<int64_t>(i)));
  return builder.Finish().ValueOrDie();
}

// Columns id (numbers) and text, in groups of rows.
std::string write_parquet(const std::string& path, const std::shared_ptr<arrow::Array>& texts, int64_t rows_per_group) {
  const auto schema = arrow::schema({arrow::field("id", arrow::int64()), arrow::field("text", texts->type())});
  const auto table = arrow::Table::Make(schema, {row_numbers(static_cast<size_t>(texts->length())), texts});
  const auto file = arrow::io::FileOutputStream::Open(path).ValueOrDie();
  const auto keep_types = parquet::ArrowWriterProperties::Builder().store_schema()->build();
  check(parquet::arrow::WriteTable(*table, arrow::default_memory_pool(), file, rows_per_group,
                                   parquet::default_writer_properties(), keep_types));
  check(file->Close());
  return path;
}

std::string write_documents(const std::string& path, const std::vector<std::string>& documents,
                            int64_t rows_per_group) {
  return write_parquet(path, text_column<arrow::StringBuilder>(Texts(documents.begin(), documents.end())),
                       rows_per_group);
}

TEST(Parquet, BothKindsOfStringsInAnyRowGroups) {
  Random random(41);
  const TemporaryFolder folder;
  const std::vector<std::string> documents = random_documents(random, 700);
  const Texts texts(documents.begin(), documents.end());
  for (const int64_t rows_per_group : {1, 100, 256, 1000}) {
    EXPECT_EQ(
        read_all({write_parquet(folder.path("a.parquet"), text_column<arrow::StringBuilder>(texts), rows_per_group)})
            .documents,
        documents);
    EXPECT_EQ(read_all({write_parquet(folder.path("b.parquet"), text_column<arrow::LargeStringBuilder>(texts),
                                      rows_per_group)})
                  .documents,
              documents);
  }
}

TEST(Parquet, SkipsNullAndEmptyTexts) {
  const TemporaryFolder folder;
  const auto read = [&](const Texts& texts) {
    return read_all({write_parquet(folder.path("a.parquet"), text_column<arrow::StringBuilder>(texts), 2)}).documents;
  };
  EXPECT_EQ(read({std::nullopt, "one", "", std::nullopt, "two", std::nullopt}),
            (std::vector<std::string>{"one", "two"}));
  EXPECT_TRUE(read({std::nullopt, std::nullopt, std::nullopt}).empty());
  EXPECT_TRUE(read({}).empty());
}

TEST(Parquet, ContinuesFromAnyBlock) {
  Random random(42);
  const TemporaryFolder folder;
  const std::vector<std::string> documents = random_documents(random, 900);
  const std::vector<std::string> inputs = {write_documents(folder.path("a.parquet"), documents, 300),
                                           write_documents(folder.path("b.parquet"), documents, 77)};
  std::vector<std::string> expected = documents;
  expected.insert(expected.end(), documents.begin(), documents.end());
  const ReaderOptions options;
  BlockReader reader(find_inputs(inputs), options);
  size_t before = 0;
  int blocks = 0;
  for (Block block; reader.next(block); ++blocks) {
    for_each_document_part(block, options, [&](const DocumentPart& part) { before += part.first; });
    const std::vector<std::string> rest(expected.begin() + static_cast<int64_t>(before), expected.end());
    EXPECT_EQ(read_all(inputs, options, block.end).documents, rest);
  }
  EXPECT_EQ(before, expected.size());
  EXPECT_GT(blocks, 4);
}

TEST(Parquet, ErrorsNameFileAndColumn) {
  Random random(43);
  const TemporaryFolder folder;
  const std::string path = write_documents(folder.path("a.parquet"), random_documents(random, 50), 20);
  ReaderOptions options;
  options.field = "txt";
  expect_error([&] { read_all({path}, options); }, {"a.parquet", "txt", "did you mean \"text\"", "id"});
  options.field = "id";
  expect_error([&] { read_all({path}, options); }, {"a.parquet", "column \"id\" has type int64", "expected string"});
}

TEST(Parquet, RecordsWithTextAndNumbers) {
  Random random(45);
  const TemporaryFolder folder;
  const std::vector<std::string> documents = random_documents(random, 300);
  const std::string path = write_documents(folder.path("a.parquet"), documents, 70);
  int64_t visited = 0;
  RecordVisitor visitor;
  visitor.visit = [&](int64_t i, const std::vector<std::string>& texts) {
    EXPECT_EQ(texts, (std::vector<std::string>{documents[static_cast<size_t>(i)], std::to_string(i)}));
    ++visited;
  };
  const auto count = static_cast<int64_t>(documents.size());
  EXPECT_EQ(for_each_record(path, {"text", "id"}, visitor), count);
  EXPECT_EQ(visited, count);
  visitor.wanted = [](int64_t i) { return i % 100 == 69; };
  EXPECT_EQ(for_each_record(path, {"text", "id"}, visitor), count);
  EXPECT_EQ(visited, count + 3);
  expect_error([&] { for_each_record(path, {"txt"}, visitor); }, {"a.parquet", "did you mean \"text\""});
  const std::string cut = folder.write("cut.parquet", testing::read_file(path).substr(0, 999));
  expect_error([&] { for_each_record(cut, {"id"}, visitor); }, {"cannot read", "cut.parquet"});
}

// A stream as datasets.save_to_disk writes it.
TEST(Parquet, ArrowStreams) {
  Random random(45);
  const TemporaryFolder folder;
  const std::vector<std::string> documents = random_documents(random, 500);
  const auto texts = text_column<arrow::StringBuilder>(Texts(documents.begin(), documents.end()));
  const auto schema = arrow::schema({arrow::field("id", arrow::int64()), arrow::field("text", texts->type())});
  const auto batch = arrow::RecordBatch::Make(schema, texts->length(), {row_numbers(documents.size()), texts});
  const std::string path = folder.path("in/data-00000-of-00001.arrow");
  folder.write("in/state.json", "{}");
  const auto file = arrow::io::FileOutputStream::Open(path).ValueOrDie();
  const auto writer = arrow::ipc::MakeStreamWriter(file, schema).ValueOrDie();
  for (int64_t row = 0; row < batch->num_rows(); row += 100) check(writer->WriteRecordBatch(*batch->Slice(row, 100)));
  check(writer->Close());
  check(file->Close());
  EXPECT_EQ(read_all({folder.path("in")}).documents, documents);
  const std::vector<std::string> inputs = {path};
  std::vector<Block> blocks;
  BlockReader reader(find_inputs(inputs), {});
  for (Block block; reader.next(block);) blocks.push_back(block);
  EXPECT_EQ(blocks.size(), 5u);
  std::vector<std::string> rest = read_all(inputs, {}, blocks[1].end).documents;
  EXPECT_EQ(rest, std::vector<std::string>(documents.begin() + 200, documents.end()));
  ReaderOptions options;
  options.field = "txt";
  expect_error([&] { read_all(inputs, options); }, {"arrow", "did you mean \"text\""});
  const std::string bytes = testing::read_file(path);
  BlockReader renamed(find_inputs({folder.write("stream.bin", bytes)}, TextFormat::arrow), {});
  Block first;
  EXPECT_TRUE(renamed.next(first));
  EXPECT_EQ(first.bytes, blocks[0].bytes);
  for (const size_t kept : {size_t{3}, bytes.size() / 2})
    expect_error([&] { read_all({folder.write("cut.arrow", bytes.substr(0, kept))}); }, {"cannot read", "cut.arrow"});
}

TEST(Parquet, TruncatedAndDamagedFilesAreNamed) {
  Random random(44);
  const TemporaryFolder folder;
  std::string bytes = testing::read_file(write_documents(folder.path("a.parquet"), random_documents(random, 500), 100));
  for (const size_t kept : {size_t{0}, size_t{3}, bytes.size() / 2, bytes.size() - 1})
    expect_error([&] { read_all({folder.write("cut.parquet", bytes.substr(0, kept))}); },
                 {"cannot read", "cut.parquet"});
  std::fill(bytes.begin() + 4, bytes.begin() + static_cast<int64_t>(bytes.size()) / 2, '\xFF');
  expect_error([&] { read_all({folder.write("damaged.parquet", bytes)}); }, {"cannot read", "damaged.parquet"});
}

}  // namespace
}  // namespace furious
#endif
