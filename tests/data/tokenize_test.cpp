#include "data/tokenize.h"

#include <pthread.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <thread>

#include "data/corpus.h"
#include "data/dataset.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::json_lines;
using testing::Random;
using testing::random_documents;
using testing::random_sentence;
using testing::read_folder;
using testing::small_model;
using testing::TemporaryFolder;

TokenizeOptions options_for(const std::vector<std::string>& inputs, const std::string& out) {
  TokenizeOptions options;
  options.inputs = inputs;
  options.tokenizer = "byte";
  options.out = out;
  options.reader.block_bytes = 2000;
  options.test_fraction = 0.2;
  options.shard_tokens = 3000;
  options.threads = 2;
  return options;
}

std::vector<std::string> documents_of(const Dataset& data, Split split) {
  const TokenView& tokens = data.tokens(split);
  std::vector<std::string> documents;
  for (int64_t i = 0; i < tokens.documents(); ++i) {
    const DocumentRange range = tokens.document(i);
    std::vector<int32_t> ids(range.length());
    tokens.copy(range.begin, range.length(), ids.data());
    EXPECT_EQ(ids.back(), data.tokenizer()->eos());
    documents.push_back(data.tokenizer()->decode(ids));
  }
  return documents;
}

class TokenizeTest : public ::testing::Test {
 protected:
  Random random{7};
  TemporaryFolder folder;
  std::vector<std::string> documents = random_documents(random, 120);
  std::string input = folder.write("in.jsonl", json_lines(documents));
};

TEST_F(TokenizeTest, DocumentsRoundTripInOrderInOneSplit) {
  for (const std::string& tokenizer : {std::string("byte"), folder.write("t.model", small_model())}) {
    TokenizeOptions options = options_for({input}, folder.path("out-" + fs::path(tokenizer).filename().string()));
    options.tokenizer = tokenizer;
    const TokenizeResult result = tokenize_corpus(options);
    const Dataset data(options.out);
    EXPECT_EQ(data.damage(), std::vector<std::string>());
    std::vector<std::string> train;
    std::vector<std::string> test;
    for (const std::string& document : documents) (is_held_out(document, 123, 0.2) ? test : train).push_back(document);
    EXPECT_EQ(documents_of(data, Split::train), train);
    EXPECT_EQ(documents_of(data, Split::test), test);
    EXPECT_GT(test.size(), 10u);
    EXPECT_LT(test.size(), 40u);
    EXPECT_GT(result.manifest[Split::train].shards.size(), 1u);
    int64_t bytes = 0;
    for (const std::string& document : train) bytes += static_cast<int64_t>(document.size());
    EXPECT_EQ(data.tokens(Split::train).text_bytes(), bytes);
    EXPECT_EQ(result.manifest[Split::train].total().documents, static_cast<int64_t>(train.size()));
  }
}

TEST_F(TokenizeTest, FilesOfTheTestPart) {
  const std::vector<std::string> own(documents.begin(), documents.begin() + 30);
  const std::vector<std::string> rest(documents.begin() + 30, documents.end());
  TokenizeOptions options = options_for({folder.write("a.jsonl", json_lines(rest))}, folder.path("own"));
  options.test_inputs = {folder.write("b.jsonl", json_lines(own))};
  options.test_fraction = 0;
  tokenize_corpus(options);
  EXPECT_EQ(documents_of(Dataset(options.out), Split::train), rest);
  EXPECT_EQ(documents_of(Dataset(options.out), Split::test), own);

  options.out = folder.path("both");
  options.test_fraction = 0.2;
  tokenize_corpus(options);
  std::vector<std::string> train, test;
  for (const std::string& document : rest) (is_held_out(document, 123, 0.2) ? test : train).push_back(document);
  test.insert(test.end(), own.begin(), own.end());
  EXPECT_EQ(documents_of(Dataset(options.out), Split::train), train);
  EXPECT_EQ(documents_of(Dataset(options.out), Split::test), test);

  // Without them, or with the file in the other part, it is a different job.
  std::swap(options.inputs, options.test_inputs);
  expect_error([&] { tokenize_corpus(options); }, {"both", "of other options"});
  options.inputs = {folder.path("a.jsonl"), folder.path("b.jsonl")};
  options.test_inputs = {};
  expect_error([&] { tokenize_corpus(options); }, {"both", "of other options"});
  options.test_inputs = {folder.path("b.jsonl")};
  options.out = folder.path("twice");
  expect_error([&] { tokenize_corpus(options); }, {"b.jsonl", "--test", "once"});
}

