#include "eval/task.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "data/corpus.h"
#include "decode/model_parts.h"
#include "model/little.h"

namespace furious {
namespace {

using namespace furious::testing;

// Weights large enough that choices differ.
Model lively_model(const std::string& arch, const std::shared_ptr<const Tokenizer>& tokenizer) {
  Random random(1);
  LanguageModel model(model_config(arch, "tiny", 400), [&](const std::string&, const Tensor& out) {
    copy_between(out, random.normal_tensor(out.shape(), 0.1));
  });
  return Model(std::make_shared<const Model::Parts>(std::move(model), tokenizer, false));
}

class TaskTest : public ::testing::TestWithParam<const char*> {
 protected:
  Task task(const std::string& lines) const { return read_task(folder.write("t.jsonl", lines)); }

  TemporaryFolder folder;
};

std::string line(const std::string& context, const std::vector<std::string>& choices, int64_t answer) {
  return nlohmann::json{{"context", context}, {"choices", choices}, {"answer", answer}}.dump() + "\n";
}

// Every context and choice alone, in one full pass, tokenized as lm-evaluation-harness does.
double plain_score(const Model& model, const std::string& context, const std::string& choice) {
  std::string before = context, after = choice;
  while (before.ends_with(' ')) {
    before.pop_back();
    after = " " + after;
  }
  if (before == context && !before.empty() && !choice.starts_with(' ')) after = " " + after;
  std::vector<int32_t> ids = model.prompt(before + after);
  const size_t known = model.prompt(before).size();
  const std::vector<double> scores = model.scores(ids);
  double sum = 0;
  for (size_t i = known; i < ids.size(); ++i) sum += scores[i - 1];
  return sum;
}

TEST_P(TaskTest, ScoresMatchAFullPassOverEveryChoice) {
  const Model model = lively_model(GetParam(), make_sentencepiece(small_model(), "t.model"));
  Random random(3);
  std::string lines;
  std::vector<TaskExample> expected;
  for (int i = 0; i < 90; ++i) {  // several batches
    TaskExample example{random_sentence(random, random.integer(1, 30)), {}, 0};
    if (i % 7 == 0) example.context.clear();
    if (i % 7 == 1) example.context += "  ";
    const int64_t choices = random.integer(2, 5);
    for (int64_t c = 0; c < choices; ++c)
      example.choices.push_back((i % 5 == 0 ? " " : "") + random_sentence(random, random.integer(1, 6)));
    example.answer = static_cast<size_t>(random.integer(0, choices - 1));
    lines += line(example.context, example.choices, static_cast<int64_t>(example.answer));
    expected.push_back(example);
  }
  int64_t seen = 0;
  const TaskResult result = run_task(model, task(lines), [&](int64_t done) {
    EXPECT_GT(done, seen);
    seen = done;
    return true;
  });
  EXPECT_EQ(seen, 90);
  ASSERT_EQ(result.examples.size(), expected.size());
  double right = 0, right_by_byte = 0, right_by_token = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const TaskExample& example = expected[i];
    std::vector<double> scores, by_byte, by_token;
    for (size_t c = 0; c < example.choices.size(); ++c) {
      const ChoiceScore& found = result.examples[i].choices[c];
      scores.push_back(plain_score(model, example.context, example.choices[c]));
      EXPECT_NEAR(found.log_likelihood, scores.back(), 1e-3 * std::abs(scores.back())) << i << " " << c;
      EXPECT_EQ(found.bytes, static_cast<int64_t>(example.choices[c].size()));
      by_byte.push_back(scores.back() / static_cast<double>(found.bytes));
      by_token.push_back(scores.back() / static_cast<double>(found.tokens));
    }
    const auto best = [](const std::vector<double>& all) {
      return static_cast<size_t>(std::ranges::max_element(all) - all.begin());
    };
    EXPECT_EQ(result.examples[i].best(), best(scores));
    right += best(scores) == example.answer;
    right_by_byte += best(by_byte) == example.answer;
    right_by_token += best(by_token) == example.answer;
  }
  const auto expect_rate = [](const Estimate& rate, double right_ones) {
    const double p = right_ones / 90;
    EXPECT_NEAR(rate.value, p, 1e-12);
    EXPECT_NEAR(rate.error, std::sqrt(p * (1 - p) / 89), 1e-12);
  };
  expect_rate(result.acc(), right);
  expect_rate(result.acc_norm(), right_by_byte);
  expect_rate(result.acc_token(), right_by_token);
}

TEST_P(TaskTest, OneChoiceIsScoredByGreedyDecoding) {
  const Model model = lively_model(GetParam(), load_tokenizer("byte"));
  std::string lines;
  std::vector<std::string> contexts, choices;
  Random random(4);
  for (int i = 0; i < 12; ++i) {
    Session session(model);
    contexts.push_back(random_sentence(random, 5) + " ");
    session.read(contexts.back().substr(0, contexts.back().size() - 1));
    WriteOptions options;
    options.sampling.temperature = 0;
    options.tokens = 3;
    // What the model writes, or something else; it must begin with the space that the context ends with.
    choices.push_back(i % 2 == 0 ? session.write(options)[0].text : " no");
    if (!choices.back().starts_with(' ')) choices.back() = " yes";
    choices.back().erase(0, 1);
    if (choices.back().empty()) choices.back() = "x";
    lines += nlohmann::json{{"context", contexts.back()}, {"choices", {choices.back()}}}.dump(
                 -1, ' ', false, nlohmann::json::error_handler_t::replace) +
             "\n";
  }
  const Task read = task(lines);
  EXPECT_TRUE(read.has_one_choice());
  const TaskResult result = run_task(model, read);
  double loss = 0;
  for (size_t i = 0; i < contexts.size(); ++i) {
    const TaskTokens tokens = encode_example(model, read.examples[i]);
    bool greedy = true;
    std::vector<int32_t> ids = tokens.context;
    for (const int32_t token : tokens.choices[0]) {
      const std::vector<float> logits = model.logits(ids);
      const auto last = logits.end() - model.vocabulary();
      greedy = greedy && std::max_element(last, logits.end()) - last == token;
      ids.push_back(token);
    }
    EXPECT_EQ(result.examples[i].choices[0].greedy, greedy) << i;
    loss -= plain_score(model, contexts[i], read.examples[i].choices[0]) / static_cast<double>(contexts.size());
  }
  EXPECT_NEAR(result.perplexity().value, std::exp(loss), 1e-3 * std::exp(loss));
}

INSTANTIATE_TEST_SUITE_P(Presets, TaskTest, ::testing::Values("2mamba", "softmax", "mamba2"));

TEST_F(TaskTest, TheBoundaryBetweenContextAndChoice) {
  const Model model = lively_model("2mamba", load_tokenizer("byte"));
  const auto choice = [&](const std::string& context, const std::string& text) {
    return model.decode(encode_example(model, {context, {text}, 0}).choices[0]);
  };
  EXPECT_EQ(choice("a", "b"), " b");
  EXPECT_EQ(choice("a", " b"), " b");
  EXPECT_EQ(choice("a ", "b"), " b");
  EXPECT_EQ(choice("a \n", "b"), " \nb");
  EXPECT_EQ(choice("a\u00a0", "b"), "\u00a0b");
  EXPECT_EQ(choice("", "b"), "b");
  EXPECT_EQ(choice("  ", "b"), "  b");
  EXPECT_EQ(encode_example(model, {"", {"b"}, 0}).context, (std::vector<int32_t>{model.eos()}));
  EXPECT_EQ(encode_example(model, {"a ", {"b"}, 0}).context, (std::vector<int32_t>{model.eos(), 'a'}));
}

TEST_F(TaskTest, RefusesBadLines) {
  const std::string good = line("a", {"b", "c"}, 0);
  const auto refused = [&](const std::string& bad, const std::vector<std::string>& parts) {
    expect_error([&] { task(good + "\n" + bad + "\n"); }, parts);
  };
  const std::string expected = R"(expected a line such as {"context")";
  refused("{\"context\"", {"t.jsonl", "line 3", expected});
  refused("[1]", {"line 3", expected});
  refused(R"({"choices": ["b", "c"], "answer": 0})", {"line 3", "context", expected});
  refused(R"({"context": 1, "choices": ["b", "c"], "answer": 0})", {"line 3", "context", expected});
  refused(R"({"context": "a", "choices": "b", "answer": 0})", {"line 3", "choices", expected});
  refused(R"({"context": "a", "choices": [], "answer": 0})", {"line 3", "choices", "1 to 1000"});
  refused(R"({"context": "a", "choices": ["b", ""], "answer": 0})", {"line 3", "choices[1]", "not empty"});
  refused(R"({"context": "a", "choices": ["b", "c"], "answer": 2})", {"line 3", "answer", "0 to 1"});
  refused(R"({"context": "a", "choices": ["b", "c"]})", {"line 3", "answer", expected});
  refused(R"({"context": "a", "choices": ["b"]})", {"line 3", "number of choices is 1", "a file of their own"});
  expect_error([&] { task("\n"); }, {"t.jsonl", "no examples"});
  expect_error([&] { read_task(folder.path("none.jsonl")); }, {"none.jsonl"});
  EXPECT_EQ(task(good).name, "t");
}

}  // namespace
}  // namespace furious
