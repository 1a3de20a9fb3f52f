// Continuous batching: jobs of different lengths and sampling parameters share the slots of one decoder, which one
// thread owns. An iteration of that thread
//
//   admits waiting jobs, in order, where slots are free,
//   writes one token of every answer (one step of the decoder),
//   reads chunks of prompts, in turn, for 1.5 times as long as the step took, or 5 ms where the last chunk of a prompt
//   can be finished. It stops after any layer of a pass, so that prompts delay an answer by that and a layer.
//
// What a prompt computes does not depend on the load or on what was stored before. A prompt is read chunk by chunk, one
// sequence in a pass, and its chunks end where its own boundaries are (serve/prompt.h) and every
// SchedulerOptions::chunk tokens between them. Snapshots are taken at, and used at, such ends alone, and only where
// their own passes are those of the prompt: so a prompt that starts from a snapshot computes what one does that starts
// from nothing. The step of several answers together rounds differently from that of one, in the last bits:
// SchedulerOptions::exact steps one at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "decode/decoder.h"
#include "decode/text_stream.h"
#include "furious/model.h"
#include "serve/metrics.h"
#include "serve/openai.h"
#include "serve/prompt.h"
#include "serve/state_store.h"
#include "serve/warm_slots.h"

namespace furious::serve {

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

struct SchedulerOptions {
  int64_t slots = 1;
  int64_t chunk = 256;             // tokens that a pass reads
  int64_t queue = 256;             // jobs that may wait
  int64_t queue_tokens = 8 << 20;  // of their prompts together
  int64_t background = 64;         // background jobs that may wait; older ones are dropped
  int64_t least_tokens = 32;       // read since the last snapshot, for another one at a planned point
  uint64_t device_bytes = 0;       // of states in slots that no job needs (serve/warm_slots.h)
  bool exact = false;
  // Where callbacks run, in order, and where the store is searched. Empty: on the scheduler's thread.
  std::function<void(Task)> deliver = {};
  std::function<void(Task)> search = {};
};

struct JobResult {
  Usage usage;
  std::vector<std::vector<int32_t>> written = {};  // ids of each choice, the ending one included
  std::shared_ptr<const ApiError> error = nullptr;
};

// A prompt to read, and answers to it.
struct Job {
  Prompt prompt;
  std::vector<size_t> keep = {};  // boundaries (Boundary::ids) at which a snapshot is worth keeping; its end always is
  int choices = 1;                // 0: it is only read
  std::string name = {};          // of a named state after the prompt; empty: none
  int64_t max_tokens = 16;
  Sampling sampling = {};  // choice i draws from seed + i
  std::vector<std::string> stop = {};
  std::vector<int32_t> stop_ids = {};  // besides eos
  bool stream = false;                 // on_part is called for every piece, not once for each choice
  bool background = false;             // runs when nothing else does
  Clock::time_point deadline = Clock::time_point::max();
  std::function<void(AnswerPart)> on_part = {};
  std::function<void(JobResult)> on_end = {};  // exactly once, after all parts
};

// Of all jobs since the start. Any thread may read them.
struct SchedulerCounters {
  std::atomic<int64_t> prompt_tokens{0}, cached_tokens{0}, written_tokens{0}, finished{0}, cancelled{0}, failed{0},
      refused{0}, steps{0}, dropped{0};
  // Prompts that started from a state, by where it was.
  std::atomic<int64_t> from_device{0}, from_host{0}, from_disk{0};
  std::atomic<int64_t> waiting{0}, used_slots{0}, warm_slots{0}, warm_bytes{0};  // now
  Histogram first_token, per_token;
};

class Scheduler {
 public:
  // `store` may be null, and outlives the scheduler, as the model does.
  Scheduler(const Model& model, StateStore* store, SchedulerOptions options);
  ~Scheduler();  // cancels what runs
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  struct Running;
  using Ticket = std::shared_ptr<Running>;
  // An ApiError where the job is refused: invalid, too many waiting (429), or draining (503). Any thread.
  Ticket submit(Job job);
  // Why any job would be refused now; nothing where one may be submitted. Any thread, before a job is made.
  std::optional<ApiError> refusal();
  // Frees its slots before the next step. on_end is called if the job has not ended yet.
  void cancel(const Ticket& ticket);

  // Accepts no more jobs, and returns when all have ended; after `limit` the rest is ended with an error (503).
  void drain(std::chrono::milliseconds limit);

  const SchedulerCounters& counters() const { return counters_; }
  const SchedulerOptions& options() const { return options_; }

 private:
  struct Writing;
  struct Delivery;

  void run();
  bool collect();
  void admit();
  void start(const Ticket& job);
  void begin_reading(Running& job);
  void count_start(Running& job);
  Ticket next_reader() const;
  void read_prompts(std::optional<Clock::time_point> step);
  bool read_layer(Running& job);
  bool may_store(const Running& job);
  void keep_snapshot(Running& job);
  void begin_writing(Running& job);
  bool write_tokens();
  void step(std::span<Writing*> rows);
  void take_token(Writing& row, const ChosenTokens& chosen, size_t index);
  void end_writing(Writing& row, Finish finish);
  void end(Running& job, std::shared_ptr<const ApiError> error);
  void leave_queue(const Running& job);
  void drop_ended();
  void send(const Ticket& job, AnswerPart part);
  void flush();
  void check(const Job& job) const;
  std::optional<ApiError> refusal_of(int64_t tokens);

  const Model model_;
  StateStore* store_;
  SchedulerOptions options_;
  SchedulerCounters counters_;
  Decoder decoder_;  // of the thread
  WarmSlots warm_;
  const uint64_t no_passes_;  // what PassEnd::passes begins with

  // Of the thread.
  std::deque<Ticket> waiting_, background_;
  std::vector<Ticket> active_;  // have slots
  uint64_t turn_ = 0;           // counts passes
  int64_t free_ = 0;            // slots that no active job has or will need
  bool cut_off_ = false;        // what has not ended is ended
  double allowance_ = 1;        // seconds for snapshots while other jobs wait for them
  Clock::time_point allowed_ = Clock::now();
  std::vector<Delivery> deliveries_;

  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::vector<Ticket> inbox_;
  int64_t jobs_ = 0;    // accepted and not ended
  int64_t queued_ = 0;  // of them without slots, but for background ones
  int64_t queued_tokens_ = 0;
  int64_t searches_ = 0;  // that run
  bool changed_ = false;  // a search has ended, or a job was cancelled
  bool end_all_ = false, draining_ = false, stopping_ = false;
  std::thread thread_;
};

// SchedulerOptions::chunk where nobody says otherwise: more tokens use the device better, and let answers wait longer.
int64_t default_chunk(Device device);

// Where the passes over a prompt end: at its boundaries, and every `chunk` ids between them.
std::vector<size_t> chunk_ends(const Prompt& prompt, size_t chunk);
// The same with the passes until there, of which those of a named state are its own.
std::vector<PassEnd> pass_ends(const Prompt& prompt, std::span<const size_t> ends, uint64_t before_any);

}  // namespace furious::serve