TEST_F(TokenizeTest, ThreadsChangeNoByte) {
  TokenizeOptions options = options_for({input}, folder.path("one"));
  options.threads = 1;
  tokenize_corpus(options);
  options.out = folder.path("many");
  options.threads = 5;
  tokenize_corpus(options);
  EXPECT_EQ(read_folder(folder.path("one")), read_folder(folder.path("many")));
}

TEST_F(TokenizeTest, TheSplitDoesNotDependOnTheOrder) {
  TokenizeOptions options = options_for({input}, folder.path("forward"));
  tokenize_corpus(options);
  std::reverse(documents.begin(), documents.end());
  documents.resize(60);
  options.inputs = {folder.write("reversed.jsonl", json_lines(documents))};
  options.out = folder.path("reversed");
  tokenize_corpus(options);
  const auto held_out = [](const std::string& path) {
    const auto list = documents_of(Dataset(path), Split::test);
    return std::set<std::string>(list.begin(), list.end());
  };
  const auto all = held_out(folder.path("forward"));
  const auto some = held_out(folder.path("reversed"));
  EXPECT_FALSE(some.empty());
  EXPECT_TRUE(std::includes(all.begin(), all.end(), some.begin(), some.end()));
  for (const std::string& document : documents) EXPECT_EQ(some.contains(document), all.contains(document));
}

TEST_F(TokenizeTest, SeedSelectsTheTestDocuments) {
  int differences = 0;
  for (const std::string& document : documents)
    differences += is_held_out(document, 1, 0.2) != is_held_out(document, 2, 0.2);
  EXPECT_GT(differences, 5);
  for (const std::string& document : documents) {
    EXPECT_FALSE(is_held_out(document, 1, 0));
    EXPECT_TRUE(!is_held_out(document, 1, 0.1) || is_held_out(document, 1, 0.3));  // more fraction, more documents
  }
}

// Stops after every block until all input is processed.
TEST_F(TokenizeTest, ResumesAnywhereWithTheSameBytes) {
  const std::string text = folder.write("long.txt", random_sentence(random, 4000) + "\xFF");
  TokenizeOptions options = options_for({input, text}, folder.path("whole"));
  tokenize_corpus(options);
  options.out = folder.path("pieces");
  int stops = 0;
  TokenizeHooks hooks;
  hooks.stop = [] { return true; };
  while (true) {
    try {
      tokenize_corpus(options, hooks);
      break;
    } catch (const Stopped&) {
      ASSERT_LT(++stops, 200);
    }
  }
  EXPECT_GT(stops, 20);
  EXPECT_EQ(read_folder(folder.path("whole")), read_folder(folder.path("pieces")));
}

// A killed process leaves bytes after its last checkpoint.
TEST_F(TokenizeTest, RewritesDataAfterTheCheckpoint) {
  TokenizeOptions options = options_for({input}, folder.path("whole"));
  options.shard_tokens = 1 << 20;
  tokenize_corpus(options);
  options.out = folder.path("killed");
  int blocks = 0;
  TokenizeHooks hooks;
  hooks.stop = [&] { return ++blocks == 4; };
  EXPECT_THROW(tokenize_corpus(options, hooks), Stopped);
  for (const char* name : {"train-00000.tokens", "train-00000.documents", "train-00001.tokens"}) {
    const std::string path = folder.path(std::string("killed/") + name);
    folder.write(std::string("killed/") + name, (fs::exists(path) ? testing::read_file(path) : "") + "rubbish");
  }
  fs::remove(folder.path("killed/train-00001.tokens"));
  tokenize_corpus(options);
  EXPECT_EQ(read_folder(folder.path("whole")), read_folder(folder.path("killed")));
}

