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

// An answer that runs until it is cancelled; returns when it has written its first token.
Scheduler::Ticket endless(Scheduler& scheduler, const std::shared_ptr<Ended>& ended) {
  Job job = job_of(10, 1000000, ended);
  job.stream = true;
  const auto started = std::make_shared<std::promise<void>>();
  const auto has_started = std::make_shared<std::atomic<bool>>(false);
  job.on_part = [started, has_started](const serve::AnswerPart&) {
    if (!has_started->exchange(true)) started->set_value();
  };
  const Scheduler::Ticket ticket = scheduler.submit(std::move(job));
  started->get_future().wait();
  return ticket;
}

// A prompt of two passes: in the first, which is not the last one, tokens are written after every layer or two.
TEST(Scheduler, AnswersGoOnBetweenTheLayersOfAPass) {
  constexpr int64_t kLayers = 12;
  const Model model = served_model("2mamba", kLayers);
  Scheduler scheduler(model, nullptr, {.slots = 2, .chunk = 2000});
  const auto running = std::make_shared<Ended>(), read = std::make_shared<Ended>();
  const Scheduler::Ticket ticket = endless(scheduler, running);
  const int64_t before = scheduler.counters().written_tokens.load();
  std::atomic<int64_t> after{0};
  Job prompt = job_of(4000, 0, read);
  prompt.on_end = [&](JobResult result) {
    after = scheduler.counters().written_tokens.load();
    read->result.set_value(std::move(result));
  };
  scheduler.submit(prompt);
  EXPECT_EQ(read->result.get_future().get().error, nullptr);
  EXPECT_GE(after - before, kLayers / 2) << "in two passes over " << kLayers << " layers";
  scheduler.cancel(ticket);
  EXPECT_EQ(running->result.get_future().get().error->status, 499);
}

// Cancelled, timed out or cut off by the end of the scheduler while a pass is between two layers: the slot is free
// again, and what others write is as if nothing had been.
TEST(Scheduler, JobsMayEndInTheMiddleOfAPass) {
  const Model model = served_model("softmax", 12);
  std::string alone;
  {
    Scheduler scheduler(model, nullptr, {.slots = 2, .chunk = 16});
    const auto ended = std::make_shared<Ended>();
    scheduler.submit(job_of(30, 20, ended));
    EXPECT_EQ(ended->result.get_future().get().error, nullptr);
    alone = ended->text;
  }
  const auto running = std::make_shared<Ended>(), cut_off = std::make_shared<Ended>();
  {
    Scheduler scheduler(model, nullptr, {.slots = 2, .chunk = 1500});
    const Scheduler::Ticket ticket = endless(scheduler, running);
    for (const bool in_time : {true, false}) {
      const auto ended = std::make_shared<Ended>();
      Job job = job_of(3000, 1000000, ended);
      const int64_t before = scheduler.counters().written_tokens.load();
      if (!in_time) job.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
      const Scheduler::Ticket prompt = scheduler.submit(job);
      while (in_time && scheduler.counters().written_tokens.load() < before + 4) std::this_thread::yield();
      if (in_time) scheduler.cancel(prompt);
      EXPECT_EQ(ended->result.get_future().get().error->status, in_time ? 499 : 408);
    }
    const auto ended = std::make_shared<Ended>();
    scheduler.submit(job_of(30, 20, ended));
    EXPECT_EQ(ended->result.get_future().get().error, nullptr);
    EXPECT_EQ(ended->text, alone);
    scheduler.submit(job_of(3000, 1000000, cut_off));
    const int64_t before = scheduler.counters().written_tokens.load();
    while (scheduler.counters().written_tokens.load() < before + 3) std::this_thread::yield();
  }
  EXPECT_EQ(cut_off->result.get_future().get().error->status, 503);
  EXPECT_EQ(running->result.get_future().get().error->status, 503);
}

// Several long prompts take turns: the one that came last does not wait for the end of the first.
TEST(Scheduler, LongPromptsTakeTurns) {
  const Model model = served_model("2mamba");
  Scheduler scheduler(model, nullptr, {.slots = 3, .chunk = 16});
  // The scheduler waits in a callback until all have been submitted.
  std::promise<void> submitted;
  Job gate = job_of(1, 0, std::make_shared<Ended>());
  gate.on_end = [&](const JobResult&) { submitted.get_future().wait(); };
  scheduler.submit(std::move(gate));
  std::vector<std::shared_ptr<Ended>> all;
  std::vector<int64_t> order(3);
  std::atomic<int64_t> ended{0};
  for (const size_t tokens : {3000, 2000, 500}) {
    const size_t i = all.size();
    all.push_back(std::make_shared<Ended>());
    Job job = job_of(tokens, 1, all.back());
    job.on_end = [&, i](JobResult result) {
      order[i] = ++ended;
      all[i]->result.set_value(std::move(result));
    };
    scheduler.submit(std::move(job));
  }
  submitted.set_value();
  for (const auto& one : all) EXPECT_EQ(one->result.get_future().get().error, nullptr);
  EXPECT_EQ(order, (std::vector<int64_t>{3, 2, 1}));
}

TEST(Scheduler, RefusesChunksLongerThanAPass) {
  const Model model = served_model("2mamba");
  expect_error([&] { Scheduler(model, nullptr, {.chunk = 5000}); }, {"5000", "1 to 4096"});
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
