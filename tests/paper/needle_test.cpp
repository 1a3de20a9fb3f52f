#include "paper/needle.h"

#include <set>

#include "data/corpus.h"
#include "data/synthetic.h"
#include "decode/model_parts.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::Random;
using testing::TemporaryFolder;

NeedleGridOptions small_grid() {
  NeedleGridOptions options;
  options.lengths = {400, 900};
  options.depths = {0, 50, 100};
  options.questions = 4;
  return options;
}

TEST(Needle, NeedleIsAtItsDepthAndTheQuestionAtTheEnd) {
  Random random(11);
  NeedleGridOptions options = small_grid();
  options.lengths = {random.integer(300, 500), random.integer(2000, 3000)};
  options.depths = {0, 20, 50, 80, 100};
  options.seed = static_cast<uint64_t>(random.integer(0, 1 << 30));
  const std::vector<Needle> needles = make_needles(options);
  ASSERT_EQ(needles.size(), 2u * 5u * 4u);
  std::set<std::string> prompts;
  for (const Needle& needle : needles) {
    SCOPED_TRACE(needle.prompt);
    prompts.insert(needle.prompt);
    EXPECT_LE(needle.prompt.size(), static_cast<size_t>(needle.length));
    EXPECT_GT(needle.prompt.size() + 160, static_cast<size_t>(needle.length));
    EXPECT_EQ(needle.answer.size(), 5u);
    EXPECT_TRUE(needle.prompt.ends_with("The pass key is"));
    const size_t hay = needle.prompt.find("\n\n") + 2, end = needle.prompt.rfind("\n\n");
    const size_t at = needle.prompt.find("The pass key is " + needle.answer + ". Remember");
    ASSERT_NE(at, std::string::npos);
    EXPECT_TRUE(at == hay || needle.prompt.substr(at - 2, 2) == ". ") << "a sentence was cut in two";
    const std::string text =
        "The pass key is " + needle.answer + ". Remember it. " + needle.answer + " is the pass key. ";
    const auto place = static_cast<double>(at - hay), rest = static_cast<double>(end - hay - text.size());
    EXPECT_NEAR(place, needle.depth / 100 * rest, 60);
    EXPECT_EQ(needle.prompt.find(needle.answer, at + text.size()), std::string::npos);
  }
  EXPECT_EQ(prompts.size(), needles.size());
  EXPECT_EQ(make_needles(options)[7].prompt, needles[7].prompt);
  options.seed += 1;
  EXPECT_NE(make_needles(options)[7].answer, needles[7].answer);
}

TEST(Needle, CustomHaystack) {
  NeedleGridOptions options = small_grid();
  options.hay = {"größer als der Rest wird es nie", "und dann kam gar nichts mehr"};
  for (const Needle& needle : make_needles(options)) {
    int64_t replaced = 0;
    EXPECT_EQ(replace_invalid_utf8(needle.prompt, replaced), needle.prompt);
    EXPECT_EQ(replaced, 0);
    EXPECT_LE(needle.prompt.size(), static_cast<size_t>(needle.length));
    EXPECT_NE(needle.prompt.find("gar nichts"), std::string::npos);
  }
  std::string endless;
  while (endless.size() < 2000) endless += "öä";
  options.hay = {endless};
  for (const Needle& needle : make_needles(options)) {
    int64_t replaced = 0;
    replace_invalid_utf8(needle.prompt, replaced);
    EXPECT_EQ(replaced, 0);
    EXPECT_GT(needle.prompt.size() + 4, static_cast<size_t>(needle.length));
  }
}

TEST(Needle, RefusesInvalidOptions) {
  NeedleGridOptions options = small_grid();
  options.lengths = {100};
  expect_error([&] { make_needles(options); }, {"length of 100", "alone have"});
  options.lengths = {};
  expect_error([&] { make_needles(options); }, {"no lengths"});
  options = small_grid();
  options.depths = {120};
  expect_error([&] { make_needles(options); }, {"depth of 120", "0 to 100"});
  options = small_grid();
  options.questions = 0;
  expect_error([&] { make_needles(options); }, {"0 questions"});
}

