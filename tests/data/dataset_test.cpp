#include "data/dataset.h"

#include <filesystem>
#include <nlohmann/json.hpp>

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
  // Recomputes the checksums of a modified shard, as an attacker would.
  void mend(const std::string& shard) {
    auto manifest = nlohmann::ordered_json::parse(read_file(folder.path("data/manifest.json")));
    manifest.erase("checksum");
    for (auto& row : manifest["train"]["shards"]) {
      if (row["tokens_file"] != shard + ".tokens") continue;
      row.erase("checks_crc32");
      for (const char* part : {"tokens", "documents"}) {
        const std::string content = read_file(folder.path("data/" + shard + "." + part)).substr(sizeof(ShardHeader));
        row[std::string(part) + "_crc32"] = crc32_of(std::as_bytes(std::span(content)));
      }
    }
    folder.write("data/manifest.json", manifest.dump());
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
  expect_error([&] { tokens.copy(1, tokens.size(), all.data()); }, {"out of range", "it has"});
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

TEST_F(DatasetTest, DetectsDamageWhenABlockIsRead) {
  damage("train-00001.tokens", 80);
  const Dataset dataset(data());
  const TokenView& tokens = dataset.tokens(Split::train);
  std::vector<int32_t> ids(tokens.size());
  const int64_t first = dataset.manifest()[Split::train].shards[0].tokens;
  tokens.copy(0, first, ids.data());  // of the good shard
  for (int i = 0; i < 2; ++i)
    expect_error([&] { tokens.copy(first, 1, ids.data()); },
                 {"train-00001.tokens", "damaged", "bytes 64 to", "CRC-32", "tokenize the text again"});
  ASSERT_EQ(dataset.damage().size(), 1u);
  EXPECT_NE(dataset.damage()[0].find("train-00001.tokens\" is damaged: bytes 64 to"), std::string::npos);
}

TEST_F(DatasetTest, DetectsEveryFlippedBit) {
  testing::Random random(3);
  for (const std::string name :
       {"train-00000.tokens", "train-00001.documents", "train-00000.checks", "manifest.json"}) {
    const std::string good = read_file(folder.path("data/" + name));
    for (int i = 0; i < 60; ++i) {
      std::string bad = good;
      const auto bit = static_cast<size_t>(random.integer(0, static_cast<int64_t>(good.size()) * 8 - 1));
      bad[bit / 8] ^= static_cast<char>(1 << bit % 8);
      folder.write("data/" + name, bad);
      bool noticed = false;
      try {
        const Dataset dataset(data());
        const TokenView& tokens = dataset.tokens(Split::train);
        std::vector<int32_t> ids(tokens.size());
        tokens.copy(0, tokens.size(), ids.data());
        for (int64_t document = 0; document < tokens.documents(); ++document) tokens.document(document);
      } catch (const Error&) {
        noticed = true;
      }
      // Whitespace in the manifest is not covered by its checksum.
      EXPECT_TRUE(noticed || (name == "manifest.json" && std::isspace(good[bit / 8]))) << name << " bit " << bit;
    }
    folder.write("data/" + name, good);
  }
}

TEST_F(DatasetTest, ReadsOnlyRequestedBlocks) {
  TokenizeOptions options;
  options.inputs = {folder.write("long.txt", std::string(100'000, 'x'))};
  options.tokenizer = "byte";
  options.out = folder.path("data");
  options.test_fraction = 0;
  fs::remove_all(options.out);
  tokenize_corpus(options);
  damage("train-00000.tokens", 64 + 3 * kBlockBytes + 10);
  damage("train-00000.tokens", 64 + 4 * kBlockBytes + 10);
  const Dataset dataset(data());
  const TokenView& tokens = dataset.tokens(Split::train);
  std::vector<int32_t> ids(tokens.size());
  const int64_t per_block = kBlockBytes / 2;
  tokens.copy(0, 3 * per_block, ids.data());
  tokens.copy(5 * per_block, tokens.size() - 5 * per_block, ids.data());
  const std::string third = fmt::format("bytes {} to {} ", 64 + 3 * kBlockBytes, 64 + 4 * kBlockBytes);
  expect_error([&] { tokens.copy(3 * per_block - 1, 2, ids.data()); }, {third});
  ASSERT_EQ(dataset.damage().size(), 1u);  // one stretch
  EXPECT_NE(dataset.damage()[0].find(fmt::format("bytes {} to {} ", 64 + 3 * kBlockBytes, 64 + 5 * kBlockBytes)),
            std::string::npos);
}

// Older shards without checksums of blocks and of the manifest.
TEST_F(DatasetTest, ChecksOldShardsCompletely) {
  auto manifest = nlohmann::ordered_json::parse(read_file(folder.path("data/manifest.json")));
  manifest.erase("checksum");
  for (const char* split : {"train", "test"})
    for (auto& shard : manifest[split]["shards"]) shard.erase("checks_crc32");
  folder.write("data/manifest.json", manifest.dump());
  for (const auto& entry : fs::directory_iterator(data()))
    if (entry.path().extension() == ".checks") fs::remove(entry.path());
  const Dataset dataset(data());
  const TokenView& tokens = dataset.tokens(Split::train);
  std::vector<int32_t> ids(tokens.size());
  tokens.copy(0, tokens.size(), ids.data());
  EXPECT_EQ(dataset.damage(), std::vector<std::string>());
  damage("train-00001.tokens", 80);
  const Dataset damaged(data());
  expect_error([&] { damaged.tokens(Split::train).copy(0, tokens.size(), ids.data()); },
               {"train-00001.tokens", "CRC-32"});
}

TEST_F(DatasetTest, NeverReturnsIdsOutsideTheVocabulary) {
  damage("train-00000.tokens", 65);  // the high byte of the first id
  damage("train-00000.tokens", 64);
  std::string content = read_file(folder.path("data/train-00000.tokens"));
  content.at(65) = '\x7F';
  folder.write("data/train-00000.tokens", content);
  mend("train-00000");
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
  mend("train-00000");
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

TEST_F(DatasetTest, RefusesImpossibleCounts) {
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
  expect_error([&] { Dataset dataset(folder.path("other")); }, {"not a tokenized corpus", "furious tokenize"});
}

}  // namespace
}  // namespace furious
