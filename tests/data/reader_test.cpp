#include "data/reader.h"

#include <nlohmann/json.hpp>

#include "data/corpus.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::gzip_of;
using testing::json_line;
using testing::json_lines;
using testing::Random;
using testing::random_documents;
using testing::random_sentence;
using testing::read_all;
using testing::ReadResult;
using testing::TemporaryFolder;
using testing::zstd_of;

ReaderOptions small_blocks(size_t bytes) {
  ReaderOptions options;
  options.block_bytes = bytes;
  return options;
}

TEST(Reader, EveryFormatGivesTheSameDocuments) {
  Random random(1);
  const TemporaryFolder folder;
  const std::vector<std::string> documents = random_documents(random, 50);
  const std::string lines = json_lines(documents);
  const std::vector<std::string> paths = {folder.write("a.jsonl", lines), folder.write("a.jsonl.gz", gzip_of(lines)),
                                          folder.write("a.jsonl.zst", zstd_of(lines))};
  for (const std::string& path : paths)
    for (const size_t block : {64, 1000, 1 << 20})
      EXPECT_EQ(read_all({path}, small_blocks(block)).documents, documents);
}

TEST(Reader, AConcatenationOfCompressedFilesIsOneFile) {
  const TemporaryFolder folder;
  const std::string first = json_line("one");
  const std::string second = json_line("two");
  const std::vector<std::string> expected = {"one", "two"};
  EXPECT_EQ(read_all({folder.write("a.jsonl.gz", gzip_of(first) + gzip_of(second))}).documents, expected);
  EXPECT_EQ(read_all({folder.write("a.jsonl.zst", zstd_of(first) + zstd_of(second))}).documents, expected);
}

TEST(Reader, ATextFileIsOneDocumentForAnyBlockSize) {
  Random random(2);
  const TemporaryFolder folder;
  const std::string text = random_sentence(random, 500);
  const std::string path = folder.write("a.txt", text);
  EXPECT_EQ(read_all({path}).pieces, std::vector<int>{1});
  for (const size_t block : {16, 100, 777}) {
    const ReadResult result = read_all({path}, small_blocks(block));
    ASSERT_EQ(result.documents.size(), 1u);
    ASSERT_TRUE(result.documents[0] == text) << "cut into blocks of " << block;
    EXPECT_GT(result.pieces[0], 3);
    EXPECT_EQ(result.replaced, 0) << "a character was cut";
  }
}

TEST(Reader, TextWithoutAnyBreakIsCutBetweenCharacters) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 300; ++i) text += "日本語";
  const ReadResult result = read_all({folder.write("a.txt", text)}, small_blocks(100));
  EXPECT_EQ(result.documents, std::vector<std::string>{text});
  EXPECT_EQ(result.replaced, 0);
}

TEST(Reader, PiecesAfterTheFirstBeginWithTheSpace) {
  Random random(3);
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "word ";
  const ReaderOptions options = small_blocks(256);
  BlockReader reader(find_inputs({folder.write("a.txt", text)}), options);
  Block block;
  while (reader.next(block)) EXPECT_TRUE(!block.begin.inside || block.bytes.starts_with(" word")) << block.bytes;
}

TEST(Reader, BlankLinesSeparateDocumentsOnRequest) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.txt", "\n\none\nstill one\n\n\ntwo\r\n\r\nthree \n \t\nfour\nfour");
  ReaderOptions options;
  options.split_on_blank_line = true;
  const std::vector<std::string> expected = {"one\nstill one", "two\r", "three ", "four\nfour"};
  EXPECT_EQ(read_all({path}, options).documents, expected);
  for (const size_t block : {24, 32, 40}) {
    options.block_bytes = block;
    EXPECT_EQ(read_all({path}, options).documents, expected) << block;
  }
}

TEST(Reader, SplitsLongJsonDocuments) {
  Random random(4);
  const TemporaryFolder folder;
  const std::vector<std::string> documents = {random_sentence(random, 300), "short", random_sentence(random, 300)};
  const ReadResult result = read_all({folder.write("a.jsonl", json_lines(documents))}, small_blocks(200));
  EXPECT_EQ(result.documents, documents);
  EXPECT_GT(result.pieces[0], 2);
  EXPECT_EQ(result.pieces[1], 1);
}

