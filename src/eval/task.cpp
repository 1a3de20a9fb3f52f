#include "eval/task.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "base/error.h"
#include "base/json.h"
#include "base/parallel.h"
#include "data/records.h"
#include "data/utf8.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"

namespace furious {
namespace {

constexpr int64_t kMostChoices = 1000;
constexpr size_t kSlots = 64;            // sequences at a time, unless one example has more choices
constexpr size_t kTokensAtOnce = 4096;   // of contexts that are read together
constexpr int64_t kMostBytes = 1 << 30;  // of the texts of a task

TaskExample example_of(const JsonValue& line) {
  TaskExample example;
  example.context = line.at("context").text();
  const std::vector<JsonValue> choices = line.at("choices").items();
  const auto count = static_cast<int64_t>(choices.size());
  if (count < 1 || count > kMostChoices) line.at("choices").unexpected(fmt::format("1 to {} choices", kMostChoices));
  for (const JsonValue& choice : choices) {
    example.choices.push_back(choice.text());
    if (example.choices.back().empty()) choice.unexpected("a text that is not empty");
  }
  if (count > 1 || line.has("answer")) example.answer = static_cast<size_t>(line.at("answer").integer(0, count - 1));
  return example;
}

// The bytes of white space at the end of valid text.
size_t trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t begin = end - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!is_white_space(first_code_point(text.substr(begin, end - begin)))) break;
    end = begin;
  }
  return text.size() - end;
}

Estimate mean_of(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (const double value : values) sum += value;
  const double mean = sum / count;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double error = values.size() > 1 ? std::sqrt(squares / (count - 1) / count) : std::nan("");
  return {mean, error};
}

Estimate rate_of(const std::vector<ExampleScore>& examples, const std::function<bool(const ExampleScore&)>& right) {
  std::vector<double> values;
  for (const ExampleScore& example : examples) values.push_back(right(example) ? 1 : 0);
  return mean_of(values);
}

size_t best_by(const ExampleScore& example, const std::function<double(const ChoiceScore&)>& score) {
  size_t best = 0;
  for (size_t i = 1; i < example.choices.size(); ++i)
    if (score(example.choices[i]) > score(example.choices[best])) best = i;
  return best;
}

// Some examples whose contexts are read together and then continued by all of their choices.
class TaskBatch {
 public:
  TaskBatch(const Model& model, size_t slots) : model_(model), decoder_(model.parts().language_model, slots) {}

  std::vector<ExampleScore> scores(std::span<const TaskExample> examples, std::span<const TaskTokens> tokens);

 private:
  const Model& model_;
  Decoder decoder_;
};

std::vector<ExampleScore> TaskBatch::scores(std::span<const TaskExample> examples, std::span<const TaskTokens> tokens) {
  std::vector<Decoder::Prompt> contexts, choices;
  for (const TaskTokens& own : tokens) contexts.push_back({decoder_.start(), own.context});
  decoder_.read(contexts);
  for (size_t i = 0; i < tokens.size(); ++i)
    for (size_t choice = 0; choice < tokens[i].choices.size(); ++choice) {
      const bool last = choice + 1 == tokens[i].choices.size();  // goes on in the slot of the context itself
      const int32_t slot = last ? contexts[i].slot : decoder_.fork(contexts[i].slot);
      choices.push_back({slot, tokens[i].choices[choice]});
    }
  const std::vector<TokenScores> found = decoder_.score(choices, examples.front().choices.size() == 1);
  for (const auto& [slot, own] : choices) decoder_.stop(slot);
  std::vector<ExampleScore> scores;
  size_t next = 0;
  for (const TaskExample& example : examples) {
    scores.push_back({{}, example.answer});
    for (const std::string& choice : example.choices) {
      const TokenScores& score = found[next++];
      scores.back().choices.push_back({score.sum(), static_cast<int64_t>(score.log_probabilities.size()),
                                       static_cast<int64_t>(choice.size()),
                                       example.choices.size() == 1 && score.greedy});
    }
  }
  return scores;
}

}  // namespace

