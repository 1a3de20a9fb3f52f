// tokenizer.json: ids and texts of the tokenizers package (tests/data/make_tokenizer_fixtures.py), refusals, and what
// save_tokenizer writes for AutoTokenizer.
#include "data/tokenizer_json.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "data/corpus.h"
#include "data/dataset.h"
#include "data/tokenize.h"
#include "furious/model.h"
#include "model/checkpoint.h"
#include "model/little.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using testing::expect_error;
using testing::json_lines;
using testing::Random;
using testing::random_documents;
using testing::random_sentence;
using testing::read_file;
using testing::small_model;
using testing::TemporaryFolder;

Json fixture(const std::string& name) {
  return Json::parse(read_text(fs::path(FURIOUS_TOKENIZERS) / (name + ".json")));
}

std::shared_ptr<const Tokenizer> tokenizer_of(const Json& from) {
  return make_tokenizer_json(from.at("tokenizer").dump(), from.at("config").dump(), "test.json");
}

std::vector<int32_t> ids_of(const Json& json) {
  return json.get<std::vector<int32_t>>();
}

// What a reader of the stream sees; each piece consists of whole characters.
std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  Utf8Streamer stream;
  std::string text;
  bool first = true;
  for (const int32_t id : ids) {
    const std::string piece = stream.push(first ? tokenizer.first_piece(id) : tokenizer.piece(id));
    EXPECT_EQ(valid_utf8_prefix(piece), piece.size());
    first = first && tokenizer.piece(id).empty();
    text += piece;
  }
  return text + stream.flush();
}

TEST(TokenizerJson, GivesTheIdsAndTextsOfThePackage) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(FURIOUS_TOKENIZERS)) {
    SCOPED_TRACE(entry.path().string());
    const Json json = fixture(entry.path().stem());
    const auto tokenizer = tokenizer_of(json);
    for (const Json& one : json.at("cases")) {
      const auto text = one.at("text").get<std::string>();
      const std::vector<int32_t> ids = tokenizer->encode(text);
      EXPECT_EQ(ids, ids_of(one.at("ids"))) << text;
      EXPECT_EQ(tokenizer->decode(ids), one.at("decoded").get<std::string>()) << text;
      EXPECT_EQ(streamed(*tokenizer, ids), tokenizer->decode(ids)) << text;
    }
    ++files;
  }
  EXPECT_EQ(files, 12);
}

TEST(TokenizerJson, KnowsBosAndEos) {
  const auto llama3 = tokenizer_of(fixture("llama3"));
  EXPECT_EQ(llama3->kind(), "tokenizer.json");
  EXPECT_TRUE(llama3->begins_with_bos());
  EXPECT_EQ(llama3->encode("<|begin_of_text|>"), std::vector<int32_t>{llama3->bos()});
  EXPECT_EQ(llama3->encode("<|endoftext|>"), std::vector<int32_t>{llama3->eos()});
  EXPECT_EQ(llama3->piece(llama3->eos()), "");
  const auto qwen = tokenizer_of(fixture("qwen2"));
  EXPECT_EQ(qwen->bos(), -1);
  EXPECT_FALSE(qwen->begins_with_bos());
  EXPECT_GE(qwen->eos(), 0);
  EXPECT_EQ(qwen->decode(qwen->encode("a<tool_call>b<|endoftext|>c")), "a<tool_call>bc");
  // Tokens as objects, and no configuration at all: bos is that of the template.
  Json json = fixture("llama2");
  json["config"] = {{"eos_token", {{"content", "</s>"}}}};
  EXPECT_EQ(tokenizer_of(json)->eos(), 2);
  EXPECT_EQ(tokenizer_of(json)->bos(), 1);
  EXPECT_EQ(make_tokenizer_json(json.at("tokenizer").dump(), "", "test")->eos(), -1);
  expect_error([&] { llama3->piece(llama3->vocabulary_size()); }, {"outside the vocabulary"});
  expect_error([&] { llama3->piece(-1); }, {"outside the vocabulary"});
}

TEST(TokenizerJson, ContinuesATextWithoutASpaceBeforeIt) {
  for (const char* name : {"llama2", "metaspace-first", "metaspace-split", "gpt2-prefix"}) {
    SCOPED_TRACE(name);
    const auto tokenizer = tokenizer_of(fixture(name));
    const std::vector<int32_t> with = tokenizer->encode("the"), without = tokenizer->encode_continuation("the");
    EXPECT_NE(with, without);
    EXPECT_EQ(with, tokenizer->encode_continuation(" the"));
    std::string text;
    for (const int32_t id : without) text += tokenizer->piece(id);
    EXPECT_EQ(text, "the");
  }
  const auto plain = tokenizer_of(fixture("qwen2"));
  EXPECT_EQ(plain->encode("the"), plain->encode_continuation("the"));
}

