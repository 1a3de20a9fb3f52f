// Multiple-choice tasks, scored as lm-evaluation-harness scores HellaSwag, ARC and PIQA: a choice is as probable as the
// model finds its text after the context.
//
//   acc        the choice with the largest log-likelihood Σ log p is the right one
//   acc_norm   the largest log-likelihood per byte of the choice
//   acc_token  the largest log-likelihood per token of the choice
//
// A task whose examples have one choice each is scored as LAMBADA: acc is how often greedy decoding writes the choice,
// and the perplexity is exp(−mean log-likelihood) of the choices.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "furious/model.h"

namespace furious {

struct TaskExample {
  std::string context;
  std::vector<std::string> choices;
  size_t answer = 0;  // the right one
};

struct Task {
  std::string name;  // of the file, without folder and extension
  std::vector<TaskExample> examples;

  bool has_one_choice() const { return examples.front().choices.size() == 1; }
};

// From a .jsonl file (also .gz or .zst), a line {"context": "…", "choices": ["…", "…"], "answer": 0} for each example;
// "answer" may be left out where there is one choice. A line that is none is an Error that names it.
Task read_task(const std::string& path);

// The tokens of a context and of each choice after it. White space at the end of a context counts to the choices; where
// neither has any, a space is put between them. The tokens of a choice are those of the whole text after as many as the
// context alone has.
struct TaskTokens {
  std::vector<int32_t> context;
  std::vector<std::vector<int32_t>> choices;
};
TaskTokens encode_example(const Model& model, const TaskExample& example);

struct ChoiceScore {
  double log_likelihood = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;    // of its text, without a space before it
  bool greedy = false;  // only where it is the only choice
};

struct ExampleScore {
  std::vector<ChoiceScore> choices;
  size_t answer = 0;

  // The choice with the largest score; the first of equal ones.
  size_t best() const;
  size_t best_per_byte() const;
  size_t best_per_token() const;
};

// A mean and its standard error, that of a sample; the error of one example is NaN.
struct Estimate {
  double value = 0, error = 0;
};

struct TaskResult {
  std::string name;
  std::vector<ExampleScore> examples;

  bool has_one_choice() const { return examples.front().choices.size() == 1; }
  Estimate acc() const;
  Estimate acc_norm() const;
  Estimate acc_token() const;
  Estimate perplexity() const;
};

// `progress` is called after some examples with the number done, and ends the work by returning false: the result has
// those that were done by then.
using TaskProgress = std::function<bool(int64_t done)>;
TaskResult run_task(const Model& model, const Task& task, const TaskProgress& progress = {});

}  // namespace furious