Task read_task(const std::string& path) {
  Task task;
  std::string name = std::filesystem::path(path).filename().string();
  task.name = name.substr(0, name.find('.', 1));
  int64_t bytes = 0;
  for_each_line(path, [&](const std::string& line, const std::string& place) {
    try {
      const nlohmann::json parsed = parse_json(line, place);
      task.examples.push_back(example_of(JsonValue(parsed, place)));
    } catch (const Error& error) {
      fail(R"({}; expected a line such as {{"context": "The sky is", "choices": ["blue", "green"], "answer": 0}})",
           error.what());
    }
    require((task.examples.back().choices.size() == 1) == task.has_one_choice(),
            "{}: the number of choices is {}, in the first example it is {}; put examples with one choice, which are "
            "scored by greedy decoding, into a file of their own",
            place, task.examples.back().choices.size(), task.examples.front().choices.size());
    bytes += static_cast<int64_t>(line.size());
    require(bytes <= kMostBytes, "\"{}\" has more than {} bytes; divide it into several tasks", path, kMostBytes);
  });
  require(!task.examples.empty(), "\"{}\" has no examples; expected a JSON object on each line", path);
  return task;
}

TaskTokens encode_example(const Model& model, const TaskExample& example) {
  const Model::Parts& parts = model.parts();
  const size_t space = trailing_space(example.context);
  const std::string context = example.context.substr(0, example.context.size() - space);
  const std::string between = example.context.substr(context.size());
  TaskTokens tokens;
  const std::vector<int32_t> of_context = context.empty() ? std::vector<int32_t>() : parts.tokenizer->encode(context);
  tokens.context = parts.prompt(context);
  for (const std::string& choice : example.choices) {
    const bool joined = context.empty() || space > 0 || is_white_space(first_code_point(choice));
    const std::vector<int32_t> whole = parts.tokenizer->encode(context + (joined ? between : " ") + choice);
    require(whole.size() > of_context.size(),
            "the tokenizer joins the choice \"{}\" to the end of its context; a choice needs a token of its own",
            choice);
    tokens.choices.emplace_back(whole.begin() + static_cast<int64_t>(of_context.size()), whole.end());
  }
  require(!tokens.context.empty(),
          "the context is empty, and the tokenizer has neither bos nor eos to begin a text with; give a context");
  return tokens;
}

size_t ExampleScore::best() const {
  return best_by(*this, [](const ChoiceScore& choice) { return choice.log_likelihood; });
}

size_t ExampleScore::best_per_byte() const {
  return best_by(*this,
                 [](const ChoiceScore& choice) { return choice.log_likelihood / static_cast<double>(choice.bytes); });
}

size_t ExampleScore::best_per_token() const {
  return best_by(*this,
                 [](const ChoiceScore& choice) { return choice.log_likelihood / static_cast<double>(choice.tokens); });
}

Estimate TaskResult::acc() const {
  return rate_of(examples, [](const ExampleScore& example) {
    return example.choices.size() == 1 ? example.choices[0].greedy : example.best() == example.answer;
  });
}

Estimate TaskResult::acc_norm() const {
  return rate_of(examples, [](const ExampleScore& example) { return example.best_per_byte() == example.answer; });
}

Estimate TaskResult::acc_token() const {
  return rate_of(examples, [](const ExampleScore& example) { return example.best_per_token() == example.answer; });
}

// The error is that of the mean log-likelihood, carried through the exponential.
Estimate TaskResult::perplexity() const {
  std::vector<double> losses;
  for (const ExampleScore& example : examples) losses.push_back(-example.choices[example.answer].log_likelihood);
  const Estimate loss = mean_of(losses);
  return {std::exp(loss.value), std::exp(loss.value) * loss.error};
}

TaskResult run_task(const Model& model, const Task& task, const TaskProgress& progress) {
  const ThreadLimit limit(model.parts().threads);
  std::vector<TaskTokens> tokens;
  size_t most_choices = 1;
  for (const TaskExample& example : task.examples) {
    try {
      tokens.push_back(encode_example(model, example));
    } catch (const Error& error) {
      fail("task {}, example {}: {}", task.name, tokens.size() + 1, error.what());
    }
    most_choices = std::max(most_choices, example.choices.size());
  }
  const size_t slots = std::max(kSlots, most_choices);
  TaskBatch batch(model, slots);
  TaskResult result{task.name, {}};
  for (size_t begin = 0, end = 0; begin < tokens.size(); begin = end) {
    size_t sequences = 0, read = 0;
    for (; end < tokens.size(); ++end) {
      sequences += tokens[end].choices.size();
      read += tokens[end].context.size();
      if (end > begin && (sequences > slots || read > kTokensAtOnce)) break;
    }
    const std::vector<ExampleScore> scores = batch.scores(std::span(task.examples).subspan(begin, end - begin),
                                                          std::span(tokens).subspan(begin, end - begin));
    result.examples.insert(result.examples.end(), scores.begin(), scores.end());
    if (progress && !progress(static_cast<int64_t>(end))) break;
  }
  return result;
}

}  // namespace furious
