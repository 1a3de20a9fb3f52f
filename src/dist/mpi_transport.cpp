#include "dist/mpi_transport.h"

#include "base/error.h"
#include "base/parallel.h"

#ifdef FURIOUS_MPI

#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>
#include <system_error>

namespace furious {
namespace {

using namespace std::chrono_literals;

constexpr auto kCheckInterval = 50ms;  // between checks of the other ranks
constexpr auto kStopGrace = 500ms;     // mpirun kills a second after its signal
constexpr auto kAbortGrace = 2s;       // for the rank that reports an error, before another one does
constexpr int kBusyPolls = 50;         // polls before the thread sleeps between them
constexpr auto kPollSleep = 50us;
constexpr double kHeartbeatSeconds = 0.25;  // between the heartbeats of a rank with solo work
constexpr double kLongestGap = 0.5;         // between two checks; a longer one means that this process was stopped
constexpr int kDataTag = 0, kAbortTag = 1, kHeartbeatTag = 2;  // MPI tags

std::string error_text(int status) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  return std::string(text, static_cast<size_t>(length));
}

void check(int status, const char* what) {
  if (status != MPI_SUCCESS) fail("MPI: {}: {}", what, error_text(status));
}

// The start time of a process of this machine in clock ticks; 0 if it does not exist or is a zombie. Tells apart
// processes with the same id, which is reused, and differs between containers.
int64_t start_of(int process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string text;
  if (!std::getline(file, text)) return 0;
  std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));  // a name may hold anything
  std::string state, skipped;
  int64_t start = 0;
  fields >> state;
  for (int i = 4; i < 22; ++i) fields >> skipped;
  fields >> start;
  return state == "Z" || state == "X" ? 0 : start;
}

// Cores that several ranks may run on, and a CPU quota, are divided among them.
int share_of_cores(MPI_Comm local, int ranks) {
  cpu_set_t own;
  CPU_ZERO(&own);
  ::sched_getaffinity(0, sizeof(own), &own);
  std::vector<cpu_set_t> all(static_cast<size_t>(ranks));
  check(MPI_Allgather(&own, sizeof(own), MPI_BYTE, all.data(), sizeof(own), MPI_BYTE, local), "cores");
  double share = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &own))
      share += 1.0 / static_cast<double>(std::ranges::count_if(all, [&](auto& set) { return CPU_ISSET(core, &set); }));
  share *= static_cast<double>(available_cores()) / std::max(1, CPU_COUNT(&own));
  return std::max(1, static_cast<int>(share + 1e-6));
}

}  // namespace

std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);  // may be called before MPI_Init
  std::string version(text, static_cast<size_t>(std::max(0, length)));
  version.resize(std::min({version.find(','), version.find('\n'), version.size()}));
  if (version.starts_with("Open MPI v")) version.erase(9, 1);
  return version;
}

Communicator::Transport::Transport() {
  // Signals are handled by the training thread.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string problem;
  try {
    thread = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    problem = error.code().message();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  require(problem.empty(), "MPI: cannot start its thread: {}; raise the limit of threads (ulimit -u)", problem);
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return !busy; });
  if (!failed) return;
  lock.unlock();
  thread.join();
  std::rethrow_exception(failed);
}

Communicator::Transport::~Transport() {
  if (!thread.joinable()) return;
  {
    const std::lock_guard lock(mutex);
    quit = true;
  }
  changed.notify_all();
  thread.join();
}

void Communicator::Transport::run() {
  try {
    initialize();
  } catch (...) {
    failed = std::current_exception();
  }
  const bool met = !failed;
  {
    const std::lock_guard lock(mutex);
    busy = false;
  }
  changed.notify_all();
  if (met) work();
}

void Communicator::Transport::initialize() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  require(initialized == 0, "MPI is already initialized by the program; furious initializes it itself");
  int level = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "start");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "size");
  require(
      size == launched_processes(),
      "{} processes were started together, but MPI sees {}; its library does not support this launcher (with Slurm: "
      "try srun --mpi=pmix, or mpirun inside the allocation)",
      launched_processes(), size);
  MPI_Comm local = MPI_COMM_NULL;
  check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local), "ranks of this machine");
  MPI_Comm_rank(local, &local_rank);
  MPI_Comm_size(local, &local_size);
  cores = share_of_cores(local, local_size);
  MPI_Comm_free(&local);
  struct Address {
    char host[64];
    int process;
    int64_t start;
  };
  Address own{};
  ::gethostname(own.host, sizeof(own.host) - 1);
  own.process = static_cast<int>(::getpid());
  own.start = start_of(own.process);
  std::vector<Address> all(static_cast<size_t>(size));
  check(MPI_Allgather(&own, sizeof(own), MPI_BYTE, all.data(), sizeof(own), MPI_BYTE, MPI_COMM_WORLD), "addresses");
  for (const Address& address : all) peers.push_back({address.host, address.process, address.start});
  for (int i = 1; i < size && next < 0; ++i) {
    const int other = (rank + i) % size;
    const Peer& peer = peers[static_cast<size_t>(other)];
    if (peer.host == peers[static_cast<size_t>(rank)].host && start_of(peer.process) == peer.start) next = other;
  }
}