TEST(Reader, ContinuesFromAnyBlock) {
  Random random(5);
  const TemporaryFolder folder;
  const std::string lines = json_lines(random_documents(random, 20));
  const std::vector<std::string> inputs = {
      folder.write("a.jsonl", lines), folder.write("b.txt", random_sentence(random, 200)),
      folder.write("c.jsonl.zst", zstd_of(lines)), folder.write("d.txt.gz", gzip_of(random_sentence(random, 200)))};
  const ReaderOptions options = small_blocks(300);
  std::vector<Block> blocks;
  BlockReader reader(find_inputs(inputs), options);
  for (Block block; reader.next(block);) blocks.push_back(block);
  ASSERT_GT(blocks.size(), 20u);
  for (size_t i = 0; i + 1 < blocks.size(); ++i) {
    BlockReader continued(find_inputs(inputs), options, blocks[i].end);
    Block block;
    ASSERT_TRUE(continued.next(block));
    EXPECT_EQ(block.bytes, blocks[i + 1].bytes);
    EXPECT_EQ(block.end, blocks[i + 1].end);
  }
}

TEST(Reader, SkipsEmptyDocumentsAndFiles) {
  const TemporaryFolder folder;
  const std::vector<std::string> inputs = {
      folder.write("a.txt", ""), folder.write("b.jsonl", "\n \n{\"text\": \"\"}\n"), folder.write("c.txt", "x")};
  EXPECT_EQ(read_all(inputs).documents, std::vector<std::string>{"x"});
}

TEST(Reader, InvalidUtf8IsReplacedAndCounted) {
  const TemporaryFolder folder;
  const ReadResult text = read_all({folder.write("a.txt",
                                                 "a\xFF"
                                                 "b\xC3")});
  EXPECT_EQ(text.documents, std::vector<std::string>{"a\uFFFDb\uFFFD"});
  EXPECT_EQ(text.replaced, 2);
  const ReadResult json = read_all({folder.write("a.jsonl", "{\"text\": \"a\xFF!\"}\n{\"text\": \"ok\"}\n")});
  EXPECT_EQ(json.documents, (std::vector<std::string>{"a\uFFFD!", "ok"}));
  EXPECT_EQ(json.replaced, 1);
}

TEST(Reader, LoneSurrogatesInJsonAreReplaced) {
  const TemporaryFolder folder;
  const ReadResult result =
      read_all({folder.write("a.jsonl", "{\"text\": \"\\ud83d a \\udc0d \\ud83d\\udc0d \\\\ud83d\"}\n")});
  EXPECT_EQ(result.documents, std::vector<std::string>{"\uFFFD a \uFFFD 🐍 \\ud83d"});
  EXPECT_EQ(result.replaced, 2);
}

TEST(Reader, FieldIsSelectableAndNestedFieldsAreIgnored) {
  const TemporaryFolder folder;
  ReaderOptions options;
  options.field = "body";
  const std::string path =
      folder.write("a.jsonl", R"({"meta": {"body": "no"}, "list": [{"body": "no"}], "body": "yes"})");
  EXPECT_EQ(read_all({path}, options).documents, std::vector<std::string>{"yes"});
}

TEST(Reader, ErrorsNameThePosition) {
  const TemporaryFolder folder;
  const auto jsonl = [&](const std::string& content) { read_all({folder.write("bad.jsonl", content)}); };
  const std::string good = json_line("fine");  // 16 bytes
  expect_error([&] { jsonl(good + good + "{\"text\": oops}\n"); }, {"bad.jsonl", "line 3", "byte 42", "broken JSON"});
  expect_error([&] { jsonl(good + "{\"txt\": \"x\", \"id\": 1}\n"); },
               {"bad.jsonl", "line 2", "byte 16", "\"text\"", "did you mean \"txt\"", "id"});
  expect_error([&] { jsonl(good + "{\"text\": 5}\n"); }, {"line 2", "field \"text\" is a number"});
  expect_error([&] { jsonl("[1]\n"); }, {"line 1", "JSON object"});
  expect_error([&] { jsonl("{\"text\": \"cut"); }, {"line 1", "broken JSON"});
  try {
    jsonl("{\"text\": \"" + std::string(1 << 20, 'x'));
    FAIL();
  } catch (const Error& error) {
    EXPECT_LT(std::string(error.what()).size(), 400u);  // not the whole document
  }
}

TEST(Reader, TruncatedAndDamagedCompressionIsNamed) {
  Random random(6);
  const TemporaryFolder folder;
  const std::string text = json_lines(random_documents(random, 200));
  const std::string zstd = zstd_of(text);
  const std::string gzip = gzip_of(text);
  expect_error([&] { read_all({folder.write("a.jsonl.zst", zstd.substr(0, zstd.size() / 2))}); },
               {"a.jsonl.zst", "truncated", "zstd", fmt::format("byte {} of the file", zstd.size() / 2)});
  expect_error([&] { read_all({folder.write("a.jsonl.gz", gzip.substr(0, gzip.size() - 3))}); },
               {"a.jsonl.gz", "truncated", "gzip"});
  expect_error([&] { read_all({folder.write("b.jsonl.zst", text)}); }, {"b.jsonl.zst", "damaged", "zstd"});
  expect_error([&] { read_all({folder.write("b.txt.gz", text)}); }, {"b.txt.gz", "damaged", "gzip"});
}

