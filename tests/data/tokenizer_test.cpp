#include "data/tokenizer.h"

#include <sentencepiece_processor.h>

#include <nlohmann/json.hpp>

#include "data/corpus.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::Random;
using testing::random_sentence;
using testing::read_file;
using testing::small_model;
using testing::TemporaryFolder;

class AgreementTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(library.LoadFromSerializedProto(small_model()).ok());
    ours = make_sentencepiece(small_model(), "test");
  }
  void expect_agreement(const std::string& text) {
    const std::vector<int> ids = library.EncodeAsIds(text);
    ASSERT_EQ(ours->encode(text), ids) << text;
    ASSERT_EQ(ours->decode(ids), library.DecodeIds(ids)) << text;
  }
  sentencepiece::SentencePieceProcessor library;
  std::shared_ptr<const Tokenizer> ours;
};

TEST_F(AgreementTest, OnWrittenCases) {
  for (const char* text : {"",         " ",    "  ",       "a",         " a",     "a ",        "a  b",
                           "  a  b  ", "\n",   "\n\n",     " \n ",      "\ta",    "the snake", "日本語の文",
                           "🐍🐍",       "1999", "x\u2581y", "x\u2581 y", "\u2581", "end.\n",    "a\nb c\n d"})
    expect_agreement(text);
}

TEST_F(AgreementTest, OnRandomText) {
  Random random(1);
  for (int i = 0; i < 200; ++i) expect_agreement(random_sentence(random, random.integer(0, 40)));
  const std::string alphabet = "ab \n\tz01é";
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (int64_t n = random.integer(0, 30); n > 0; --n) text += alphabet[random.integer(0, 7)];
    expect_agreement(text);
  }
}

TEST_F(AgreementTest, OnRandomIds) {
  Random random(2);
  for (int i = 0; i < 200; ++i) {
    std::vector<int> ids(random.integer(0, 20));
    for (int& id : ids) id = static_cast<int>(random.integer(0, ours->vocabulary_size() - 1));
    ASSERT_EQ(ours->decode(ids), library.DecodeIds(ids));
  }
}

TEST_F(AgreementTest, SpecialIds) {
  EXPECT_EQ(ours->vocabulary_size(), 400);
  EXPECT_EQ(ours->bos(), library.bos_id());
  EXPECT_EQ(ours->eos(), library.eos_id());
  EXPECT_EQ(ours->kind(), "sentencepiece");
  EXPECT_EQ(ours->piece(ours->eos()), "");
  expect_error([&] { ours->decode(std::vector<int32_t>{400}); }, {"id 400", "0..399"});
  expect_error([&] { ours->piece(-1); }, {"id -1"});
}

TEST_F(AgreementTest, ContinuationAtASpaceChangesNothing) {
  Random random(3);
  for (int i = 0; i < 50; ++i) {
    const std::string left = random_sentence(random, 6);
    const std::string right = random_sentence(random, 6);
    std::vector<int32_t> ids = ours->encode(left);
    const std::vector<int32_t> more = ours->encode_continuation(" " + right);
    ids.insert(ids.end(), more.begin(), more.end());
    ASSERT_EQ(ids, ours->encode(left + " " + right));
  }
}

TEST_F(AgreementTest, StreamedPiecesAreTheText) {
  Random random(4);
  for (int i = 0; i < 50; ++i) {
    const std::string text = random_sentence(random, 10);
    Utf8Streamer streamer;
    std::string streamed;
    for (const int32_t id : ours->encode(text)) streamed += streamer.push(ours->piece(id));
    ASSERT_EQ(streamed + streamer.flush(), " " + text);
  }
}

TEST_F(AgreementTest, FirstPieceHasNoAddedSpace) {
  for (const std::string text : {"the snake", " the", "\xC3\xA9t\xC3\xA9", "\xF0\x9F\x90\x8D"}) {
    const std::vector<int32_t> ids = ours->encode(text);
    std::string pieces = ours->first_piece(ids[0]);
    for (size_t i = 1; i < ids.size(); ++i) pieces += ours->piece(ids[i]);
    EXPECT_EQ(pieces, text);
  }
  EXPECT_EQ(load_tokenizer("byte")->first_piece(' '), " ");
}

TEST(ByteTokenizer, EveryByteRoundTrips) {
  const auto tokenizer = load_tokenizer("byte");
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  const std::vector<int32_t> ids = tokenizer->encode(text);
  ASSERT_EQ(ids.size(), 256u);
  for (int byte = 0; byte < 256; ++byte) EXPECT_EQ(ids[byte], byte);
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_EQ(tokenizer->vocabulary_size(), 258);
  EXPECT_EQ(tokenizer->bos(), 256);
  EXPECT_EQ(tokenizer->eos(), 257);
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{256, 'a', 257}), "a");
  expect_error([&] { tokenizer->decode(std::vector<int32_t>{258}); }, {"id 258", "0..257"});
}