void Communicator::Transport::work() {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait_for(lock, kCheckInterval, [this] { return quit || !posted.empty() || !abort_message.empty(); });
    if (!abort_message.empty()) {
      const std::string words = abort_message;
      lock.unlock();
      end_all(words);
    }
    if (posted.empty()) {
      if (quit) break;
      lock.unlock();
      check_ranks({});
      lock.lock();
      continue;
    }
    const std::function<void()> job = std::move(posted.front());
    posted.pop_front();
    busy = true;
    const bool skip = failed != nullptr;
    lock.unlock();
    std::exception_ptr problem;
    try {
      if (!skip) job();
    } catch (...) {
      problem = std::current_exception();
    }
    lock.lock();
    busy = false;
    if (problem && !failed) failed = problem;
    changed.notify_all();
  }
  lock.unlock();
  receive_heartbeats();  // MPI_Finalize needs all messages received
  MPI_Finalize();
}

void Communicator::Transport::exchange(std::span<const Message> receive, std::span<const Message> send) {
  std::vector<MPI_Request> requests;
  std::vector<int> with;
  const auto start = [&](const Message& message, bool incoming) {
    require(message.bytes <= static_cast<size_t>(std::numeric_limits<int>::max()),
            "MPI: a message of {} bytes is too large", message.bytes);
    const int bytes = static_cast<int>(message.bytes);
    MPI_Request& request = requests.emplace_back();
    with.push_back(message.rank);
    if (incoming)
      check(MPI_Irecv(message.data, bytes, MPI_BYTE, message.rank, kDataTag, MPI_COMM_WORLD, &request), "receive");
    else
      check(MPI_Isend(message.data, bytes, MPI_BYTE, message.rank, kDataTag, MPI_COMM_WORLD, &request), "send");
  };
  for (const Message& message : receive) start(message, true);
  for (const Message& message : send) start(message, false);
  const int count = static_cast<int>(requests.size());
  std::vector<int> done(requests.size());
  std::vector<MPI_Status> statuses(requests.size());
  int left = count;
  advance_clock();
  waiting_since = elapsed;
  auto checked_at = Clock::now();
  for (int tests = 0; left > 0; ++tests) {
    int completed = 0;
    const int status = MPI_Testsome(count, requests.data(), &completed, done.data(), statuses.data());
    if (status == MPI_ERR_IN_STATUS)
      for (int i = 0; i < completed; ++i)
        if (const int problem = statuses[i].MPI_ERROR; problem != MPI_SUCCESS && problem != MPI_ERR_PENDING)
          lost({with[done[i]]}, fmt::format("cannot be reached: {}", error_text(problem)));
    check(status, "exchange");
    if (completed > 0) {
      left -= completed;
      tests = 0;
      waiting_since = elapsed;
    }
    if (left == 0) break;
    if (tests < kBusyPolls) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(kPollSleep);
    if (const auto now = Clock::now(); now - checked_at > kCheckInterval) {
      checked_at = now;
      std::vector<int> missing;
      for (int i = 0; i < count; ++i)
        if (requests[i] != MPI_REQUEST_NULL) missing.push_back(with[i]);
      std::ranges::sort(missing);
      missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
      check_ranks(missing);
    }
  }
}

// Each rank monitors the process of the next one on its machine; ranks on other machines are detected by the timeout.
void Communicator::Transport::check_ranks(const std::vector<int>& waited_for) {
  advance_clock();
  {
    const std::lock_guard lock(mutex);
    if (quit) return;  // all work is done; other ranks may have exited
  }
  check_stop();
  send_heartbeat();
  if (receive_heartbeats()) waiting_since = elapsed;
  std::string own_end;
  double seconds = 0;
  {
    const std::lock_guard lock(mutex);
    own_end = abort_message;
    seconds = timeout;
    if (watch != watches) {
      watch = watches;
      watch_since = elapsed;
    }
    if (own_end.empty() && watch % 2 != 0 && elapsed - watch_since > seconds)
      own_end = fmt::format("{}{}: the device has not finished for {:.3g} s; it, or the device of another rank, hangs",
                            named(rank), step_text, seconds);
  }
  if (!own_end.empty()) end_all(own_end);
  if (next >= 0 && start_of(peers[static_cast<size_t>(next)].process) != peers[static_cast<size_t>(next)].start)
    end_all(fmt::format("{} has exited{}", named(next), in_step()));
  if (waited_for.empty() || elapsed - waiting_since < seconds) return;
  lost(waited_for, fmt::format("has not answered for {:.3g} s", seconds));
}