TEST(Reader, RefusesALineThatIsTooLong) {
  const TemporaryFolder folder;
  ReaderOptions options = small_blocks(64);
  options.longest_line = 1000;
  const std::string path = folder.write("a.jsonl", json_line("x") + json_line(std::string(5000, 'y')));
  expect_error([&] { read_all({path}, options); }, {"a.jsonl", "line 2", "byte 13", "1000 bytes"});
}

TEST(FindInputs, FoldersGlobsAndOrder) {
  const TemporaryFolder folder;
  folder.write("in/b.txt", "b");
  folder.write("in/a/z.jsonl.gz", gzip_of(json_line("z")));
  folder.write("in/c.txt", "c");
  folder.write("in/readme.md", "not text");
  EXPECT_EQ(read_all({folder.path("in")}).documents, (std::vector<std::string>{"z", "b", "c"}));
  EXPECT_EQ(read_all({folder.path("in/*.txt")}).documents, (std::vector<std::string>{"b", "c"}));
  EXPECT_EQ(read_all({folder.path("in/c.txt"), folder.path("in/b.txt")}).documents,
            (std::vector<std::string>{"c", "b"}));
}

TEST(FindInputs, ErrorsNameTheProblem) {
  const TemporaryFolder folder;
  folder.write("empty/readme.md", "x");
  expect_error([&] { find_inputs({folder.path("none.txt")}); }, {"none.txt", "does not exist"});
  expect_error([&] { find_inputs({folder.path("*.txt")}); }, {"*.txt", "does not exist"});
  expect_error([&] { find_inputs({folder.path("empty")}); }, {"no supported files", ".jsonl"});
  expect_error([&] { find_inputs({folder.write("a.rst", "x")}); }, {"a.rst", "unknown file type", ".txt", "--format"});
}

TEST(FindInputs, DescriptionsOfADatasetAreNotTextOfIt) {
  const TemporaryFolder folder;
  for (const char* name : {"in/data/a.parquet", "in/README.md", "in/notes.md", "in/dataset_info.json", "in/b.txt"})
    folder.write(name, "x");
  std::vector<std::string> names;
  for (const InputFile& file : find_inputs({folder.path("in")})) names.push_back(file.path);
  EXPECT_EQ(names, (std::vector<std::string>{folder.path("in/b.txt"), folder.path("in/data/a.parquet")}));
}

TEST(FindInputs, SeveralSplitsOfADatasetAreRefused) {
  const TemporaryFolder folder;
  folder.write("saved/dataset_dict.json", "{}");
  folder.write("saved/train/data-00000-of-00001.arrow", "x");
  expect_error([&] { find_inputs({folder.path("saved")}); }, {"several splits", "saved/train --test"});
  EXPECT_EQ(find_inputs({folder.path("saved/train")}).size(), 1u);
  folder.write("hub/train-00000-of-00002.parquet", "x");
  folder.write("hub/train-00001-of-00002.parquet", "x");
  EXPECT_EQ(find_inputs({folder.path("hub")}).size(), 2u);
  folder.write("hub/test-00000-of-00001.parquet", "x");
  expect_error([&] { find_inputs({folder.path("hub")}); }, {"several splits", "train-*", "test-*"});
  EXPECT_EQ(find_inputs({folder.path("hub/train-*")}).size(), 2u);
}

std::string csv_of(const std::vector<std::string>& documents, char separator, const std::string& line_break) {
  std::string text = fmt::format("id{}text{}", separator, line_break);
  for (size_t i = 0; i < documents.size(); ++i) {
    std::string quoted;
    for (const char c : documents[i]) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
    text += fmt::format("{}{}\"{}\"{}", i, separator, quoted, line_break);
  }
  return text;
}

