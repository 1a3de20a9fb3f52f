#include "data/dataset.h"

#include <filesystem>

#include "data/corpus.h"
#include "data/tokenize.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::json_lines;
using testing::read_file;
using testing::TemporaryFolder;

class DatasetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::Random random(1);
    documents = testing::random_documents(random, 60);
    TokenizeOptions options;
    options.inputs = {folder.write("in.jsonl", json_lines(documents))};
    options.tokenizer = "byte";
    options.out = folder.path("data");
    options.test_fraction = 0.1;
    options.shard_tokens = 2000;
    tokenize_corpus(options);
  }
  void damage(const std::string& name, size_t at) {
    std::string content = read_file(folder.path("data/" + name));
    content.at(at) ^= 0x01;
    folder.write("data/" + name, content);
  }
  std::string data() const { return folder.path("data"); }

  TemporaryFolder folder;
  std::vector<std::string> documents;
};

TEST_F(DatasetTest, DocumentsTileTheTokens) {
  const Dataset dataset(data());
  const TokenView& tokens = dataset.tokens(Split::train);
  ASSERT_GT(dataset.manifest()[Split::train].shards.size(), 2u);
  int64_t at = 0;
  for (int64_t i = 0; i < tokens.documents(); ++i) {
    const DocumentRange range = tokens.document(i);
    EXPECT_EQ(range.begin, at);
    EXPECT_EQ(tokens.document_at(range.begin), i);
    EXPECT_EQ(tokens.document_at(range.end - 1), i);
    at = range.end;
  }
  EXPECT_EQ(at, tokens.size());
}

TEST_F(DatasetTest, CopiesAcrossShards) {
  const TokenView tokens = Dataset(data()).tokens(Split::train);
  std::vector<int32_t> all(tokens.size());
  tokens.copy(0, tokens.size(), all.data());
  testing::Random random(2);
  for (int i = 0; i < 100; ++i) {
    const int64_t begin = random.integer(0, tokens.size());
    std::vector<int32_t> part(random.integer(0, tokens.size() - begin));
    tokens.copy(begin, static_cast<int64_t>(part.size()), part.data());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + begin));
  }
  expect_error([&] { tokens.copy(1, tokens.size(), all.data()); }, {"asked for", "it has"});
  expect_error([&] { tokens.document(tokens.documents()); }, {"document"});
}

TEST_F(DatasetTest, TruncatedShard) {
  fs::resize_file(folder.path("data/train-00001.tokens"), 100);
  expect_error([&] { Dataset dataset(data()); }, {"train-00001.tokens", "truncated", "100 bytes"});
}

TEST_F(DatasetTest, EmptyShard) {
  fs::resize_file(folder.path("data/train-00001.tokens"), 0);
  expect_error([&] { Dataset dataset(data()); }, {"train-00001.tokens", "is empty", "not written completely"});
}

TEST_F(DatasetTest, MissingShard) {
  fs::remove(folder.path("data/train-00000.documents"));
  expect_error([&] { Dataset dataset(data()); }, {"train-00000.documents", "no such file"});
}

TEST_F(DatasetTest, DamagedTokensAreFoundByTheirChecksum) {
  damage("train-00001.tokens", 80);
  expect_error([&] { Dataset(data()).verify(); }, {"train-00001.tokens", "damaged", "CRC-32"});
}

TEST_F(DatasetTest, IdsOutsideTheVocabularyAreNotGivenOut) {
  damage("train-00000.tokens", 65);  // the high byte of the first id
  damage("train-00000.tokens", 64);
  std::string content = read_file(folder.path("data/train-00000.tokens"));
  content.at(65) = '\x7F';
  folder.write("data/train-00000.tokens", content);
  const Dataset dataset(data());
  int32_t id = 0;
  expect_error([&] { dataset.tokens(Split::train).copy(0, 1, &id); }, {"train-00000.tokens", "damaged", "258"});
}

TEST_F(DatasetTest, DamagedHeadersAndDocumentEnds) {
  damage("train-00000.tokens", 0);
  expect_error([&] { Dataset dataset(data()); }, {"train-00000.tokens", "header"});
  damage("train-00000.tokens", 0);
  damage("train-00000.tokens", 16);
  expect_error([&] { Dataset dataset(data()); }, {"train-00000.tokens", "differs from the manifest"});
  damage("train-00000.tokens", 16);
  damage("train-00000.documents", 64 + 7);  // the first end becomes huge
  const Dataset dataset(data());
  expect_error([&] { dataset.tokens(Split::train).document(0); }, {"train-00000.documents", "damaged"});
  expect_error([&] { dataset.tokens(Split::train).document(1); }, {"train-00000.documents", "damaged"});
}

TEST_F(DatasetTest, DamagedManifest) {
  folder.write("data/manifest.json", "{");
  expect_error([&] { Dataset dataset(data()); }, {"manifest.json", "not JSON"});
  folder.write("data/manifest.json", "{\"format\": \"furious-tokens\", \"version\": 1}");
  expect_error([&] { Dataset dataset(data()); }, {"manifest.json", "tokenizer"});
  folder.write("data/manifest.json", "{\"format\": \"other\", \"version\": 1}");
  expect_error([&] { Dataset dataset(data()); }, {"manifest.json", "format"});
}

TEST_F(DatasetTest, CountsThatNoFileCanHave) {
  std::string manifest = read_file(folder.path("data/manifest.json"));
  const size_t begin = manifest.find("\"tokens\":", manifest.find("\"shards\""));
  ASSERT_NE(begin, std::string::npos);
  const size_t digits = manifest.find_first_of("0123456789", begin);
  manifest.replace(digits, manifest.find_first_not_of("0123456789", digits) - digits, "9223372036854775807");
  folder.write("data/manifest.json", manifest);
  expect_error([&] { Dataset dataset(data()); }, {"manifest"});
}

TEST_F(DatasetTest, NoDataset) {
  expect_error([&] { Dataset dataset(folder.path("none")); }, {"none", "does not exist"});
  fs::create_directory(folder.path("other"));
  expect_error([&] { Dataset dataset(folder.path("other")); }, {"no tokenized corpus", "furious tokenize"});
}

}  // namespace
}  // namespace furious
