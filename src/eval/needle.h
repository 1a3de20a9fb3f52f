// The needle in a haystack: a pass key hidden in a long text, at some depth, and asked for at its end. The answers are
// counted over a grid of lengths and depths.
#pragma once

#include <cstdint>
#include <functional>
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
};

struct NeedleGridOptions {
  // About so many characters (bytes of UTF-8), as in the paper: sentences stay whole.
  std::vector<int64_t> lengths{1024, 2048, 4096, 8192, 16384};
  std::vector<double> depths{0, 25, 50, 75, 100};
  int64_t questions = 10;  // for each length and depth
  int64_t digits = 5;      // of a pass key
  uint64_t seed = 123;
  // What the haystacks are made of, sentence by sentence or line by line; empty: sentences of our own.
  std::vector<std::string> hay;
};

// Length by length and in it depth by depth. The same options give the same texts.
std::vector<Needle> make_needles(const NeedleGridOptions& options);

// From a .jsonl (also .gz, .zst) or .parquet file with the fields prompt, answer, context_length and depth_percent, as
// the public set nanotron/simple_needle_in_a_hay_stack has them.
std::vector<Needle> read_needles(const std::string& path);

// Throws where the tokenizer loses part of a prompt or of an answer: no model could be right then.
void check_expressible(const std::vector<Needle>& needles, const Tokenizer& tokenizer);

// Whether a text that goes on after the prompt begins with the answer, and does not go on with more of its kind: 12 is
// not the beginning of 123. White space before it does not count.
bool answers(std::string_view text, std::string_view answer);

// What a model writes after a prompt, by greedy decoding, as far as the answer needs it.
std::string answer_of(const Model& model, const Needle& needle);

struct NeedleGrid {
  std::vector<int64_t> lengths;  // ascending
  std::vector<double> depths;    // ascending
  std::vector<Accuracy> cells;   // depth by depth, each with a cell for every length

  NeedleGrid(std::vector<int64_t> its_lengths, std::vector<double> its_depths);
  Accuracy& at(double depth, int64_t length);
  Accuracy total() const;
};

// Asks all questions. `progress` is called after each with what was counted so far, and ends the work by returning
// false.
using Answerer = std::function<std::string(const Needle&)>;
using NeedleProgress = std::function<bool(int64_t done, const NeedleGrid& so_far)>;
NeedleGrid ask_needles(const std::vector<Needle>& needles, const Answerer& answerer,
                       const NeedleProgress& progress = {});

// The same for a model of token ids (data/synthetic.h, NeedleTask): the lengths are numbers of needles.
NeedleGrid ask_small_model(const LanguageModel& model, const std::vector<int64_t>& lengths,
                           const std::vector<double>& depths, int64_t questions, uint64_t seed);

}  // namespace furious
