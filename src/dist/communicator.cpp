#include "dist/communicator.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "dist/talk.h"

namespace furious {
namespace {

bool met_as_another = false;  // this process is a rank of the world, and not its first

int number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

// Open MPI and MPICH say it themselves. Of Slurm's variables only those of a step count: a script that sbatch runs has
// SLURM_NTASKS too, though it is one process.
int launched_processes() {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const int count = number_in(variable); count > 0) return count;
  return 1;
}

Communicator& Communicator::alone() {
  static Communicator only;
  return only;
}

Communicator& Communicator::world() {
  static Communicator& all = []() -> Communicator& {
    const int launched = launched_processes();
    if (launched == 1) return alone();
    require(!mpi_library().empty(),
            "{} processes were started together, but this furious was built without MPI; install it (Debian: "
            "libopenmpi-dev, openmpi-bin) and build again, or start one process",
            launched);
    static Communicator together(std::make_unique<Talk>());
    return together;
  }();
  return all;
}

bool Communicator::speaks() {
  return !met_as_another;
}

Communicator::Communicator() : cores_(available_cores()) {}

Communicator::Communicator(std::unique_ptr<Talk> talk)
    : rank_(talk->rank),
      size_(talk->size),
      local_rank_(talk->local_rank),
      local_size_(talk->local_size),
      cores_(talk->cores),
      talk_(std::move(talk)) {
  met_as_another = rank_ != 0;
}

Communicator::~Communicator() = default;

void Communicator::post(std::function<void()> work) {
  if (!talk_) return work();
  {
    const std::lock_guard lock(talk_->mutex);
    talk_->posted.push_back(std::move(work));
  }
  talk_->changed.notify_all();
}

void Communicator::exchange(std::span<const Piece> receive, std::span<const Piece> send) {
  if (talk_) talk_->exchange(receive, send);
}

void Communicator::wait() {
  if (!talk_) return;
  std::unique_lock lock(talk_->mutex);
  talk_->changed.wait(lock, [this] { return talk_->posted.empty() && !talk_->busy; });
  if (talk_->failed) std::rethrow_exception(std::exchange(talk_->failed, nullptr));
}

void Communicator::all_gather_bytes(const void* own, void* all, size_t bytes) {
  auto* const places = static_cast<std::byte*>(all);
  std::memcpy(places + static_cast<size_t>(rank_) * bytes, own, bytes);
  if (!talk_) return;
  std::vector<Piece> receive, send;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    receive.push_back({rank, places + static_cast<size_t>(rank) * bytes, bytes});
    send.push_back({rank, const_cast<void*>(own), bytes});
  }
  post([&] { exchange(receive, send); });
  wait();
}

std::vector<std::string> Communicator::all_gather(const std::string& own) {
  const std::vector<size_t> sizes = all_gather(own.size());
  std::vector<std::string> all;
  for (const size_t size : sizes) all.emplace_back(size, ' ');
  all[static_cast<size_t>(rank_)] = own;
  std::vector<Piece> receive, send;
  for (int rank = 0; rank < size_; ++rank) {
    std::string& text = all[static_cast<size_t>(rank)];
    if (rank == rank_) continue;
    if (!text.empty()) receive.push_back({rank, text.data(), text.size()});
    if (!own.empty()) send.push_back({rank, const_cast<char*>(own.data()), own.size()});
  }
  post([&] { exchange(receive, send); });
  wait();
  return all;
}

void Communicator::agree(const std::function<void()>& work) {
  if (size_ == 1) return work();
  std::string problem;
  try {
    const Alone alone(*this);
    work();
  } catch (const std::exception&) {
    problem = words_of(std::current_exception());
    if (problem.empty()) problem = "it failed";
  }
  const std::vector<std::string> problems = all_gather(problem);
  for (int rank = 0; rank < size_; ++rank) {
    const std::string& text = problems[static_cast<size_t>(rank)];
    if (text.empty()) continue;
    // What the first has failed with, all have: no rank is to blame.
    throw AgreedError(rank == 0 ? text : fmt::format("{}: {}", talk_->named(rank), text));
  }
}

void Communicator::set_timeout(double seconds) {
  if (!talk_) return;
  const std::lock_guard lock(talk_->mutex);
  talk_->timeout = seconds;
}

void Communicator::set_story(int64_t step, const std::string& resume) {
  if (!talk_) return;
  const std::lock_guard lock(talk_->mutex);
  talk_->place = fmt::format(" in step {}", step);
  talk_->resume = "; " + resume;
}

void Communicator::set_stop(std::function<bool()> stop) {
  if (!talk_) return;
  const std::lock_guard lock(talk_->mutex);
  talk_->stop = std::move(stop);
}

Communicator::Watch::Watch(Communicator& of) : of_(of) {
  if (!of.talk_) return;
  const std::lock_guard lock(of.talk_->mutex);
  ++of.talk_->watches;
}

Communicator::Watch::~Watch() {
  if (!of_.talk_) return;
  const std::lock_guard lock(of_.talk_->mutex);
  ++of_.talk_->watches;
}

Communicator::Alone::Alone(Communicator& of) : of_(of) {
  if (!of.talk_) return;
  const std::lock_guard lock(of.talk_->mutex);
  of.talk_->works_alone = true;
}

Communicator::Alone::~Alone() {
  if (!of_.talk_) return;
  const std::lock_guard lock(of_.talk_->mutex);
  of_.talk_->works_alone = false;
}

void Communicator::abort(const std::string& what) {
  if (!talk_) throw Error(what);
  {
    const std::lock_guard lock(talk_->mutex);
    if (talk_->last_words.empty()) talk_->last_words = fmt::format("{}{}: {}", talk_->named(rank_), talk_->place, what);
  }
  talk_->changed.notify_all();
  for (;;) ::pause();  // the other thread ends the process
}

}  // namespace furious
