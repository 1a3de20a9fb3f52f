#include "data/sentencepiece_model.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <limits>
#include <unordered_map>

#include "data/corpus.h"
#include "data/tokenizer.h"
#include "fuzz/sentencepiece_files.h"
#include "fuzz/targets.h"

namespace furious {
namespace {

using namespace furious::fuzz;
using testing::expect_error;
using testing::Random;
using testing::small_model;

void refused(const ModelSpec& spec, const std::vector<std::string>& parts) {
  expect_error([&] { make_sentencepiece(sentencepiece_file(spec), "t.model"); }, parts);
}

void refused_map(const Charsmap& map, const std::string& part) {
  refused({.charsmap = map.bytes()}, {"t.model", "precompiled_charsmap", part});
}

TEST(SentencePieceFile, ReadsAHandMadeFile) {
  for (const int type : {kUnigram, kBytePair, kWord, kCharacter}) {
    const auto tokenizer = make_sentencepiece(sentencepiece_file({.type = type, .rules = sample_rules()}), "test");
    EXPECT_EQ(tokenizer->vocabulary_size(), static_cast<int32_t>(sample_pieces().size()));
    EXPECT_EQ(tokenizer->encode("\xEF\xBD\x81\xEF\xBD\x82"), tokenizer->encode("ab"));  // full width: the rules work
  }
}

class SameLine final : public sentencepiece::SentenceIterator {
 public:
  bool done() const override { return left_ == 0; }
  void Next() override { --left_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  int left_ = 50;
  std::string line_ = "some words of a text, again and again: 1234567890 abcdefghijklmnopqrstuvwxyz";
};

// The rules of the library's own normalizers, which share nodes.
TEST(SentencePieceFile, NormalizersOfTheLibraryAreAccepted) {
  for (const char* rule : {"nmt_nfkc", "nfkc_cf", "identity"}) {
    std::string model;
    SameLine lines;
    const std::unordered_map<std::string, std::string> options = {{"model_type", "unigram"},
                                                                  {"vocab_size", "60"},
                                                                  {"hard_vocab_limit", "false"},
                                                                  {"normalization_rule_name", rule},
                                                                  {"minloglevel", "2"}};
    const auto status = sentencepiece::SentencePieceTrainer::Train(options, &lines, &model);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_NO_THROW(check_sentencepiece_model(model, "test"));
    EXPECT_FALSE(make_sentencepiece(model, "test")->encode("words").empty());
  }
  EXPECT_NO_THROW(check_sentencepiece_model(small_model(), "test"));
}

TEST(SentencePieceFile, RefusesTriesWithOutOfRangeUnits) {
  const Charsmap good(sample_rules());
  EXPECT_NO_THROW(make_sentencepiece(sentencepiece_file({.charsmap = good.bytes()}), "t.model"));
  for (const std::string& bytes : {std::string("abc"), std::string("\0\0\0\0", 4), std::string("\4\0\0\0", 4),
                                   std::string("\0\0\0\0x", 5), std::string("\xFF\xFF\xFF\xFFtext", 8),
                                   good.bytes().substr(0, 100), good.bytes().substr(0, 4 + 4 * good.units.size())})
    refused({.charsmap = bytes}, {"t.model", "charsmap"});

  Charsmap map = good;
  map.units[0] = 0xFFFFFDFFu;  // far
  refused_map(map, "outside");
  map = good;
  map.units.resize(map.units.size() - 1);  // of the last block
  refused_map(map, "");
  map = good;
  map.texts.back() = 'x';
  refused_map(map, "no end");
  map = good;
  map.texts += std::string(2000, 'x') + '\0';
  for (uint32_t& unit : map.units)
    if (unit == 0x80000000u + 4) unit = 0x80000000u + static_cast<uint32_t>(good.texts.size());
  refused_map(map, "bytes");
  map = good;
  for (uint32_t& unit : map.units)
    if (unit == 0x80000000u + 4) unit = 0xFFFFFFFFu;
  refused_map(map, "points to byte");
}

TEST(SentencePieceFile, RulesThatMatchAtOnePlaceAreCounted) {
  Rules rules;
  for (int i = 1; i <= 32; ++i) rules[std::string(i, 'x')] = "y";
  EXPECT_NO_THROW(make_sentencepiece(sentencepiece_file({.rules = rules}), "t.model")->encode(std::string(50, 'x')));
  rules[std::string(33, 'x')] = "y";
  refused({.rules = rules}, {"t.model", "over 32 rules"});

  Charsmap map(Rules{{"x", "y"}});  // a node that is its own child
  for (uint32_t i = 256; i < map.units.size(); ++i)
    if ((map.units[i] & 0x800000FFu) == 'x')
      map.units[i] = static_cast<uint32_t>('x') | 0x100u | ((i ^ (i ^ 'x')) << 10);
  refused_map(map, "itself");
}

TEST(SentencePieceFile, RefusesPiecesThatTheLibraryDoesNotSupport) {
  const auto with = [](std::vector<PieceSpec> more) {
    std::vector<PieceSpec> pieces = sample_pieces();
    pieces.insert(pieces.end(), more.begin(), more.end());
    return ModelSpec{.pieces = pieces};
  };
  refused(with({{""}}), {"empty"});
  refused(with({{std::string("a\0b", 3)}}), {"zero byte"});
  refused(with({{std::string(5000, 'x')}}), {"5000 bytes"});
  refused(with({{"x", std::numeric_limits<float>::quiet_NaN()}}), {"not finite"});
  refused(with({{"x", std::numeric_limits<float>::infinity()}}), {"not finite"});
  refused(with({{"a"}}), {"t.model"});                    // twice
  refused(with({{"<unk2>", 0, kUnknown}}), {"t.model"});  // twice
  refused(with({{"<0x41>", 0, kByte}}), {"t.model"});     // without byte_fallback
  refused({.pieces = {{"a"}}}, {"t.model"});              // no <unk>
  refused({.pieces = {{"<unk>", 0, kUnknown}, {"<0x4G>", 0, kByte}}, .byte_fallback = true}, {"t.model"});
  std::vector<PieceSpec> nested;
  for (int i = 1; i <= 64; ++i) nested.push_back({std::string(i, 'x'), 0, kUserDefined});
  EXPECT_NO_THROW(make_sentencepiece(sentencepiece_file(with(nested)), "t.model")->encode(std::string(99, 'x')));
  nested.push_back({std::string(65, 'x'), 0, kUserDefined});
  refused(with(nested), {"over 64 user-defined"});
}

// Bytes of the trie, lengths and pieces changed at random: a file is refused or works, and nothing crashes.
TEST(SentencePieceFile, DamageNeverCrashes) {
  Random random(3);
  int accepted = 0, refusals = 0;
  const auto count = [&](bool ok) { ++(ok ? accepted : refusals); };
  const auto change = [&](std::string& bytes, size_t begin) {
    for (int64_t n = random.integer(1, 4); n > 0; --n) {
      char& byte = bytes[static_cast<size_t>(
          random.integer(static_cast<int64_t>(begin), static_cast<int64_t>(bytes.size()) - 1))];
      byte = static_cast<char>(random.coin() ? byte ^ (1 << random.integer(0, 7)) : random.integer(0, 255));
    }
  };
  for (int i = 0; i < 1500; ++i) {
    const int type = static_cast<int>(random.integer(kUnigram, kCharacter));
    Charsmap map(sample_rules());
    for (int64_t n = random.integer(1, 20); n > 0; --n) {  // units that are in use
      size_t at = 0;
      do at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(map.units.size()) - 1));
      while (map.units[at] == 0x80000000u && random.integer(0, 100) > 0);
      map.units[at] ^= 1u << random.integer(0, 31);
    }
    std::string bytes = map.bytes();
    if (random.integer(0, 3) == 0) change(bytes, 0);
    count(fuzz::tokenizer(sentencepiece_file({.type = type, .charsmap = bytes, .denormalizer = random.coin()})));
  }
  for (int i = 0; i < 500; ++i) {
    std::string bytes = sentencepiece_file({.type = static_cast<int>(random.integer(kUnigram, kCharacter))});
    change(bytes, 0);
    count(fuzz::tokenizer(bytes));
  }
  for (int i = 0; i < 100; ++i) {
    std::string bytes = small_model();
    change(bytes, 0);
    count(fuzz::tokenizer(bytes));
  }
  EXPECT_GT(accepted, 200);
  EXPECT_GT(refusals, 200);
}

}  // namespace
}  // namespace furious