TEST(TokenizerJson, ReplacesBytesThatAreNoText) {
  for (const char* name : {"gpt2", "llama2", "qwen2"}) {
    const auto tokenizer = tokenizer_of(fixture(name));
    EXPECT_EQ(tokenizer->encode("a\xFF\xE2\x82z\xC3"), tokenizer->encode("a\uFFFD\uFFFDz\uFFFD")) << name;
  }
}

// Words of a text come from a cache that threads and tokenizers share; long runs stay within the limits of a search.
TEST(TokenizerJson, EncodesLongRunsAndManyWords) {
  const auto gpt2 = tokenizer_of(fixture("gpt2")), llama2 = tokenizer_of(fixture("llama2"));
  for (const auto& tokenizer : {gpt2, llama2, tokenizer_of(fixture("llama3"))}) {
    for (const std::string unit : {" ", "a", "\n", "7", "é", "ab "}) {
      std::string text;
      while (text.size() < 1500000) text += unit;
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << unit;
    }
  }
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    const std::string text = random_sentence(random, 20);
    const std::vector<int32_t> first = gpt2->encode(text);
    llama2->encode(text);
    EXPECT_EQ(gpt2->encode(text), first);
    EXPECT_EQ(gpt2->decode(first), text);
  }
}

Json changed(const std::string& name, const std::string& pointer, const Json& value) {
  Json json = fixture(name);
  json.at("tokenizer")[Json::json_pointer(pointer)] = value;
  return json;
}

