#include "serve/scheduler.h"

#include <algorithm>
#include <csignal>
#include <optional>
#include <utility>
#include <variant>

#include "base/boundary.h"
#include "base/build_info.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/parallel.h"
#include "decode/model_parts.h"
#include "ops/sampling/sampling.h"

namespace furious::serve {
namespace {

// Time for prompts between two steps, in times of a step.
constexpr double kReadingPerStep = 1.5;
// But so long for a pass that is the last one of its prompt: short prompts are not read layer by layer where a layer
// takes less time than a step has overhead.
constexpr double kLastPassSeconds = 5e-3;

// Raised when kernels change so that the bits of states change: those of earlier builds then begin no prompt.
constexpr int kRounding = 2;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::shared_ptr<const ApiError> error_of(int status, const std::string& message, const std::string& code) {
  return std::make_shared<const ApiError>(status, message, code);
}

ApiError shutting_down() {
  return ApiError(503, "the server is shutting down; try again later", "shutting_down");
}

// In a catch block: what a client is told.
std::shared_ptr<const ApiError> current_error() {
  try {
    throw;
  } catch (const ApiError& error) {
    return std::make_shared<const ApiError>(error);
  } catch (const StateExists& error) {
    return error_of(409, error.what(), "state_exists");
  } catch (const StoreFull& error) {
    return error_of(507, error.what(), "store_full");
  } catch (...) {
    return error_of(500, words_of(std::current_exception()), "internal_error");
  }
}

// What decides about rounding besides the passes themselves.
uint64_t passes_before_any(const LanguageModel& model, bool rounded_states) {
  const Compute& compute = model.compute();
  const Device device = model.device();
  const std::string machine =
      device.is_cpu() ? cpu_name() + simd_target() : describe_cuda_devices().at(static_cast<size_t>(device.index));
  return hash_of(fmt::format("{} {} {} {} {} {} {}", version(), kRounding, machine, static_cast<int>(compute.precision),
                             name_of(compute.activations), name_of(compute.mixer), rounded_states));
}

// The transcript of the first `ids` ids; empty where it has no boundary there.
std::string transcript_at(const Prompt& prompt, size_t ids) {
  const auto boundary = std::ranges::find(prompt.boundaries, ids, &Prompt::Boundary::ids);
  return boundary == prompt.boundaries.end() ? std::string() : prompt.transcript.substr(0, boundary->transcript);
}

void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace

int64_t default_chunk(Device device) {
  return device.is_cpu() ? 256 : 1024;
}

std::vector<size_t> chunk_ends(const Prompt& prompt, size_t chunk) {
  std::vector<size_t> ends;
  size_t begin = 0;
  const auto cut_until = [&](size_t end) {
    for (size_t at = begin + chunk; at < end; at += chunk) ends.push_back(at);
    if (end > begin) ends.push_back(end);
    begin = std::max(begin, end);
  };
  for (const Prompt::Boundary& boundary : prompt.boundaries) cut_until(std::min(boundary.ids, prompt.ids.size()));
  cut_until(prompt.ids.size());
  return ends;
}

std::vector<PassEnd> pass_ends(const Prompt& prompt, std::span<const size_t> ends, uint64_t before_any) {
  std::vector<PassEnd> all;
  uint64_t passes = before_any;
  for (const size_t end : ends) {
    passes = end == prompt.state_ids ? prompt.state_passes : after_pass(passes, end);
    all.push_back({end, passes});
  }
  return all;
}

// One answer of a job.
struct Scheduler::Writing {
  Running* job = nullptr;
  int32_t slot = -1;
  TextStream stream;
  AnswerPart part;  // that was not sent yet
  std::vector<int32_t> ids = {};
  int32_t last = -1;  // token, of the prompt before the first
  Clock::time_point last_time = {};
  bool ended = false;
};

struct Scheduler::Running : std::enable_shared_from_this<Running> {
  enum class Phase { waiting, searching, reading, writing, ended };

  Job job;
  Clock::time_point submitted = Clock::now();
  std::atomic<bool> cancelled{false};
  std::atomic<bool> searched{false};
  std::optional<StateStore::Match> match = {};  // of the search, once `searched`