TEST_F(TokenizeTest, RefusesAFolderInUse) {
  const TokenizeOptions options = options_for({input}, folder.path("out"));
  TokenizeHooks hooks;
  hooks.stop = [] { return true; };
  EXPECT_THROW(tokenize_corpus(options, hooks), Stopped);
  expect_error([&] { Dataset data(options.out); }, {"unfinished"});
  const auto refused = [&](auto change, const std::vector<std::string>& parts) {
    TokenizeOptions other = options;
    change(other);
    expect_error([&] { tokenize_corpus(other); }, parts);
  };
  const auto all_refused = [&](const std::string& state) {
    refused([](TokenizeOptions& o) { o.seed = 5; }, {state, "--seed was 123, now 5"});
    refused([](TokenizeOptions& o) { o.reader.field = "body"; }, {state, "--field was \"text\", now \"body\""});
    refused([&](TokenizeOptions& o) { o.tokenizer = folder.write("t.model", small_model()); },
            {"--tokenizer was byte"});
    refused([&](TokenizeOptions& o) { o.inputs.push_back(input); }, {"1 input files were given, now 2"});
    refused([&](TokenizeOptions& o) { o.inputs = {folder.write("x.jsonl", "{}")}; }, {"input 1 was", "x.jsonl"});
  };
  all_refused("unfinished work");
  tokenize_corpus(options);
  all_refused("the result");
  EXPECT_TRUE(tokenize_corpus(options).was_complete);
  folder.write("in.jsonl", json_lines(documents) + json_lines(documents));
  expect_error([&] { tokenize_corpus(options); }, {"in.jsonl", "has changed"});
}

TEST_F(TokenizeTest, AFailedAttemptLeavesNoFiles) {
  TokenizeOptions options = options_for({input}, folder.path("out"));
  options.reader.field = "body";
  expect_error([&] { tokenize_corpus(options); }, {"in.jsonl", "line 1", "\"body\"", "text"});
  EXPECT_FALSE(fs::exists(options.out));
  options.reader.field = "text";
  tokenize_corpus(options);
  EXPECT_EQ(Dataset(options.out).damage(), std::vector<std::string>());
}

TEST_F(TokenizeTest, ErrorsNameTheFirstBadLineForAnyNumberOfThreads) {
  std::string lines = json_lines(documents);
  lines += "broken\n";
  TokenizeOptions options = options_for({folder.write("bad.jsonl", lines)}, folder.path("out"));
  options.threads = 4;
  for (int i = 0; i < 5; ++i)
    expect_error([&] { tokenize_corpus(options); }, {"bad.jsonl", fmt::format("line {}", documents.size() + 1)});
  EXPECT_TRUE(fs::exists(folder.path("out/progress.json")));
  EXPECT_FALSE(fs::exists(folder.path("out/manifest.json")));
}

TEST_F(TokenizeTest, AnEmptyCorpusIsAnError) {
  const TokenizeOptions options =
      options_for({folder.write("empty.txt", ""), folder.write("e.jsonl", "\n")}, folder.path("out"));
  expect_error([&] { tokenize_corpus(options); }, {"no text", "2 files"});
}

TEST_F(TokenizeTest, AOneTokenDocument) {
  TokenizeOptions options = options_for({folder.write("one.txt", "x")}, folder.path("out"));
  options.test_fraction = 0;
  tokenize_corpus(options);
  const Dataset data(options.out);
  EXPECT_EQ(data.tokens(Split::train).size(), 2);  // and eos
  EXPECT_EQ(data.tokens(Split::test).size(), 0);
}