void Communicator::Transport::advance_clock() {
  const auto now = Clock::now();
  elapsed += std::min(kLongestGap, std::chrono::duration<double>(now - clock_at).count());
  clock_at = now;
}

void Communicator::Transport::send_heartbeat() {
  {
    const std::lock_guard lock(mutex);
    if (!solo_work || elapsed - heartbeat_at < kHeartbeatSeconds) return;
  }
  heartbeat_at = elapsed;
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    MPI_Request request;
    if (MPI_Isend(nullptr, 0, MPI_BYTE, other, kHeartbeatTag, MPI_COMM_WORLD, &request) == MPI_SUCCESS)
      MPI_Request_free(&request);
  }
}

bool Communicator::Transport::receive_heartbeats() {
  for (bool heard = false;; heard = true) {
    int there = 0;
    MPI_Status from;
    MPI_Iprobe(MPI_ANY_SOURCE, kHeartbeatTag, MPI_COMM_WORLD, &there, &from);
    if (there == 0) return heard;
    MPI_Recv(nullptr, 0, MPI_BYTE, from.MPI_SOURCE, kHeartbeatTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
}

// Most runs stop so soon after a signal that no message is needed.
void Communicator::Transport::check_stop() {
  std::string words;
  {
    const std::lock_guard lock(mutex);
    if (rank != 0 || stop_reported || !stop || !stop()) return;
    if (stop_since == Clock::time_point{}) stop_since = Clock::now();
    if (Clock::now() - stop_since < kStopGrace) return;
    stop_reported = true;
    words = step_text + resume;
  }
  if (abort_announced()) return;
  std::fprintf(stderr, "furious: received a signal%s if this process ends before it has saved\n", words.c_str());
  std::fflush(stderr);
}

// Whether another rank has printed why all ranks end.
bool Communicator::Transport::abort_announced() {
  int said = 0;
  // A probe makes progress on a message or two, so one is not enough.
  for (int i = 0; i < kBusyPolls && said == 0; ++i)
    MPI_Iprobe(MPI_ANY_SOURCE, kAbortTag, MPI_COMM_WORLD, &said, MPI_STATUS_IGNORE);
  return said != 0;
}

std::string Communicator::Transport::named(int which) const {
  const Peer& peer = peers[static_cast<size_t>(which)];
  return fmt::format("rank {} ({}, process {})", which, peer.host, peer.process);
}

std::string Communicator::Transport::in_step() {
  const std::lock_guard lock(mutex);
  return step_text;
}

// The first remaining rank prints the message; the others wait for it.
void Communicator::Transport::lost(const std::vector<int>& ranks, const std::string& what) {
  int reporter = 0;
  while (std::ranges::find(ranks, reporter) != ranks.end()) ++reporter;
  if (rank != reporter) std::this_thread::sleep_for(kAbortGrace);
  std::vector<std::string> names;
  for (const int lost_rank : ranks) names.push_back(named(lost_rank));
  end_all(fmt::format("{} {}{}", fmt::join(names, ", "), what, in_step()));
}

// Prints one line, unless another rank has, and aborts all ranks.
void Communicator::Transport::end_all(const std::string& line) {
  std::string words;
  {
    const std::lock_guard lock(mutex);
    words = resume;
  }
  if (!abort_announced()) {
    std::fprintf(stderr, "furious: %s%s\n", line.c_str(), words.c_str());
    std::fflush(stderr);
    MPI_Request ignored;
    for (int other = 0; other < size; ++other)
      if (other != rank) MPI_Isend(nullptr, 0, MPI_BYTE, other, kAbortTag, MPI_COMM_WORLD, &ignored);
  }
  MPI_Abort(MPI_COMM_WORLD, 1);
  ::_exit(1);
}

}  // namespace furious

#else

namespace furious {

std::string mpi_library() {
  return {};
}

Communicator::Transport::Transport() {
  fail("furious was built without MPI; build it with MPI, or start one process");
}
Communicator::Transport::~Transport() = default;
void Communicator::Transport::exchange(std::span<const Message>, std::span<const Message>) {}
std::string Communicator::Transport::named(int) const {
  return {};
}

}  // namespace furious

#endif