TEST(Needle, OnlyACompleteAnswerIsCorrect) {
  EXPECT_TRUE(answers("48213", "48213"));
  EXPECT_TRUE(answers(" 48213. Remember", "48213"));
  EXPECT_TRUE(answers("\n48213\n", " 48213 "));
  EXPECT_FALSE(answers("482134", "48213"));
  EXPECT_FALSE(answers("4821", "48213"));
  EXPECT_FALSE(answers("the 48213", "48213"));
  EXPECT_FALSE(answers("", "48213"));
  EXPECT_FALSE(answers("anything", ""));
}

// Each text judged by both rules.
TEST(Needle, AuthorsProcedureUsesTheDigitsOfTheFirstWord) {
  struct Case {
    std::string text;
    bool whole, paper;
  };
  for (const auto& [text, whole, paper] : std::vector<Case>{{"48213. Remember it.", true, true},
                                                            {"48213", true, true},
                                                            {"482134 is", false, false},
                                                            {"4821 3", false, false},
                                                            {"key:48213, and", false, true},
                                                            {"4-82.13\nThe", false, true},
                                                            {"48213\n7 is", true, false},
                                                            {"48213.7", true, false},
                                                            {" 48213", true, false},
                                                            {"the 48213", false, false},
                                                            {"", false, false}}) {
    SCOPED_TRACE(text);
    EXPECT_EQ(answers(text, "48213"), whole);
    EXPECT_EQ(answers(text, "48213", AnswerRule::paper), paper);
  }
  const auto answerer = [](const Needle& needle) { return NeedleAnswer{"key:" + needle.answer, 1}; };
  const std::vector<Needle> needles = make_needles(small_grid());
  EXPECT_EQ(ask_needles(needles, answerer).total().right, 0);
  EXPECT_EQ(ask_needles(needles, answerer, {}, AnswerRule::paper).total().right, 24);
}

// Ten tokens; where eos comes early, the end of the prompt is before them.
TEST(Needle, AuthorsProcedureReadsTheLastTenTokens) {
  const LanguageModel language_model(model_config("2mamba", "tiny", 258), 5);
  const auto tokenizer = load_tokenizer("byte");
  const Needle needle{"The pass key is", "12345", 15, 0};
  const Model model(std::make_shared<Model::Parts>(language_model, tokenizer, true));
  Session session(model);
  session.read(needle.prompt);
  WriteOptions options;
  options.tokens = 10;
  options.sampling.temperature = 0;
  const Text plain = session.write(options).front();
  ASSERT_EQ(plain.ending, Ending::tokens);
  EXPECT_EQ(answer_of(model, needle, AnswerRule::paper).text, plain.text.substr(plain.text.starts_with(' ') ? 1 : 0));
  EXPECT_EQ(last_tokens_text(*tokenizer, "The pass key is ", {"12345", 10, Ending::tokens}, 10), "12345");
  EXPECT_EQ(last_tokens_text(*tokenizer, "The pass key is ", {" 12345", 10, Ending::tokens}, 10), "12345");
  EXPECT_EQ(last_tokens_text(*tokenizer, "The pass key is ", {"12345", 6, Ending::eos}, 10), "y is 12345");
  EXPECT_EQ(last_tokens_text(*tokenizer, "a", {"", 1, Ending::eos}, 10), "a");
}