TEST_F(TokenizeTest, BosOnRequest) {
  TokenizeOptions options = options_for({folder.write("one.txt", "x")}, folder.path("out"));
  options.test_fraction = 0;
  options.bos = true;
  tokenize_corpus(options);
  std::vector<int32_t> ids(3);
  Dataset(options.out).tokens(Split::train).copy(0, 3, ids.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{256, 'x', 257}));
}

TEST_F(TokenizeTest, EncodesALongDocumentAsAWhole) {
  const std::string text = random_sentence(random, 3000);
  TokenizeOptions options = options_for({folder.write("long.txt", text)}, folder.path("out"));
  options.tokenizer = folder.write("t.model", small_model());
  options.test_fraction = 0;
  tokenize_corpus(options);
  const Dataset data(options.out);
  std::vector<int32_t> expected = data.tokenizer()->encode(text);
  expected.push_back(data.tokenizer()->eos());
  ASSERT_EQ(data.tokens(Split::train).size(), static_cast<int64_t>(expected.size()));
  std::vector<int32_t> ids(expected.size());
  data.tokens(Split::train).copy(0, static_cast<int64_t>(ids.size()), ids.data());
  EXPECT_EQ(ids, expected);
  EXPECT_EQ(data.tokens(Split::train).documents(), 1);
}

TEST_F(TokenizeTest, InvalidUtf8IsCountedInTheManifest) {
  const TokenizeOptions options = options_for({folder.write("bad.txt", "a\xFF\xFE z")}, folder.path("out"));
  EXPECT_EQ(tokenize_corpus(options).manifest.replaced, 2);
  EXPECT_EQ(read_manifest(options.out).replaced, 2);
}

// A compressed empty text has a header: a file of 0 bytes was not written completely.
TEST_F(TokenizeTest, AnEmptyCompressedFileIsAnErrorAndAnEmptyTextIsNot) {
  for (const char* name : {"empty.jsonl.gz", "empty.txt.zst"}) {
    const TokenizeOptions options = options_for({input, folder.write(name, "")}, folder.path("out"));
    expect_error([&] { tokenize_corpus(options); }, {name, "is empty"});
    std::filesystem::remove_all(folder.path("out"));
  }
  TokenizeOptions options = options_for({input}, folder.path("alone"));
  tokenize_corpus(options);
  options = options_for({input, folder.write("none.txt", ""), folder.write("none.txt.gz", testing::gzip_of(""))},
                        folder.path("with"));
  tokenize_corpus(options);
  EXPECT_EQ(documents_of(Dataset(folder.path("with")), Split::train),
            documents_of(Dataset(folder.path("alone")), Split::train));
}

// Thread creation fails: stacks are larger than the address space limit.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 50);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST_F(TokenizeTest, WorksWithoutThreads) {
  TokenizeOptions options = options_for({input}, folder.path("with"));
  tokenize_corpus(options);
  options.out = folder.path("without");
  {
    const NoThreads none;
    EXPECT_THROW(std::thread([] {}), std::system_error);
    tokenize_corpus(options);
  }
  EXPECT_EQ(read_folder(folder.path("with")), read_folder(folder.path("without")));
  options.inputs = {folder.write("bad.jsonl", json_lines(documents) + "broken")};
  options.out = folder.path("bad");
  const NoThreads none;
  expect_error([&] { tokenize_corpus(options); }, {"bad.jsonl", "line 121"});
}

TEST_F(TokenizeTest, PathsNeedNotBeUtf8) {
  const TokenizeOptions options =
      options_for({folder.write("na\xEFve.jsonl", json_lines(documents))}, folder.path("o"));
  TokenizeHooks hooks;
  hooks.stop = [] { return true; };
  EXPECT_THROW(tokenize_corpus(options, hooks), Stopped);
  EXPECT_FALSE(tokenize_corpus(options).was_complete);
  EXPECT_TRUE(tokenize_corpus(options).was_complete);
}

TEST(SplitWriter, LargeVocabulariesTakeFourBytes) {
  EXPECT_EQ(token_bytes_for(65536), 2);
  EXPECT_EQ(token_bytes_for(65537), 4);
}

}  // namespace
}  // namespace furious
