#include "dist/communicator.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "dist/mpi_transport.h"

namespace furious {
namespace {

bool is_other_rank = false;  // of the world, and not rank 0

int number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

// From the variables of Open MPI and MPICH, and of a Slurm step; SLURM_NTASKS is also set in a script of sbatch, which
// is one process.
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
    require(
        !mpi_library().empty(),
        "{} processes were started together, but furious was built without MPI; install it (Debian: libopenmpi-dev, "
        "openmpi-bin) and build again, or start one process",
        launched);
    static Communicator together(std::make_unique<Transport>());
    return together;
  }();
  return all;
}

bool Communicator::reports_errors() {
  return !is_other_rank;
}

Communicator::Communicator() : cores_(available_cores()) {}

Communicator::Communicator(std::unique_ptr<Transport> transport)
    : rank_(transport->rank),
      size_(transport->size),
      local_rank_(transport->local_rank),
      local_size_(transport->local_size),
      cores_(transport->cores),
      transport_(std::move(transport)) {
  is_other_rank = rank_ != 0;
}

Communicator::~Communicator() = default;

void Communicator::post(std::function<void()> work) {
  if (!transport_) return work();
  {
    const std::lock_guard lock(transport_->mutex);
    transport_->posted.push_back(std::move(work));
  }
  transport_->changed.notify_all();
}

void Communicator::exchange(std::span<const Message> receive, std::span<const Message> send) {
  if (transport_) transport_->exchange(receive, send);
}

void Communicator::wait() {
  if (!transport_) return;
  std::unique_lock lock(transport_->mutex);
  transport_->changed.wait(lock, [this] { return transport_->posted.empty() && !transport_->busy; });
  if (transport_->failed) std::rethrow_exception(std::exchange(transport_->failed, nullptr));
}

void Communicator::all_gather_bytes(const void* own, void* all, size_t bytes) {
  auto* const places = static_cast<std::byte*>(all);
  std::memcpy(places + static_cast<size_t>(rank_) * bytes, own, bytes);
  if (!transport_) return;
  std::vector<Message> receive, send;
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
  std::vector<Message> receive, send;
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
    const SoloWork solo(*this);
    work();
  } catch (const std::exception&) {
    problem = words_of(std::current_exception());
    if (problem.empty()) problem = "unknown error";
  }
  const std::vector<std::string> problems = all_gather(problem);
  for (int rank = 0; rank < size_; ++rank) {
    const std::string& text = problems[static_cast<size_t>(rank)];
    if (text.empty()) continue;
    // An error of rank 0 usually is one of all ranks: it is reported without a rank.
    throw AgreedError(rank == 0 ? text : fmt::format("{}: {}", transport_->named(rank), text));
  }
}

void Communicator::set_timeout(double seconds) {
  if (!transport_) return;
  const std::lock_guard lock(transport_->mutex);
  transport_->timeout = seconds;
}

void Communicator::set_fault_note(int64_t step, const std::string& resume) {
  if (!transport_) return;
  const std::lock_guard lock(transport_->mutex);
  transport_->step_text = fmt::format(" in step {}", step);
  transport_->resume = "; " + resume;
}

void Communicator::set_stop(std::function<bool()> stop) {
  if (!transport_) return;
  const std::lock_guard lock(transport_->mutex);
  transport_->stop = std::move(stop);
}

Communicator::Watch::Watch(Communicator& of) : of_(of) {
  if (!of.transport_) return;
  const std::lock_guard lock(of.transport_->mutex);
  ++of.transport_->watches;
}

Communicator::Watch::~Watch() {
  if (!of_.transport_) return;
  const std::lock_guard lock(of_.transport_->mutex);
  ++of_.transport_->watches;
}

Communicator::SoloWork::SoloWork(Communicator& of) : of_(of) {
  if (!of.transport_) return;
  const std::lock_guard lock(of.transport_->mutex);
  of.transport_->solo_work = true;
}

Communicator::SoloWork::~SoloWork() {
  if (!of_.transport_) return;
  const std::lock_guard lock(of_.transport_->mutex);
  of_.transport_->solo_work = false;
}

void Communicator::abort(const std::string& what) {
  if (!transport_) throw Error(what);
  {
    const std::lock_guard lock(transport_->mutex);
    if (transport_->abort_message.empty())
      transport_->abort_message = fmt::format("{}{}: {}", transport_->named(rank_), transport_->step_text, what);
  }
  transport_->changed.notify_all();
  for (;;) ::pause();  // the transport thread ends the process
}

}  // namespace furious
