#include "serve/scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <future>

#include "serve/served_model.h"

namespace furious {
namespace {

using namespace furious::testing;
using serve::chunk_ends;
using serve::Job;
using serve::JobResult;
using serve::Prompt;
using serve::Scheduler;

using Ends = std::vector<size_t>;

Prompt prompt_of(size_t ids, const std::vector<size_t>& boundaries) {
  Prompt prompt{std::vector<int32_t>(ids, 'a'), "", {}};
  for (const size_t at : boundaries) prompt.boundaries.push_back({at, 0});
  return prompt;
}

TEST(Scheduler, ChunksEndAtBoundariesAndEverySoManyTokens) {
  EXPECT_EQ(chunk_ends(prompt_of(10, {10}), 4), (Ends{4, 8, 10}));
  EXPECT_EQ(chunk_ends(prompt_of(8, {}), 4), (Ends{4, 8}));
  EXPECT_EQ(chunk_ends(prompt_of(20, {3, 3, 12, 20}), 5), (Ends{3, 8, 12, 17, 20}));
  // A longer conversation has the ends of a shorter one.
  const Ends all = chunk_ends(prompt_of(30, {3, 12, 20, 30}), 5), part = chunk_ends(prompt_of(20, {3, 12, 20}), 5);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin()));
  EXPECT_TRUE(chunk_ends(prompt_of(0, {}), 4).empty());
}

TEST(Scheduler, PassesOfANamedStateAreItsOwn) {
  using serve::after_pass;
  const auto numbers = [](const Prompt& prompt) {
    std::vector<uint64_t> all;
    for (const serve::PassEnd& one : serve::pass_ends(prompt, chunk_ends(prompt, 4), 5)) all.push_back(one.passes);
    return all;
  };
  Prompt prompt = prompt_of(10, {6, 10});
  const uint64_t first = after_pass(5, 4), second = after_pass(first, 6);
  EXPECT_EQ(numbers(prompt), (std::vector<uint64_t>{first, second, after_pass(second, 10)}));
  prompt.state_ids = 6;
  prompt.state_passes = 8;
  EXPECT_EQ(numbers(prompt), (std::vector<uint64_t>{first, 8, after_pass(8, 10)}));
}

struct Ended {
  std::promise<JobResult> result;
  std::string text;
};

Job job_of(size_t tokens, int64_t answer, const std::shared_ptr<Ended>& ended) {
  Job job;
  job.prompt = prompt_of(tokens, {tokens});
  job.max_tokens = answer;
  job.sampling = {.temperature = 1, .seed = 3, .logit_bias = {{257, -INFINITY}}};
  job.on_part = [ended](const serve::AnswerPart& part) { ended->text += part.text; };
  job.on_end = [ended](JobResult result) { ended->result.set_value(std::move(result)); };
  return job;
}

// A long prompt is read while another answer is written, and a short one that comes later ends first.
TEST(Scheduler, LongPromptsDelayNobody) {
  const Model model = served_model("2mamba");
  Scheduler scheduler(model, nullptr, {.slots = 3, .chunk = 16});
  const auto running = std::make_shared<Ended>(), longest = std::make_shared<Ended>(), late = std::make_shared<Ended>();
  std::atomic<int64_t> order{0};
  int64_t long_ended = 0, late_ended = 0;
  Job first = job_of(10, 100000, running);
  std::promise<void> started;
  std::atomic<bool> has_started{false};
  first.stream = true;
  first.on_part = [&](const serve::AnswerPart&) {
    if (!has_started.exchange(true)) started.set_value();
  };
  const Scheduler::Ticket ticket = scheduler.submit(first);
  started.get_future().wait();
  const int64_t before = scheduler.counters().written_tokens.load();
  Job second = job_of(4000, 1, longest), third = job_of(5, 3, late);
  second.on_end = [&](JobResult result) {
    long_ended = ++order;
    longest->result.set_value(std::move(result));
  };
  third.on_end = [&](JobResult result) {
    late_ended = ++order;
    late->result.set_value(std::move(result));
  };
  scheduler.submit(second);
  scheduler.submit(third);
  EXPECT_EQ(late->result.get_future().get().error, nullptr);
  EXPECT_EQ(longest->result.get_future().get().usage.prompt_tokens, 4000);
  EXPECT_LT(late_ended, long_ended);
  EXPECT_GT(scheduler.counters().written_tokens.load() - before, 10) << "the first answer went on";
  scheduler.cancel(ticket);
  EXPECT_EQ(running->result.get_future().get().error->status, 499);
}

// What an answer is does not depend on the other jobs that run beside it.
TEST(Scheduler, AnswersAreIndependentOfTheLoad) {
  const Model model = served_model("2mamba");
  std::vector<std::string> alone;
  for (const bool together : {false, true}) {
    Scheduler scheduler(model, nullptr, {.slots = 3, .chunk = 16, .exact = true});
    std::vector<std::shared_ptr<Ended>> all;
    for (size_t i = 0; i < 8; ++i) {
      all.push_back(std::make_shared<Ended>());
      scheduler.submit(job_of(1 + 23 * i, 10 + 5 * static_cast<int64_t>(i), all.back()));
      if (!together) all.back()->result.get_future().wait();
    }
    for (size_t i = 0; i < all.size(); ++i) {
      if (!together) {
        alone.push_back(all[i]->text);
        continue;
      }
      EXPECT_EQ(all[i]->result.get_future().get().error, nullptr);
      EXPECT_EQ(all[i]->text, alone[i]) << i;
    }
    EXPECT_EQ(scheduler.counters().finished.load(), 8);
  }
}

// One whose logits are not numbers ends by itself.
TEST(Scheduler, LogitsThatAreNotFiniteEndOneJob) {
  const Model model = served_model("softmax");
  for (const Parameter& parameter : model.parts().language_model.parameters())
    if (parameter.name == "model.embed_tokens.weight") fill(parameter.value.value().slice(0, 'x', 1), std::nanf(""));
  Scheduler scheduler(model, nullptr, {.slots = 3, .chunk = 16});
  const auto whole = std::make_shared<Ended>(), broken = std::make_shared<Ended>();
  Job good = job_of(10, 400, whole);
  good.sampling.logit_bias.push_back({'x', -INFINITY});
  scheduler.submit(std::move(good));
  Job bad = job_of(10, 400, broken);
  bad.prompt.ids.back() = 'x';
  bad.choices = 2;
  scheduler.submit(std::move(bad));
  const JobResult result = broken->result.get_future().get();
  ASSERT_NE(result.error, nullptr);
  EXPECT_EQ(result.error->status, 500);
  EXPECT_EQ(whole->result.get_future().get().error, nullptr);
}

TEST(Scheduler, EveryJobEndsOnceWhenItIsDestroyed) {
  const Model model = served_model("softmax");
  std::vector<std::shared_ptr<Ended>> all;
  {
    Scheduler scheduler(model, nullptr, {.slots = 2, .chunk = 16});
    for (int i = 0; i < 6; ++i) {
      all.push_back(std::make_shared<Ended>());
      scheduler.submit(job_of(10, 1000000, all.back()));
    }
  }
  for (const auto& one : all) EXPECT_EQ(one->result.get_future().get().error->status, 503);
}

}  // namespace
}  // namespace furious