  // Of the scheduler's thread.
  Phase phase = Phase::waiting;
  std::vector<size_t> ends = {};             // of passes over the prompt
  uint64_t passes = 0;                       // in which the slot has read
  std::vector<size_t> keep = {};             // of them those with a snapshot
  size_t at = 0;                             // ids read
  size_t kept = 0;                           // of them in a snapshot
  int32_t slot = -1;                         // until it writes
  std::shared_ptr<Decoder::Pass> pass = {};  // that has begun, over the ids from `at` to `pass_end`
  size_t pass_end = 0;
  uint64_t turn = 0;  // when it read last, or began to
  int64_t slots = 0;  // that it has or will need
  std::list<Writing> writings = {};
  bool wrote = false;
  Usage usage = {};

  void plan(size_t chunk) {
    ends = chunk_ends(job.prompt, chunk);
    keep = job.keep;
    keep.push_back(job.prompt.ids.size());
    // Texts that begin alike find the last pass that they have in common.
    const auto is_boundary = [&](size_t end) {
      return std::ranges::find(job.prompt.boundaries, end, &Prompt::Boundary::ids) != job.prompt.boundaries.end();
    };
    if (ends.size() >= 2 && !is_boundary(ends[ends.size() - 2])) keep.push_back(ends[ends.size() - 2]);
  }
};

struct Scheduler::Delivery {
  Ticket job;
  std::variant<AnswerPart, JobResult> what;
};

Scheduler::Scheduler(const Model& model, StateStore* store, SchedulerOptions options)
    : model_(model),
      store_(store),
      options_(std::move(options)),
      decoder_(model.parts().language_model, options_.slots, model.parts().tokenizer->vocabulary_size()),
      warm_(decoder_, options_.device_bytes),
      no_passes_(passes_before_any(model.parts().language_model, store != nullptr && store->options().bf16)),
      free_(options_.slots) {
  constexpr auto kMostChunk = static_cast<int64_t>(Decoder::kPassTokens);
  require(options_.chunk >= 1 && options_.chunk <= kMostChunk, "scheduler: chunks of {} tokens, expected 1 to {}",
          options_.chunk, kMostChunk);
  thread_ = std::thread([this] {
    block_signals();
    run();
  });
}

Scheduler::~Scheduler() {
  {
    const std::lock_guard lock(mutex_);
    draining_ = stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return searches_ == 0; });
}

void Scheduler::check(const Job& job) const {
  const auto vocabulary = static_cast<int32_t>(model_.vocabulary());
  // Ids that can be chosen: a model may have more than its tokenizer knows.
  const auto known = std::min(vocabulary, static_cast<int32_t>(model_.parts().tokenizer->vocabulary_size()));
  const auto bad = [](const std::string& message, const char* param) {
    throw ApiError(400, message, "invalid_request", param);
  };
  if (job.prompt.ids.empty()) bad("the prompt is empty, and the tokenizer has no mark before a text", "prompt");
  if (std::max(job.choices, 1) > options_.slots)
    bad(fmt::format("n is {}, but the server has {} slots", job.choices, options_.slots), "n");
  for (const int32_t id : job.prompt.ids)
    if (id < 0 || id >= vocabulary) bad(fmt::format("token {}, expected 0 to {}", id, vocabulary - 1), "prompt");
  for (const LogitBias& bias : job.sampling.logit_bias)
    if (bias.id < 0 || bias.id >= known)
      bad(fmt::format("logit_bias: token {}, expected 0 to {}", bias.id, known - 1), "logit_bias");
  try {
    check_sampling(job.sampling);
    (void)TextStream(job.stop);
  } catch (const Error& error) {
    bad(error.what(), "");
  }
}

std::optional<ApiError> Scheduler::refusal() {
  const std::lock_guard lock(mutex_);
  return refusal_of(0);
}

// Of a job with so many tokens, with the lock held.
std::optional<ApiError> Scheduler::refusal_of(int64_t tokens) {
  if (draining_) return shutting_down();
  const bool is_full = queued_ >= options_.queue || (queued_ > 0 && queued_tokens_ + tokens > options_.queue_tokens);
  if (!is_full) return std::nullopt;
  counters_.refused.fetch_add(1);
  return too_busy(fmt::format("{} requests are waiting already; try again later", queued_),
                  static_cast<int>(std::clamp<int64_t>(queued_ / options_.slots, 1, 60)));
}

Scheduler::Ticket Scheduler::submit(Job job) {
  check(job);
  const auto running = std::make_shared<Running>();
  running->job = std::move(job);
  running->plan(static_cast<size_t>(options_.chunk));
  {
    const std::lock_guard lock(mutex_);
    const bool background = running->job.background;
    const auto tokens = static_cast<int64_t>(running->job.prompt.ids.size());
    if (background && stopping_) throw shutting_down();
    if (!background)
      if (const std::optional<ApiError> refusal = refusal_of(tokens)) throw ApiError(*refusal);
    ++jobs_;
    if (!background) {
      counters_.waiting.store(++queued_);
      queued_tokens_ += tokens;
    }
    inbox_.push_back(running);
  }
  wake_.notify_all();
  return running;
}

void Scheduler::cancel(const Ticket& ticket) {
  ticket->cancelled.store(true);
  {
    const std::lock_guard lock(mutex_);
    changed_ = true;
  }
  wake_.notify_all();
}

void Scheduler::drain(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  if (ended_.wait_for(lock, limit, [&] { return jobs_ == 0; })) return;
  end_all_ = changed_ = true;
  wake_.notify_all();
  ended_.wait(lock, [&] { return jobs_ == 0; });
}

void Scheduler::run() {
  const ThreadLimit limit(model_.parts().threads);
  while (collect()) {
    drop_ended();
    admit();
    try {
      const Clock::time_point start = Clock::now();
      read_prompts(write_tokens() ? std::optional(start) : std::nullopt);
    } catch (...) {  // a defect: nobody may wait for ever
      const auto error = current_error();
      for (const Ticket& job : std::vector(active_)) end(*job, error);
    }
    std::erase_if(active_, [](const Ticket& job) { return job->phase == Running::Phase::ended; });
    counters_.used_slots.store(options_.slots - free_, std::memory_order_relaxed);
    counters_.warm_slots.store(warm_.size(), std::memory_order_relaxed);
    counters_.warm_bytes.store(static_cast<int64_t>(warm_.bytes()), std::memory_order_relaxed);
    flush();
  }
  const auto error = std::make_shared<const ApiError>(shutting_down());
  for (auto* const jobs : {&waiting_, &background_})
    for (const Ticket& job : *jobs) end(*job, error);
  for (const Ticket& job : active_) end(*job, error);
  flush();
}

// Takes what came in; waits where there is nothing to do. false: the end.
bool Scheduler::collect() {
  using Phase = Running::Phase;
  const bool busy = std::ranges::any_of(active_, [](const Ticket& job) {
    return job->phase == Phase::reading || job->phase == Phase::writing ||
           (job->phase == Phase::searching && job->searched.load());
  });
  const bool idle = !busy && active_.empty() && waiting_.empty();
  std::unique_lock lock(mutex_);
  const auto is_due = [&] { return stopping_ || changed_ || !inbox_.empty() || (idle && !background_.empty()); };
  if (!busy) {
    if (idle)
      wake_.wait(lock, is_due);
    else  // deadlines are looked at now and then
      wake_.wait_for(lock, std::chrono::milliseconds(200), is_due);
  }
  changed_ = false;
  for (Ticket& job : inbox_) (job->job.background ? background_ : waiting_).push_back(std::move(job));
  inbox_.clear();
  cut_off_ = std::exchange(end_all_, false);
  return !stopping_;
}

// Cancelled jobs, those whose time is over, and all where the time of draining is.
void Scheduler::drop_ended() {
  const Clock::time_point now = Clock::now();
  const auto end_if_due = [&](const Ticket& job) {
    if (job->cancelled.load())
      end(*job, error_of(499, "the request was cancelled", "cancelled"));
    else if (cut_off_)
      end(*job, std::make_shared<const ApiError>(shutting_down()));
    else if (now >= job->job.deadline)
      end(*job, error_of(408, "the request took longer than the server allows; ask for fewer tokens", "timeout"));
    return job->phase == Running::Phase::ended;
  };
  std::erase_if(active_, end_if_due);
  std::erase_if(waiting_, end_if_due);
  std::erase_if(background_, end_if_due);
  while (static_cast<int64_t>(background_.size()) > options_.background) {
    counters_.dropped.fetch_add(1);
    end(*background_.front(), error_of(503, "dropped: the server is busy", "dropped"));
    background_.pop_front();
  }
}

// In order: a job that needs many slots is not overtaken, but by background jobs, which give way.
void Scheduler::admit() {
  if (!waiting_.empty() && std::max(waiting_.front()->job.choices, 1) > free_)
    for (const Ticket& job : active_)
      if (job->job.background) end(*job, error_of(503, "dropped: the server is busy", "dropped"));
  while (!waiting_.empty() && std::max(waiting_.front()->job.choices, 1) <= free_) {
    const Ticket job = std::move(waiting_.front());
    waiting_.pop_front();
    start(job);
  }
  if (!active_.empty() || !waiting_.empty() || background_.empty()) return;
  const Ticket job = std::move(background_.front());
  background_.pop_front();
  start(job);
}

void Scheduler::start(const Ticket& job) {
  job->slots = std::max(job->job.choices, 1);
  free_ -= job->slots;
  active_.push_back(job);
  leave_queue(*job);
  job->phase = Running::Phase::searching;
  std::vector<PassEnd> passes = pass_ends(job->job.prompt, job->ends, no_passes_);
  if (const auto warm = warm_.fork_longest(job->job.prompt.ids, passes)) {
    job->slot = warm->slot;
    job->at = job->kept = warm->read.ids;
    job->passes = warm->read.passes;
  }
  if (store_ == nullptr) {
    job->searched.store(true);
    return;
  }
  const auto search = [this, job, passes = std::move(passes), known = job->at] {
    try {
      job->match = store_->find(job->job.prompt, passes, known);
    } catch (const std::exception&) {  // the store has said why; the prompt is read
    }
    job->searched.store(true);
    // Notified under the lock: after it the scheduler may be destroyed.
    const std::lock_guard lock(mutex_);
    --searches_;
    changed_ = true;
    wake_.notify_all();
    ended_.notify_all();
  };
  {
    const std::lock_guard lock(mutex_);
    ++searches_;
  }
  if (options_.search)
    options_.search(search);
  else
    search();
}

void Scheduler::begin_reading(Running& job) {
  job.phase = Running::Phase::reading;
  job.turn = turn_;
  if (job.slot < 0) job.slot = warm_.start();
  if (job.match) {
    try {
      decoder_.restore(job.slot, job.match->snapshot->restored());
      job.at = job.kept = job.match->ids;
      job.passes = job.match->snapshot->passes;
      warm_.keep(job.slot, std::span(job.job.prompt.ids).first(job.at), job.passes, free_);
    } catch (const Error&) {  // of another model after all: the prompt is read
      decoder_.stop(job.slot);
      job.slot = warm_.start();
      job.at = job.kept = 0;
      job.match.reset();
    }
  }
  if (job.at == 0) job.passes = no_passes_;
  count_start(job);
  job.match.reset();
  if (job.at == job.job.prompt.ids.size()) begin_writing(job);
}

void Scheduler::count_start(Running& job) {
  job.usage.prompt_tokens = static_cast<int64_t>(job.job.prompt.ids.size());
  job.usage.cached_tokens = static_cast<int64_t>(job.at);
  counters_.prompt_tokens.fetch_add(job.usage.prompt_tokens);
  counters_.cached_tokens.fetch_add(job.usage.cached_tokens);
  if (job.at == 0) return;
  const StateTier tier = job.match ? job.match->tier : StateTier::device;
  (tier == StateTier::device ? counters_.from_device
   : tier == StateTier::host ? counters_.from_host
                             : counters_.from_disk)
      .fetch_add(1);
}

// Whose pass goes on, else whose turn it is; null where nobody reads. One pass at a time holds activations.
Scheduler::Ticket Scheduler::next_reader() const {
  Ticket next;
  for (const Ticket& job : active_) {
    if (job->phase != Running::Phase::reading) continue;
    if (job->pass) return job;
    if (!next || job->turn < next->turn) next = job;
  }
  return next;
}

// Layers of passes over prompts. Where a step of answers has begun at `step`, for a time that goes with the step's, at
// least one layer; where no answer waits, a whole pass.
void Scheduler::read_prompts(std::optional<Clock::time_point> step) {
  for (const Ticket& job : active_) {
    if (job->phase != Running::Phase::searching || !job->searched.load()) continue;
    try {
      begin_reading(*job);
    } catch (...) {
      end(*job, current_error());
    }
  }
  Ticket job = next_reader();
  if (!job) return;
  const Device device = model_.parts().language_model.device();
  double seconds = 0;
  if (step) {
    synchronize(device);  // a GPU still reads the tokens of the step
    seconds = kReadingPerStep * seconds_since(*step);
  }
  const Clock::time_point start = Clock::now();
  for (; job; job = next_reader()) {
    bool passed = true;
    try {
      passed = read_layer(*job);
      if (step) synchronize(device);  // else only launches would be timed
    } catch (...) {
      end(*job, current_error());
    }
    const bool last_pass = !passed && job->pass_end == job->ends.back();
    const double limit = last_pass ? std::max(seconds, kLastPassSeconds) : seconds;
    if (step ? seconds_since(start) >= limit : passed) return;
  }
}

// Whether that was the last layer of a pass.
bool Scheduler::read_layer(Running& job) {
  if (!job.pass) {
    job.pass_end = *std::ranges::upper_bound(job.ends, job.at);
    job.pass = decoder_.begin_pass({job.slot, std::span(job.job.prompt.ids).subspan(job.at, job.pass_end - job.at)});
  }
  const size_t end = job.pass_end;
  if (!decoder_.advance(*job.pass)) return false;
  job.pass.reset();
  job.turn = ++turn_;
  job.at = end;
  job.passes = after_pass(job.passes, end);
  if (std::ranges::find(job.keep, end) != job.keep.end()) keep_snapshot(job);
  if (end == job.job.prompt.ids.size()) begin_writing(job);
  return true;
}

// Whether a snapshot is worth its time, which all jobs wait for: a tenth of it where there are others.
bool Scheduler::may_store(const Running& job) {
  constexpr double kShare = 0.1, kMostSeconds = 1;
  if (store_ == nullptr) return false;
  if (job.job.background) return true;
  allowance_ = std::min(kMostSeconds, allowance_ + kShare * seconds_since(std::exchange(allowed_, Clock::now())));
  return allowance_ > 0 || active_.size() == 1;
}

void Scheduler::keep_snapshot(Running& job) {
  if (!job.job.background && static_cast<int64_t>(job.at - job.kept) < options_.least_tokens) return;
  const auto ids = std::span(job.job.prompt.ids).first(job.at);
  warm_.keep(job.slot, ids, job.passes, free_);
  if (!may_store(job)) return;
  const Clock::time_point start = Clock::now();
  store_->put({ids.begin(), ids.end()}, decoder_.contents(job.slot), transcript_at(job.job.prompt, job.at), job.passes);
  job.kept = job.at;
  allowance_ = std::max(-1.0, allowance_ - seconds_since(start));
}

void Scheduler::begin_writing(Running& job) {
  job.phase = Running::Phase::writing;
  if (!job.job.name.empty()) {
    require(store_ != nullptr, "the server keeps no states");
    store_->create(job.job.name, job.job.prompt.ids, decoder_.contents(job.slot), transcript_at(job.job.prompt, job.at),
                   job.passes);
  }
  if (job.job.choices == 0) return end(job, nullptr);
  const int32_t first = std::exchange(job.slot, -1);  // a slot has one owner, also where the next lines throw
  for (int i = 0; i < job.job.choices; ++i) {
    Writing& row = job.writings.emplace_back(Writing{&job, -1, TextStream(job.job.stop), {.choice = i}});
    row.slot = i == 0 ? first : warm_.fork(first);
    row.last = job.job.prompt.ids.back();
    Sampling sampling = job.job.sampling;
    sampling.seed += static_cast<uint64_t>(i);
    decoder_.set_sampling(row.slot, sampling);
  }
  if (job.job.max_tokens > 0) return;
  for (Writing& row : job.writings) end_writing(row, Finish::length);
}

// One token of every answer; whether there was any.
bool Scheduler::write_tokens() {
  std::vector<Writing*> rows;
  for (const Ticket& job : active_)
    if (job->phase == Running::Phase::writing)
      for (Writing& row : job->writings)
        if (!row.ended) rows.push_back(&row);
  if (rows.empty()) return false;
  try {
    if (!options_.exact) {
      step(rows);
    } else {
      for (Writing*& row : rows) step({&row, 1});
    }
  } catch (...) {
    const auto error = current_error();
    for (const Writing* row : rows) end(*row->job, error);
  }
  counters_.steps.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Scheduler::step(std::span<Writing*> rows) {
  std::vector<int32_t> slots;
  for (const Writing* row : rows) slots.push_back(row->slot);
  const ChosenTokens chosen = decoder_.step(slots);
  // The device reads the tokens while their text is made here.
  for (size_t i = 0; i < rows.size(); ++i) {
    Running& job = *rows[i]->job;
    if (job.phase == Running::Phase::ended) continue;  // with another of its answers
    if (chosen.finite(i))
      take_token(*rows[i], chosen, i);
    else
      end(job, error_of(500, "a logit of the model is not finite; check its weights, or the state that it went on from",
                        "not_finite"));
  }
}

void Scheduler::take_token(Writing& row, const ChosenTokens& chosen, size_t index) {
  Running& job = *row.job;
  const Tokenizer& tokenizer = *model_.parts().tokenizer;
  WrittenToken token = chosen.token(index);
  const Clock::time_point now = Clock::now();
  if (row.ids.empty()) {
    if (!std::exchange(job.wrote, true))
      counters_.first_token.observe(std::chrono::duration<double>(now - job.submitted).count());
  } else {
    counters_.per_token.observe(std::chrono::duration<double>(now - row.last_time).count());
  }
  row.last_time = now;
  row.ids.push_back(token.id);
  ++job.usage.completion_tokens;
  counters_.written_tokens.fetch_add(1, std::memory_order_relaxed);
  const bool starts = row.last == tokenizer.bos() || row.last == tokenizer.eos();
  row.last = token.id;
  const bool is_end =
      token.id == tokenizer.eos() || std::ranges::find(job.job.stop_ids, token.id) != job.job.stop_ids.end();
  const std::string bytes = is_end ? "" : starts ? tokenizer.first_piece(token.id) : tokenizer.piece(token.id);
  if (job.job.sampling.log_probabilities >= 0 && !is_end) {
    TokenText text{std::move(token), bytes, {}};
    for (const TokenLogProbability& other : text.token.most_probable)
      text.most_probable_bytes.push_back(tokenizer.piece(other.id));
    row.part.tokens.push_back(std::move(text));
  }
  row.part.text += row.stream.push(bytes);
  if (is_end || row.stream.stopped()) return end_writing(row, Finish::stop);
  if (static_cast<int64_t>(row.ids.size()) >= job.job.max_tokens) return end_writing(row, Finish::length);
  if (!job.job.stream || (row.part.text.empty() && row.part.tokens.empty())) return;
  send(job.shared_from_this(), std::exchange(row.part, {.choice = row.part.choice}));
}

void Scheduler::end_writing(Writing& row, Finish finish) {
  Running& job = *row.job;
  row.ended = true;
  row.part.text += row.stream.finish();
  row.part.finish = finish;
  send(job.shared_from_this(), std::move(row.part));
  decoder_.stop(row.slot);
  row.slot = -1;
  ++free_;
  --job.slots;
  if (std::ranges::all_of(job.writings, &Writing::ended)) end(job, nullptr);
}

void Scheduler::end(Running& job, std::shared_ptr<const ApiError> error) {
  if (job.phase == Running::Phase::ended) return;
  if (job.phase == Running::Phase::waiting) leave_queue(job);
  job.phase = Running::Phase::ended;
  job.pass.reset();
  if (job.slot >= 0) decoder_.stop(std::exchange(job.slot, -1));
  JobResult result{job.usage, {}, error};
  for (Writing& row : job.writings) {
    if (row.slot >= 0) decoder_.stop(std::exchange(row.slot, -1));
    result.written.push_back(std::move(row.ids));
  }
  free_ += std::exchange(job.slots, 0);
  (!error ? counters_.finished : error->status == 499 ? counters_.cancelled : counters_.failed).fetch_add(1);
  deliveries_.push_back({job.shared_from_this(), std::move(result)});
}

void Scheduler::leave_queue(const Running& job) {
  if (job.job.background) return;
  const std::lock_guard lock(mutex_);
  counters_.waiting.store(--queued_);
  queued_tokens_ -= static_cast<int64_t>(job.job.prompt.ids.size());
}

void Scheduler::send(const Ticket& job, AnswerPart part) {
  deliveries_.push_back({job, std::move(part)});
}

// Calls the callbacks of this iteration, in one go.
void Scheduler::flush() {
  if (deliveries_.empty()) return;
  const auto ends = std::ranges::count_if(
      deliveries_, [](const Delivery& one) { return std::holds_alternative<JobResult>(one.what); });
  const auto all = std::make_shared<std::vector<Delivery>>(std::exchange(deliveries_, {}));
  const auto call = [all] {
    for (Delivery& one : *all) {
      Job& job = one.job->job;
      if (AnswerPart* const part = std::get_if<AnswerPart>(&one.what)) {
        if (job.on_part) job.on_part(std::move(*part));
        continue;
      }
      if (job.on_end) job.on_end(std::move(std::get<JobResult>(one.what)));
      job.on_part = {};  // what they hold may hold the job
      job.on_end = {};
    }
  };
  if (options_.deliver)
    options_.deliver(call);
  else
    call();
  if (ends == 0) return;
  const std::lock_guard lock(mutex_);
  jobs_ -= ends;
  ended_.notify_all();
}

}  // namespace furious::serve