// A model that finds only needles in the last half, and none of one cell.
TEST(Needle, CountsCorrectAnswersOfAFakeModel) {
  const std::vector<Needle> needles = make_needles(small_grid());
  const auto answerer = [](const Needle& needle) {
    const bool known = needle.depth >= 50 && !(needle.depth == 100 && needle.length == 900);
    return NeedleAnswer{known ? " " + needle.answer + "." : std::string(" 00000"), needle.length / 2};
  };
  int64_t calls = 0;
  const NeedleGrid grid = ask_needles(needles, answerer, [&](int64_t done, const NeedleGrid& so_far) {
    EXPECT_EQ(done, ++calls);
    EXPECT_EQ(so_far.total().asked, done);
    return true;
  });
  EXPECT_EQ(grid.lengths, (std::vector<int64_t>{400, 900}));
  EXPECT_EQ(grid.depths, (std::vector<double>{0, 50, 100}));
  EXPECT_EQ(grid.cells, (std::vector<Accuracy>{{0, 4}, {0, 4}, {4, 4}, {4, 4}, {4, 4}, {0, 4}}));
  EXPECT_EQ(grid.total(), (Accuracy{12, 24}));
  EXPECT_EQ(grid.at_length(0), (Accuracy{8, 12}));
  EXPECT_EQ(grid.at_length(1), (Accuracy{4, 12}));
  EXPECT_EQ(grid.mean_tokens(0), 200);
  EXPECT_EQ(grid.mean_tokens(1), 450);
  const NeedleGrid part = ask_needles(needles, answerer, [](int64_t done, const NeedleGrid&) { return done < 5; });
  EXPECT_EQ(part.total().asked, 5);
  EXPECT_EQ(part.cells.size(), 6u);
}

TEST(Needle, AModelAnswersGreedilyAndTheSameAgain) {
  const LanguageModel language_model(model_config("2mamba", "tiny", 258), 5);
  const Model model(std::make_shared<Model::Parts>(language_model, load_tokenizer("byte"), false));
  const Needle needle{"The pass key is", "12345", 15, 0};
  const auto [text, prompt_tokens] = answer_of(model, needle);
  EXPECT_EQ(prompt_tokens, 16) << "bytes, and the mark at the beginning";
  EXPECT_EQ(answer_of(model, needle).text, text);
  Session session(model);
  session.read(needle.prompt);
  WriteOptions options;
  options.tokens = 7;
  options.sampling.temperature = 0;
  EXPECT_EQ(session.write(options).front().text, text);
}

TEST(Needle, EvaluatesASmallModelOverTheGrid) {
  const LanguageModel model(model_config("2mamba", "tiny", 66), 5);
  const NeedleGrid grid = ask_small_model(model, {8, 2, 32}, {100, 0}, 10, 3);
  EXPECT_EQ(grid.lengths, (std::vector<int64_t>{2, 8, 32}));
  EXPECT_EQ(grid.depths, (std::vector<double>{0, 100}));
  for (const Accuracy& cell : grid.cells) EXPECT_EQ(cell.asked, 10);
  expect_error([&] { ask_small_model(model, {33}, {0}, 10, 3); }, {"33 pairs", "68", "66"});
}

TEST(Needle, FileWithTheFieldsOfThePublicSet) {
  const TemporaryFolder folder;
  const std::string lines =
      "{\"id\": 0, \"prompt\": \"a b\", \"answer\": 48213, \"context_length\": 1024, \"depth_percent\": 5}\n\n"
      "{\"prompt\": \"c\", \"answer\": \"x\", \"context_length\": \"2048\", \"depth_percent\": 47.5}\n";
  for (const auto& [name, bytes] : {std::pair{"a.jsonl", lines},
                                    {"b.jsonl.gz", testing::gzip_of(lines)},
                                    {"c.jsonl.zst", testing::zstd_of(lines)}}) {
    const std::vector<Needle> needles = read_needles(folder.write(name, bytes));
    ASSERT_EQ(needles.size(), 2u);
    EXPECT_EQ(needles[0].prompt, "a b");
    EXPECT_EQ(needles[0].answer, "48213");
    EXPECT_EQ(needles[0].length, 1024);
    EXPECT_EQ(needles[1].length, 2048);
    EXPECT_EQ(needles[1].depth, 47.5);
  }
}

