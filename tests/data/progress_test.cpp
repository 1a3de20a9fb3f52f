#include "data/progress.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/corpus.h"
#include "data/dataset.h"
#include "data/token_shards_json.h"
#include "data/tokenize.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using testing::expect_error;
using testing::json_lines;
using testing::Random;
using testing::random_documents;
using testing::read_file;
using testing::read_folder;
using testing::TemporaryFolder;

// An interrupted run and the result of an uninterrupted one.
class ProgressTest : public ::testing::Test {
 protected:
  ProgressTest() {
    Random random(11);
    options.inputs = {folder.write("a.jsonl", json_lines(random_documents(random, 60))),
                      folder.write("b.txt", testing::random_sentence(random, 1500))};
    options.tokenizer = "byte";
    options.reader.block_bytes = 2000;
    options.test_fraction = 0.2;
    options.shard_tokens = 1500;
    options.threads = 1;
    options.out = folder.path("whole");
    tokenize_corpus(options);
    options.out = folder.path("out");
    int blocks = 0;
    TokenizeHooks hooks;
    hooks.stop = [&] { return ++blocks == 16; };
    EXPECT_THROW(tokenize_corpus(options, hooks), Stopped);
    fs::copy(options.out, folder.path("kept"));
  }
  void restore() {
    fs::remove_all(options.out);
    fs::copy(folder.path("kept"), options.out);
  }
  std::string progress() const { return read_file(folder.path("kept/progress.json")); }
  void write(const std::string& text) { folder.write("out/progress.json", text); }
  void write_sealed(Json json) {  // with a correct checksum
    json["checksum"] = checksum_of(json);
    write(json.dump());
  }

  TemporaryFolder folder;
  TokenizeOptions options;
};

TEST_F(ProgressTest, DetectsEveryChangeOfOneByte) {
  const std::string text = progress();
  int changes = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (std::isspace(static_cast<unsigned char>(text[at]))) continue;
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] == '9' ? '8' : changed[at] + 1);
    write(changed);
    expect_error([&] { tokenize_corpus(options); }, {"progress.json", "delete the folder"});
    ++changes;
  }
  EXPECT_GT(changes, 300);
  restore();
  tokenize_corpus(options);
  EXPECT_EQ(read_folder(options.out), read_folder(folder.path("whole")));
}

TEST_F(ProgressTest, EveryFieldIsChecked) {
  const Json good = Json::parse(progress());
  int64_t fields = 0;
  const std::function<void(const Json&, const Json::json_pointer&)> visit = [&](const Json& value,
                                                                                const Json::json_pointer& place) {
    if (value.is_structured())
      for (const auto& [key, inside] : value.items())
        value.is_array() ? visit(inside, place / static_cast<size_t>(std::stoul(key))) : visit(inside, place / key);
    if (place.empty() || place.to_string() == "/checksum") return;
    ++fields;
    const bool optional = place.back() == "checks_crc32" || place.back() == "empty_records";  // not in older files
    std::vector<Json> wrong = {"text", -1, 1.5, nullptr, Json::object()};
    if (value.is_number()) wrong.push_back(INT64_MAX);
    if (value.is_object()) wrong.back() = Json::array();
    for (const Json& other : wrong) {
      if ((place.back() == "replaced_utf8" || place.back() == "empty_records") && other == INT64_MAX)
        continue;  // an unknown count
      if (optional && other.is_null()) continue;
      Json changed = good;
      changed[place] = other;
      write_sealed(changed);
      expect_error([&] { tokenize_corpus(options); }, {});
    }
    if (!optional && (value.is_number() || value.is_boolean() || place.back() == "position")) {
      Json changed = good;
      changed[place.parent_pointer()].erase(place.back());
      write_sealed(changed);
      expect_error([&] { tokenize_corpus(options); }, {"progress.json", place.back(), "missing"});
    }
  };
  visit(good, Json::json_pointer());
  EXPECT_GT(fields, 30);
  write_sealed(good);
  tokenize_corpus(options);
  EXPECT_EQ(read_folder(options.out), read_folder(folder.path("whole")));
}