TEST(TokenizerJson, RefusesOtherComponentsByName) {
  const auto refused = [](const std::string& pointer, const Json& value, const std::vector<std::string>& parts) {
    expect_error([&] { tokenizer_of(changed("gpt2", pointer, value)); }, parts);
  };
  refused("/normalizer", {{"type", "Lowercase"}}, {"test.json", "normalizer", "Lowercase", "NFC"});
  refused("/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}}, {"normalizer", "NFKC"});
  refused("/normalizer", {{"type", "Replace"}, {"pattern", {{"Regex", " +"}}}, {"content", " "}},
          {"Replace with a regular expression"});
  refused("/pre_tokenizer", {{"type", "BertPreTokenizer"}}, {"pre-tokenizer", "BertPreTokenizer", "ByteLevel"});
  refused("/pre_tokenizer/odd", 1, {"ByteLevel", "\"odd\""});
  refused("/post_processor", {{"type", "RobertaProcessing"}}, {"post-processor", "RobertaProcessing"});
  refused("/decoder", {{"type", "WordPiece"}}, {"decoder", "WordPiece"});
  refused("/decoder", nullptr, {"no decoder"});
  refused("/model/type", "Unigram", {"model", "Unigram", "BPE"});
  refused("/model/dropout", 0.1, {"dropout"});
  refused("/model/end_of_word_suffix", "</w>", {"end_of_word_suffix"});
  refused("/model/odd", true, {"\"odd\""});
  refused("/version", "2.0", {"version", "1.0"});
  const auto split = [](const char* pattern) {
    return Json{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
  };
  refused("/pre_tokenizer", split("\\w+"), {"\\w"});
  refused("/pre_tokenizer", split("(a"), {"damaged", "(a"});
}

TEST(TokenizerJson, RefusesDamagedFiles) {
  const auto refused = [](const std::string& pointer, const Json& value, const std::vector<std::string>& parts) {
    expect_error([&] { tokenizer_of(changed("gpt2", pointer, value)); }, parts);
  };
  refused("/model/merges/0", "q zz", {"\"zz\"", "not in the vocabulary"});
  refused("/model/merges/0", "one", {"merge 0", "not a pair"});
  refused("/model/merges/0", Json::array({"a", 1}), {"merge 0", "not a pair"});
  refused("/model/vocab/a", -1, {"\"a\"", "integer from 0"});
  refused("/model/vocab/a", 1 << 30, {"\"a\"", "integer from 0"});
  refused("/model/vocab/a", 3, {"id 3", "twice"});
  refused("/model/vocab", Json::object(), {"vocab"});
  refused("/model/unk_token", "<none>", {"<none>", "not in the vocabulary"});
  refused("/added_tokens/0/id", 5, {"<|endoftext|>", "id 5"});
  expect_error([] { make_tokenizer_json("{", "", "cut.json"); }, {"cut.json", "not JSON"});
  expect_error([] { make_tokenizer_json("[]", "", "list.json"); }, {"list.json"});
  Json twice = fixture("gpt2");
  twice["tokenizer"]["added_tokens"].push_back(twice["tokenizer"]["added_tokens"][0]);
  expect_error([&] { tokenizer_of(twice); }, {"<|endoftext|>", "twice"});
  // A normalizer that multiplies a text.
  Json steps = Json::array();
  for (int i = 0; i < 12; ++i)
    steps.push_back({{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aaaaaaaa"}});
  const auto bomb = tokenizer_of(changed("gpt2", "/normalizer", {{"type", "Sequence"}, {"normalizers", steps}}));
  expect_error([&] { bomb->encode(std::string(1000, 'a')); }, {"normalizer", "damaged"});
}

TEST(TokenizerJson, IsChosenForAFolderThatHasIt) {
  const TemporaryFolder folder;
  const Json json = fixture("qwen2");
  const auto expected = tokenizer_of(json);
  folder.write("model/tokenizer.json", json.at("tokenizer").dump());
  folder.write("model/special_tokens_map.json", json.at("config").dump());
  folder.write("model/tokenizer.model", small_model());  // tokenizer.json is read first
  for (const std::string path : {"model", "model/tokenizer.json"}) {
    const auto loaded = load_tokenizer(folder.path(path));
    EXPECT_EQ(loaded->fingerprint(), expected->fingerprint());
    EXPECT_EQ(loaded->eos(), expected->eos());
  }
  EXPECT_EQ(load_tokenizer(folder.path("model/tokenizer.model"))->kind(), "sentencepiece");
  // tokenizer_config.json comes before the map.
  folder.write(
      "model/tokenizer_config.json",
      R"({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "x", "max": Infinity})");
  EXPECT_EQ(load_tokenizer(folder.path("model"))->eos(), expected->eos() + 1);
  EXPECT_EQ(Json::parse(expected->files(false).at("tokenizer_config.json")).at("tokenizer_class"),
            "PreTrainedTokenizerFast");
  // Saving keeps tokenizer.json as it is, changes the class in the other file to the one that reads it so, and replaces
  // another tokenizer.
  fs::create_directory(folder.path("saved"));
  save_tokenizer(folder.path("saved"), *make_sentencepiece(small_model(), "test"));
  save_tokenizer(folder.path("saved"), *load_tokenizer(folder.path("model")));
  EXPECT_FALSE(fs::exists(folder.path("saved/tokenizer.model")));
  EXPECT_EQ(read_file(folder.path("saved/tokenizer.json")), read_file(folder.path("model/tokenizer.json")));
  const Json saved = Json::parse(read_file(folder.path("saved/tokenizer_config.json")));
  EXPECT_EQ(saved.at("tokenizer_class"), "PreTrainedTokenizerFast");
  EXPECT_EQ(saved.at("eos_token"), "<|im_end|>");
  EXPECT_EQ(saved.at("chat_template"), "x");
  EXPECT_EQ(load_tokenizer(folder.path("saved"))->fingerprint(), load_tokenizer(folder.path("model"))->fingerprint());
}

// Published models begin their texts as their tokenizer.json says, whatever their format is used to; ours as they were
// trained.
TEST(TokenizerJson, SaysHowTextsOfPublishedModelsBegin) {
  for (const auto& [name, begins] : {std::pair{"llama3", true}, {"qwen2", false}}) {
    const Json json = fixture(name);
    const auto tokenizer = tokenizer_of(json);
    ASSERT_EQ(tokenizer->begins_with_bos(), begins);
    ModelConfig config = testing::little(preset("softmax"));
    config.vocabulary = tokenizer->vocabulary_size();
    const Json llama = {{"model_type", "llama"},
                        {"vocab_size", config.vocabulary},
                        {"hidden_size", config.hidden},
                        {"intermediate_size", config.intermediate},
                        {"num_hidden_layers", config.layers},
                        {"num_attention_heads", config.q_heads}};
    const std::vector<int32_t> text = tokenizer->encode("some text");
    for (const bool published : {false, true}) {
      const TemporaryFolder folder;
      folder.write("model/tokenizer.json", json.at("tokenizer").dump());
      folder.write("model/tokenizer_config.json", json.at("config").dump());
      for (const bool trained : {false, true}) {  // with bos, as far as our configuration knows
        config.bos = trained;
        const LanguageModel model(config, 1);
        save_model(folder.path("model"), model);
        if (published) folder.write("model/config.json", llama.dump());
        for (const bool asked : {false, true}) {
          const bool bos = published ? begins : trained;
          if (asked && tokenizer->bos() < 0) continue;
          LoadOptions options;
          options.device = "cpu";
          options.bos = asked;
          const Model loaded = Model::load(folder.path("model"), options);
          std::vector<int32_t> expected = text;
          const int32_t start = bos || asked ? tokenizer->bos() : published ? -1 : tokenizer->eos();
          if (start >= 0) expected.insert(expected.begin(), start);
          EXPECT_EQ(loaded.prompt("some text"), expected) << name << published << trained << asked;
          EXPECT_EQ(loaded.prompt(""), std::vector{start >= 0 ? start : tokenizer->eos()});
        }
      }
    }
  }
}

TEST(TokenizerJson, GoesThroughShards) {
  const TemporaryFolder folder;
  Random random(2);
  const std::vector<std::string> documents = random_documents(random, 20);
  const Json json = fixture("llama3");
  folder.write("model/tokenizer.json", json.at("tokenizer").dump());
  folder.write("model/tokenizer_config.json", json.at("config").dump());
  TokenizeOptions options;
  options.inputs = {folder.write("text.jsonl", json_lines(documents))};
  options.tokenizer = folder.path("model");
  options.out = folder.path("shards");
  options.test_fraction = 0;
  tokenize_corpus(options);
  const Dataset data(folder.path("shards"));
  const auto tokenizer = tokenizer_of(json);
  EXPECT_EQ(data.tokenizer()->fingerprint(), tokenizer->fingerprint());
  data.check_tokenizer_of(folder.path("model"));
  std::vector<int32_t> all;
  for (const std::string& document : documents) {
    const std::vector<int32_t> ids = tokenizer->encode(document);
    all.insert(all.end(), ids.begin(), ids.end());
    all.push_back(tokenizer->eos());
  }
  EXPECT_EQ(data.manifest()[Split::train].total().tokens, static_cast<int64_t>(all.size()));
}

// The files for AutoTokenizer.
TEST(TokenizerFiles, OfOurTokenizersGiveTheSameIdsAsATokenizerJson) {
  Random random(3);
  for (const bool bos : {false, true}) {
    for (const auto& tokenizer : {load_tokenizer("byte"), make_sentencepiece(small_model(), "test")}) {
      SCOPED_TRACE(tokenizer->kind());
      const TokenizerFiles files = tokenizer->files(bos);
      const Json config = Json::parse(files.at("tokenizer_config.json"));
      EXPECT_EQ(config.at("tokenizer_class"), "PreTrainedTokenizerFast");
      EXPECT_EQ(config.at("add_bos_token"), bos);
      const auto again = make_tokenizer_json(files.at("tokenizer.json"), files.at("tokenizer_config.json"), "again");
      EXPECT_EQ(again->vocabulary_size(), tokenizer->vocabulary_size());
      EXPECT_EQ(again->bos(), tokenizer->bos());
      EXPECT_EQ(again->eos(), tokenizer->eos());
      EXPECT_EQ(again->begins_with_bos(), bos);
      for (int i = 0; i < 200; ++i) {
        const std::string text = random_sentence(random, 12) + (random.coin() ? "  été\n\n 漢字\t12 " : "");
        const std::vector<int32_t> ids = tokenizer->encode(text);
        ASSERT_EQ(again->encode(text), ids) << text;
        ASSERT_EQ(again->decode(ids), tokenizer->decode(ids)) << text;
      }
    }
  }
}

// "<|im_end|>" of a stranger is ten characters; runs of blanks stay the tokens that they are.
TEST(TokenizerJson, EncodesLiteralTextWithoutSpecialTokens) {
  int words = 0, others = 0;
  for (const auto& entry : fs::directory_iterator(FURIOUS_TOKENIZERS)) {
    SCOPED_TRACE(entry.path().string());
    const Json json = fixture(entry.path().stem());
    const auto tokenizer = tokenizer_of(json);
    std::vector<std::string> contents;
    for (const Json& added : json.at("tokenizer").at("added_tokens")) {
      const auto content = added.at("content").get<std::string>();
      if (content.find_first_not_of(" \t\n") == std::string::npos) continue;
      ++words;
      contents.push_back(content);
      const int32_t id = added.at("id").get<int32_t>();
      EXPECT_EQ(tokenizer->special(content), id) << content;
      for (const bool start : {true, false}) {
        const std::vector<int32_t> ids = tokenizer->encode_literal("a " + content + " b", start);
        EXPECT_EQ(std::ranges::count(ids, id), 0) << content;
      }
    }
    EXPECT_EQ(tokenizer->special("<|no such token|>"), -1);
    for (const Json& one : json.at("cases")) {
      const auto text = one.at("text").get<std::string>();
      const auto inside = [&](const std::string& content) { return text.find(content) != std::string::npos; };
      if (std::ranges::any_of(contents, inside)) continue;
      ++others;
      EXPECT_EQ(tokenizer->encode_literal(text, true), tokenizer->encode(text)) << text;
      EXPECT_EQ(tokenizer->encode_literal(text, false), tokenizer->encode_continuation(text)) << text;
    }
  }
  EXPECT_GT(words, 10);
  EXPECT_GT(others, 100);
}

}  // namespace
}  // namespace furious