std::string row(int64_t number, int64_t length) {
  return fmt::format("{{\"prompt\": \"p{0}\", \"answer\": {0}, \"context_length\": {1}, \"depth_percent\": 50}}\n",
                     number, length);
}

std::vector<int64_t> rows_of(const std::vector<Needle>& needles) {
  std::vector<int64_t> rows;
  for (const Needle& needle : needles) {
    EXPECT_EQ(needle.prompt, fmt::format("p{}", needle.row));
    rows.push_back(needle.row);
  }
  return rows;
}

TEST(Needle, RowsOfAFile) {
  using Rows = std::vector<int64_t>;
  const TemporaryFolder folder;
  std::string lines;
  for (int64_t i = 0; i < 10; ++i) lines += row(i, i % 2 == 0 ? 100 : 200);
  const std::string path = folder.write("a.jsonl.gz", testing::gzip_of(lines));
  NeedleRows rows;
  EXPECT_EQ(rows_of(read_needles(path)), (Rows{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  rows.questions = 3;
  EXPECT_EQ(rows_of(read_needles(path, rows)), (Rows{0, 1, 2}));
  rows.below = 200;  // before the count
  EXPECT_EQ(rows_of(read_needles(path, rows)), (Rows{0, 2, 4}));
  rows.shuffle = 420;  // numpy has 5 7 0 4 2 3 9 6 8 1
  EXPECT_EQ(rows_of(read_needles(path, rows)), (Rows{0, 4, 2}));
  rows.questions = 99;
  EXPECT_EQ(rows_of(read_needles(path, rows)), (Rows{0, 4, 2, 6, 8}));
  rows = {};
  rows.indices = {7, 2, 8, 1};
  const std::vector<Needle> chosen = read_needles(path, rows);
  EXPECT_EQ(rows_of(chosen), rows.indices);
  EXPECT_EQ(read_row_numbers(folder.write("rows", row_numbers(chosen))), rows.indices);
  rows.below = 150;
  EXPECT_EQ(rows_of(read_needles(path, rows)), (Rows{2, 8}));

  // Files of a folder are counted through.
  folder.write("parts/1.jsonl", row(0, 1) + row(1, 1));
  folder.write("parts/2.jsonl", row(2, 1) + row(3, 1));
  rows = {};
  rows.indices = {3, 1};
  EXPECT_EQ(rows_of(read_needles(folder.path("parts"), rows)), rows.indices);
}

TEST(Needle, ThePapersRows) {
  const TemporaryFolder folder;
  std::string lines;
  for (int64_t i = 0; i < 12000; ++i) lines += row(i, i % 6 == 5 ? 32768 : 1024 << (i % 6));
  const std::vector<int64_t> rows = rows_of(read_needles(folder.write("a.jsonl", lines), paper_needle_rows()));
  ASSERT_EQ(rows.size(), 1000u);
  // numpy begins with 5874, 5239, 1656, 469, 10972; none of these is of 32,768 characters.
  EXPECT_EQ((std::vector<int64_t>{rows.begin(), rows.begin() + 5}),
            (std::vector<int64_t>{5874, 5239, 1656, 469, 10972}));
  for (const int64_t one : rows) EXPECT_NE(one % 6, 5);
}

TEST(Needle, RefusesInvalidRows) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.jsonl", row(0, 100) + row(1, 200));
  const auto read = [&](const NeedleRows& rows) { read_needles(path, rows); };
  NeedleRows rows;
  rows.indices = {1, 2};
  expect_error([&] { read(rows); }, {"row 2", "a.jsonl", "has 2"});
  rows.indices = {1, 1};
  expect_error([&] { read(rows); }, {"row 1", "twice"});
  rows.indices = {0};
  rows.shuffle = 1;
  expect_error([&] { read(rows); }, {"choose one"});
  rows = {};
  rows.below = 100;
  expect_error([&] { read(rows); }, {"none of the 2 questions", "--below"});
  rows = {};
  rows.most_bytes = 3;
  expect_error([&] { read(rows); }, {"a.jsonl", "more than 3 bytes", "--questions"});
  rows.questions = 1;
  read(rows);
  rows.questions = 5;
  expect_error([&] { read_needles(folder.write("none.jsonl", "\n"), rows); }, {"none.jsonl", "no questions"});
  expect_error([&] { read_row_numbers(folder.write("r", "1\n\n2.5\n")); }, {"line 3", "2.5", "row number"});
  expect_error([&] { read_row_numbers(folder.write("r", "-1\n")); }, {"line 1", "-1"});
  expect_error([&] { read_row_numbers(folder.write("r", "\n")); }, {"no row numbers"});
}

TEST(Needle, BadFilesAreNamed) {
  const TemporaryFolder folder;
  const auto read = [&](const std::string& text) { read_needles(folder.write("n.jsonl", text)); };
  const std::string good = "{\"prompt\": \"a\", \"answer\": \"1\", \"context_length\": 10, \"depth_percent\": 0}\n";
  expect_error([&] { read(""); }, {"n.jsonl", "no questions"});
  expect_error([&] { read(good + good.substr(0, 20)); }, {"n.jsonl", "line 2", "damaged"});
  expect_error([&] { read(good + "{\"prompt\": \"a\", \"answer\": \"1\", \"context_len\": 10}"); },
               {"line 2", "context_length", "did you mean \"context_len\""});
  expect_error(
      [&] { read("{\"prompt\": \"a\", \"answer\": \"1\", \"context_length\": \"long\", \"depth_percent\": 0}"); },
      {"record 1", "context_length", "long"});
  expect_error([&] { read("{\"prompt\": \"a\", \"answer\": \" \", \"context_length\": 1, \"depth_percent\": 0}"); },
               {"record 1", "answer is empty"});
  expect_error([&] { read("{\"prompt\": [1], \"answer\": \"1\", \"context_length\": 1, \"depth_percent\": 0}"); },
               {"line 1", "prompt", "neither a string nor a number"});
  expect_error([&] { read_needles(folder.path("none.jsonl")); }, {"none.jsonl"});
  expect_error([&] { read_needles(folder.write("n.txt", good)); }, {"n.txt", ".jsonl"});
  expect_error([&] { read_needles(folder.write("cut.jsonl.gz", testing::gzip_of(good).substr(0, 20))); },
               {"cut.jsonl.gz"});
}

// Encodes the letters a to z and drops everything else.
class LettersOnly final : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(c >= 'a' && c <= 'z' ? c - 'a' : 26);
    return ids;
  }
  std::vector<int32_t> encode_continuation(std::string_view text) const override { return encode(text); }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) text += piece(id);
    return text;
  }
  std::string piece(int32_t id) const override { return id < 26 ? std::string(1, static_cast<char>('a' + id)) : "?"; }
  int32_t vocabulary_size() const override { return 27; }
  int32_t bos() const override { return -1; }
  int32_t eos() const override { return -1; }
  std::string kind() const override { return "letters"; }
  std::string fingerprint() const override { return "letters"; }
  TokenizerFiles files(bool) const override { return {}; }
};

TEST(Needle, RefusesTokenizersThatLoseTheAnswer) {
  const std::vector<Needle> needles = make_needles(small_grid());
  check_expressible(needles, *load_tokenizer("byte"));
  expect_error([&] { check_expressible(needles, LettersOnly()); },
               {"cannot express", "answer of question 1", "--data"});
  check_expressible({{"key", "abc", 3, 0}}, LettersOnly());
  expect_error([&] { check_expressible({{"Key", "abc", 3, 0}}, LettersOnly()); }, {"prompt of question 1", "Key"});
}

}  // namespace
}  // namespace furious
