// The needle-in-a-haystack test: a pass key is hidden in a long text at some depth and asked for at the end. Right
// answers are counted over a grid of lengths and depths.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "eval/accuracy.h"
#include "furious/model.h"

namespace furious {

struct Needle {
  std::string prompt, answer;
  int64_t length = 0;  // of the text, as its maker counted it
  double depth = 0;    // of the needle, in percent: 0 at the beginning, 100 at the end
  int64_t row = -1;    // in the file that it comes from, from 0 on
};

struct NeedleGridOptions {
  // About so many characters (bytes of UTF-8), as in the paper: sentences stay whole.
  std::vector<int64_t> lengths{1024, 2048, 4096, 8192, 16384};
  std::vector<double> depths{0, 25, 50, 75, 100};
  int64_t questions = 10;  // for each length and depth
  int64_t digits = 5;      // of a pass key
  uint64_t seed = 123;
  // What the haystacks are made of, sentence by sentence or line by line; empty: built-in sentences.
  std::vector<std::string> hay;
};

// Length by length and in it depth by depth. The same options give the same texts.
std::vector<Needle> make_needles(const NeedleGridOptions& options);

// Which rows of a file are asked, and in which order.
struct NeedleRows {
  std::vector<int64_t> indices;     // from 0 on, in the order of asking; empty: all, in the order of the file
  std::optional<uint32_t> shuffle;  // all, in numpy's order of this seed (base/numpy_shuffle.h)
  int64_t below = 0;                // of these only texts with a context_length below it; 0: any
  int64_t questions = 0;            // of these the first so many; 0: all
  int64_t most_bytes = 1 << 30;     // that their prompts may take; more are refused
};

// The rows that the authors' script asks: seed 420, below 32,768 characters, the first 1,000.
NeedleRows paper_needle_rows();

// From a .jsonl (also .gz, .zst) or .parquet file with the fields prompt, answer, context_length and depth_percent, as
// the public set nanotron/simple_needle_in_a_hay_stack has them. Only prompts that are asked stay in memory.
std::vector<Needle> read_needles(const std::string& path, const NeedleRows& rows = {});

// A file of row numbers, one on each line.
std::vector<int64_t> read_row_numbers(const std::string& path);
std::string row_numbers(const std::vector<Needle>& needles);

// Throws where the tokenizer loses part of a prompt or of an answer: no model could be right then.
void check_expressible(const std::vector<Needle>& needles, const Tokenizer& tokenizer);

enum class AnswerRule : uint8_t {
  // The text continues with the whole answer: 12 does not match 123. White space before
  // it does not count.
  whole,
  // As the authors judge: ten tokens are generated, and the last ten of prompt and these are decoded; the digits of the
  // text up to its first space are the answer. After an early eos that text begins in the prompt.
  paper
};

// Whether the text of an answer is right.
bool answers(std::string_view text, std::string_view answer, AnswerRule rule = AnswerRule::whole);

// What the paper's rule reads: the text of the last `count` tokens of a prompt and what was written after it. As
// SentencePiece decodes, a space that the first of them begins with is left out.
std::string last_tokens_text(const Tokenizer& tokenizer, const std::string& prompt, const Text& written, int64_t count);

struct NeedleAnswer {
  std::string text;           // what the rule judges
  int64_t prompt_tokens = 0;  // read before it, with the mark at the beginning
};

// What a model writes after a prompt, by greedy decoding, as far as the rule needs it.
NeedleAnswer answer_of(const Model& model, const Needle& needle, AnswerRule rule = AnswerRule::whole);

struct NeedleGrid {
  std::vector<int64_t> lengths;  // ascending
  std::vector<double> depths;    // ascending
  std::vector<Accuracy> cells;   // depth by depth, each with a cell for every length
  // For each length, of the prompts asked, all together; 0 where lengths do not count characters.
  std::vector<int64_t> prompt_tokens;

  NeedleGrid(std::vector<int64_t> its_lengths, std::vector<double> its_depths);
  size_t column_of(int64_t length) const;
  Accuracy& at(double depth, int64_t length);
  Accuracy at_length(size_t column) const;  // at all depths
  double mean_tokens(size_t column) const;  // of a prompt
  Accuracy total() const;
};

// The authors' results, for lengths in characters that they state in tokens, too (niah_and_hs/niah_heatmap.py in their
// repository).
struct PaperNeedles {
  std::string model;
  std::vector<double> proportions;  // one for each length
};
extern const std::vector<int64_t> kPaperNeedleLengths, kPaperNeedleTokens;
extern const std::vector<PaperNeedles> kPaperNeedles;

// Asks all questions. `progress` is called after each with what was counted so far, and ends the work by returning
// false.
using Answerer = std::function<NeedleAnswer(const Needle&)>;
using NeedleProgress = std::function<bool(int64_t done, const NeedleGrid& so_far)>;
NeedleGrid ask_needles(const std::vector<Needle>& needles, const Answerer& answerer,
                       const NeedleProgress& progress = {}, AnswerRule rule = AnswerRule::whole);

// The same for a model of token ids (data/synthetic.h, NeedleTask): the lengths are numbers of needles.
NeedleGrid ask_small_model(const LanguageModel& model, const std::vector<int64_t>& lengths,
                           const std::vector<double>& depths, int64_t questions, uint64_t seed);

}  // namespace furious