TEST(LoadTokenizer, FromFileAndFolder) {
  const TemporaryFolder folder;
  const std::string path = folder.write("model/tokenizer.model", small_model());
  EXPECT_EQ(load_tokenizer(path)->fingerprint(), load_tokenizer(folder.path("model"))->fingerprint());
  EXPECT_EQ(load_tokenizer(path)->files(false).at("tokenizer.model"), small_model());
  EXPECT_NE(load_tokenizer(path)->fingerprint(), load_tokenizer("byte")->fingerprint());
}

TEST(LoadTokenizer, ReadsWhatWasSaved) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path("");
  const auto sentencepiece = make_sentencepiece(small_model(), "test");
  // Each replaces the previous one.
  for (const auto& tokenizer : {load_tokenizer("byte"), sentencepiece, load_tokenizer("byte")}) {
    save_tokenizer(path, *tokenizer);
    const auto loaded = load_tokenizer(path);
    EXPECT_EQ(loaded->fingerprint(), tokenizer->fingerprint());
    EXPECT_EQ(loaded->encode("the snake"), tokenizer->encode("the snake"));
  }
}

TEST(LoadTokenizer, ReadsAFolderOfHuggingFace) {
  const TemporaryFolder folder;
  folder.write("tokenizer.model", small_model());
  folder.write("tokenizer_config.json", R"({"tokenizer_class": "LlamaTokenizer", "bos_token": {"content": "<s>"}})");
  EXPECT_EQ(load_tokenizer(folder.path(""))->files(false).at("tokenizer.model"), small_model());
}

TEST(LoadTokenizer, ErrorsNameTheProblem) {
  const TemporaryFolder folder;
  expect_error([&] { load_tokenizer(folder.path("")); }, {"tokenizer.model", "does not exist", "\"byte\""});
  folder.write("odd/tokenizer_config.json", R"({"tokenizer_class": 3})");
  expect_error([&] { load_tokenizer(folder.path("odd")); }, {"tokenizer_config.json", "tokenizer_class", "a string"});
  folder.write("odd/tokenizer_config.json", "{");
  expect_error([&] { load_tokenizer(folder.path("odd")); }, {"tokenizer_config.json", "not JSON"});
  expect_error([&] { load_tokenizer(folder.path("none.model")); }, {"none.model", "does not exist", "\"byte\""});
  expect_error([] { load_tokenizer("bytes"); }, {"\"bytes\"", "did you mean \"byte\""});
  expect_error([&] { load_tokenizer(folder.write("text", "not a model at all")); }, {"not a SentencePiece model"});
  expect_error([&] { load_tokenizer(folder.write("empty", "")); }, {"empty file"});
  expect_error([&] { load_tokenizer(folder.write("cut", small_model().substr(0, small_model().size() / 2))); },
               {"not a SentencePiece model"});
}

class NoLines final : public LineSource {
 public:
  bool next(std::string&) override { return false; }
};

class FewLines final : public LineSource {
 public:
  bool next(std::string& line) override {
    line = "a few words";
    return left_-- > 0;
  }

 private:
  int left_ = 3;
};

TEST(TrainTokenizer, ErrorsNameTheProblem) {
  NoLines none;
  expect_error([&] { train_sentencepiece(none, {400, 1000, 1}); }, {"no text"});
  FewLines few;
  expect_error([&] { train_sentencepiece(few, {5000, 1000, 1}); }, {"5000", "3 lines", "too high"});
  FewLines again;
  expect_error([&] { train_sentencepiece(again, {100, 1000, 1}); }, {"--vocab 100", "259"});
}

// A piece that the library finds before all others, as models for conversations have them: appended to the file.
TEST(SentencePieceSymbols, AreLettersInLiteralText) {
  const std::string symbol = "<|im_end|>";
  std::string piece = "\x0A" + std::string(1, static_cast<char>(symbol.size())) + symbol;  // 1: its text
  piece += std::string("\x15\0\0\0\0\x18\x04", 7);  // 2: score 0; 3: user-defined
  const std::string model = small_model() + "\x0A" + std::string(1, static_cast<char>(piece.size())) + piece;
  const auto tokenizer = make_sentencepiece(model, "test");
  const int32_t id = tokenizer->special(symbol);
  ASSERT_EQ(id, tokenizer->vocabulary_size() - 1);
  EXPECT_EQ(tokenizer->special("<s>"), tokenizer->bos());
  EXPECT_EQ(tokenizer->special("the"), -1);
  for (const std::string text : {"a<|im_end|>b", "<|im_end|>", "<|im_end|><|im_end|>", "the <|im_end|> snake"}) {
    EXPECT_GT(std::ranges::count(tokenizer->encode(text), id), 0) << text;
    for (const bool start : {true, false}) {
      const std::vector<int32_t> ids = tokenizer->encode_literal(text, start);
      EXPECT_EQ(std::ranges::count(ids, id), 0) << text;
      EXPECT_EQ(start ? tokenizer->decode(ids) : text, text);
    }
  }
  EXPECT_TRUE(tokenizer->encode_literal("", true).empty());
  EXPECT_EQ(tokenizer->encode_literal("the snake", true), tokenizer->encode("the snake"));
}

}  // namespace
}  // namespace furious