// Documents with quotes, separators and line breaks, in every format, in blocks of any size, continued anywhere.
TEST(Reader, RecordsOfAnyFormatForAnyBlockSize) {
  Random random(17);
  const TemporaryFolder folder;
  std::vector<std::string> documents = random_documents(random, 40);
  for (size_t i = 0; i < documents.size(); i += 3) documents[i] += "\"quoted\", and\n\nbroken\tlines\r\n\\";
  nlohmann::json objects = nlohmann::json::array(), strings = nlohmann::json::array();
  std::string pretty;
  for (const std::string& document : documents) {
    objects.push_back({{"more", {1, {{"text", "no"}}}}, {"text", document}});
    strings.push_back(document);
    pretty += objects.back().dump(2) + "\n";
  }
  const std::vector<std::string> paths = {
      folder.write("a.json", objects.dump()),
      folder.write("b.json", objects.dump(4)),
      folder.write("c.json", strings.dump(1)),
      folder.write("d.json", json_lines(documents)),
      folder.write("e.json", pretty),
      folder.write("f.json.gz", gzip_of(objects.dump(1))),
      folder.write("a.csv", csv_of(documents, ',', "\n")),
      folder.write("b.csv", csv_of(documents, ',', "\r\n")),
      folder.write("a.tsv", csv_of(documents, '\t', "\n")),
      folder.write("c.csv.zst", zstd_of("\xEF\xBB\xBF" + csv_of(documents, ',', "\n")))};
  for (const std::string& path : paths)
    for (const size_t block : {4, 100, 1000, 1 << 20}) {
      SCOPED_TRACE(fmt::format("{} in blocks of {}", path, block));
      const ReaderOptions options = small_blocks(block);
      EXPECT_EQ(read_all({path}, options).documents, documents);
      if (block != 1000) continue;
      std::vector<Block> blocks;
      BlockReader reader(find_inputs({path}), options);
      for (Block one; reader.next(one);) blocks.push_back(one);
      for (size_t i = 0; i + 1 < blocks.size(); ++i) {
        BlockReader continued(find_inputs({path}), options, blocks[i].end);
        Block one;
        ASSERT_TRUE(continued.next(one));
        EXPECT_EQ(one.bytes, blocks[i + 1].bytes);
        EXPECT_EQ(one.begin.line, blocks[i + 1].begin.line);
      }
    }
}

TEST(Reader, ErrorsOfRecordsNameThePlace) {
  const TemporaryFolder folder;
  const auto refused = [&](const char* name, const std::string& bytes, const std::vector<std::string>& parts) {
    SCOPED_TRACE(bytes);
    expect_error([&] { read_all({folder.write(name, bytes)}); }, parts);
  };
  refused("a.json", R"([{"text": "x"}, {"text": 3}])", {"a.json", "record 2", "is a number"});
  refused("a.json", R"([{"text": "x"} {"text": "y"}])", {"a.json", "record 2", "no comma"});
  refused("a.json", "[\n{\"text\": \"x\"},\n]", {"record 2", "line 3", "comma before the end"});
  refused("a.json", R"([{"text": "x"}] more)", {"record 2", "follows the end"});
  refused("a.json", R"([{"text": "x"}, {"text": "y)", {"record 2", "ends inside"});
  refused("a.json", R"([{"text": "x"})", {"record 2", "ends before the array"});
  refused("a.json", "[\"a\nb\"]", {"record 1", "line break inside a string"});
  refused("a.json", R"([{"txt": "x"}])", {"record 1", "did you mean \"txt\""});
  refused("a.json", "[7]", {"record 1", "expected a JSON object", "or a string"});
  refused("a.csv", "id,text\n1,x\n2,y,z\n", {"a.csv", "line 3", "3 fields", "2 columns"});
  refused("a.csv", "id,text\n1,\"x\ny\"\n2,\"y\"z\n", {"a.csv", "line 4", "closing quote"});
  refused("a.csv", "id,text\n1,\"x\n2,y\n", {"a.csv", "line 2", "does not close"});
  refused("a.csv", "id,txt\n1,x\n", {"--column", "a.csv", "did you mean \"txt\""});
}

TEST(Reader, HtmlIsItsText) {
  const TemporaryFolder folder;
  std::string page = "<html><head><title>T</title><style>p {}</style></head><body>";
  for (int i = 0; i < 500; ++i) page += fmt::format("<p class=\"a > b\">paragraph&nbsp;{} &lt;&#65;&gt;", i);
  std::string expected = "T";
  for (int i = 0; i < 500; ++i) expected += fmt::format("\n\nparagraph {} <A>", i);
  for (const size_t block : {64, 1000, 1 << 20})
    EXPECT_EQ(read_all({folder.write("a.html", page)}, small_blocks(block)).documents, std::vector{expected}) << block;
}

#ifndef FURIOUS_PARQUET
TEST(Reader, ParquetWithoutArrowSaysHowToGetIt) {
  const TemporaryFolder folder;
  expect_error([&] { read_all({folder.write("a.parquet", "PAR1")}); }, {"a.parquet", "Arrow", "rebuild"});
}
#endif

}  // namespace
}  // namespace furious