TEST_F(ProgressTest, RefusesPositionsOutsideTheInput) {
  Json json = Json::parse(progress());
  for (const int64_t file : {int64_t{3}, int64_t{100}, INT64_MAX, int64_t{-1}}) {
    json["position"]["file"] = file;
    write_sealed(json);
    expect_error([&] { tokenize_corpus(options); }, {"position.file", "from 0 to 2"});
  }
  json["position"] = {{"file", 1}, {"offset", 1 << 30}, {"line", 0}, {"inside", false}};
  write_sealed(json);
  expect_error([&] { tokenize_corpus(options); }, {"position.offset"});
}

TEST_F(ProgressTest, DetectsMismatchedShards) {
  const auto refused = [&](const std::string& name, const auto& change, const std::vector<std::string>& parts) {
    std::string content = read_file(folder.path("out/" + name));
    change(content);
    folder.write("out/" + name, content);
    expect_error([&] { tokenize_corpus(options); }, parts);
    restore();
  };
  const Json train = Json::parse(progress()).at("train");
  ASSERT_GT(train.at("shards").size(), 0u);
  ASSERT_GT(train.at("current").at("tokens"), 10);
  const std::string open = tokens_file(Split::train, static_cast<int64_t>(train.at("shards").size()));
  const auto longer = [](std::string& content) { content += '\0'; };
  const auto flip = [](std::string& content) { content[70] = static_cast<char>(content[70] ^ 1); };
  refused("train-00000.tokens", longer, {"cannot continue", "train-00000.tokens"});
  refused("train-00000.documents", longer, {"cannot continue", "train-00000.documents"});
  refused(open, flip, {"cannot continue", open, "CRC-32"});
  fs::remove(folder.path("out/train-00000.tokens"));
  expect_error([&] { tokenize_corpus(options); }, {"cannot continue", "train-00000.tokens"});
}

TEST_F(ProgressTest, DeepOrDamagedPlan) {
  folder.write("out/plan.json", std::string(3'000'000, '[') + std::string(3'000'000, ']'));
  expect_error([&] { tokenize_corpus(options); }, {"plan.json", "deep", "delete the folder"});
  folder.write("out/plan.json", R"({"tokenizer": 3})");
  expect_error([&] { tokenize_corpus(options); }, {"plan.json", "\"tokenizer\" is 3"});
  folder.write("out/plan.json", "{");
  expect_error([&] { tokenize_corpus(options); }, {"plan.json", "not JSON"});
}

TEST_F(ProgressTest, RefusesInconsistentManifests) {
  const std::string path = folder.path("whole/manifest.json");
  const Json good = Json::parse(read_file(path));
  const auto refused = [&](const std::string& place, const Json& value, const std::vector<std::string>& parts) {
    Json json = good;
    json[Json::json_pointer(place)] = value;
    json["checksum"] = checksum_of(json);
    folder.write("whole/manifest.json", json.dump());
    expect_error([&] { Dataset(folder.path("whole")).tokens(Split::train); }, parts);
  };
  refused("/tokenizer/vocabulary_size", -5, {"manifest.json", "tokenizer.vocabulary_size"});
  refused("/tokenizer/vocabulary_size", 1e300, {"manifest.json", "tokenizer.vocabulary_size"});
  refused("/tokenizer/eos", 100000, {"manifest.json", "tokenizer.eos"});
  refused("/token_bytes", 3, {"manifest.json", "token_bytes", "2"});
  refused("/train/shards/0/tokens", INT64_MAX, {"manifest.json", "train.shards[0].tokens"});
  refused("/train/shards/0/documents", -1, {"manifest.json", "train.shards[0].documents"});
  refused("/train/shards/0/tokens_crc32", uint64_t{1} << 32, {"manifest.json", "tokens_crc32"});
  refused("/train/shards", "x", {"manifest.json", "train.shards", "a list"});
  folder.write("whole/manifest.json", std::string(100'000, '['));
  expect_error([&] { read_manifest(folder.path("whole")); }, {"manifest.json", "deep"});
}

}  // namespace
}  // namespace furious
