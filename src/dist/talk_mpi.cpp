#include "dist/talk.h"

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

constexpr auto kGlance = 50ms;  // between looks at the other ranks
constexpr auto kHaste = 500ms;  // mpirun gives a second from its signal to the end
constexpr auto kGrace = 2s;     // that the rank which is to tell of a fault is given to do so
constexpr int kPatience = 50;   // tests of a message before the thread sleeps between them
constexpr auto kNap = 50us;
constexpr double kBeat = 0.25;  // seconds between the signs of life of a rank that works alone
constexpr double kStep = 0.5;   // most that may lie between two looks of a process that was not stopped
constexpr int kPieces = 0, kSaid = 1, kBeats = 2;  // kinds of messages

std::string error_text(int status) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  return std::string(text, static_cast<size_t>(length));
}

void check(int status, const char* what) {
  if (status != MPI_SUCCESS) fail("MPI: {}: {}", what, error_text(status));
}

// When a process of this machine was started, in the system's ticks; 0 where there is none or it has ended (one that
// nobody has asked for yet is a zombie). A number of a process may be given again, and mean another one in a container.
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

// A core that several ranks may run on is shared by them, and so is a quota.
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

Communicator::Talk::Talk() {
  // Signals are for the thread that trains: their handler's stack is its own.
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
  require(problem.empty(), "MPI: its thread cannot be started: {}; raise the limit of threads (ulimit -u)", problem);
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return !busy; });
  if (!failed) return;
  lock.unlock();
  thread.join();
  std::rethrow_exception(failed);
}

Communicator::Talk::~Talk() {
  if (!thread.joinable()) return;
  {
    const std::lock_guard lock(mutex);
    quit = true;
  }
  changed.notify_all();
  thread.join();
}

void Communicator::Talk::run() {
  try {
    join_world();
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

void Communicator::Talk::join_world() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  require(initialized == 0, "MPI was started by the program already; furious starts it itself");
  int level = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "start");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "size");
  require(size == launched_processes(),
          "{} processes were started together, but MPI sees {}: its library was built without the launcher's way to "
          "meet (with Slurm: try srun --mpi=pmix, or mpirun inside the allocation)",
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

void Communicator::Talk::work() {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait_for(lock, kGlance, [this] { return quit || !posted.empty() || !last_words.empty(); });
    if (!last_words.empty()) {
      const std::string words = last_words;
      lock.unlock();
      end_all(words);
    }
    if (posted.empty()) {
      if (quit) break;
      lock.unlock();
      look_around({});
      lock.lock();
      continue;
    }
    const std::function<void()> job = std::move(posted.front());
    posted.pop_front();
    busy = true;
    const bool doomed = failed != nullptr;
    lock.unlock();
    std::exception_ptr problem;
    try {
      if (!doomed) job();
    } catch (...) {
      problem = std::current_exception();
    }
    lock.lock();
    busy = false;
    if (problem && !failed) failed = problem;
    changed.notify_all();
  }
  lock.unlock();
  hear_beats();  // none is left when MPI ends
  MPI_Finalize();
}

void Communicator::Talk::exchange(std::span<const Piece> receive, std::span<const Piece> send) {
  std::vector<MPI_Request> requests;
  std::vector<int> with;
  const auto start = [&](const Piece& piece, bool incoming) {
    require(piece.bytes <= static_cast<size_t>(std::numeric_limits<int>::max()), "MPI: a message of {} bytes",
            piece.bytes);
    const int bytes = static_cast<int>(piece.bytes);
    MPI_Request& request = requests.emplace_back();
    with.push_back(piece.rank);
    if (incoming)
      check(MPI_Irecv(piece.data, bytes, MPI_BYTE, piece.rank, kPieces, MPI_COMM_WORLD, &request), "receive");
    else
      check(MPI_Isend(piece.data, bytes, MPI_BYTE, piece.rank, kPieces, MPI_COMM_WORLD, &request), "send");
  };
  for (const Piece& piece : receive) start(piece, true);
  for (const Piece& piece : send) start(piece, false);
  const int count = static_cast<int>(requests.size());
  std::vector<int> done(requests.size());
  std::vector<MPI_Status> statuses(requests.size());
  int left = count;
  live();
  silent_since = lived;
  auto looked_at = Clock::now();
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
      silent_since = lived;
    }
    if (left == 0) break;
    if (tests < kPatience) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(kNap);
    if (const auto now = Clock::now(); now - looked_at > kGlance) {
      looked_at = now;
      std::vector<int> missing;
      for (int i = 0; i < count; ++i)
        if (requests[i] != MPI_REQUEST_NULL) missing.push_back(with[i]);
      std::ranges::sort(missing);
      missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
      look_around(missing);
    }
  }
}

// Each rank watches the next one of its machine, and sees at once when that has ended; others are missed when they keep
// it waiting.
void Communicator::Talk::look_around(const std::vector<int>& waited_for) {
  live();
  {
    const std::lock_guard lock(mutex);
    if (quit) return;  // all have ended their work; some are gone
  }
  notice_stop();
  beat();
  if (hear_beats()) silent_since = lived;
  std::string own_end;
  double seconds = 0;
  {
    const std::lock_guard lock(mutex);
    own_end = last_words;
    seconds = timeout;
    if (watch != watches) {
      watch = watches;
      watch_since = lived;
    }
    if (own_end.empty() && watch % 2 != 0 && lived - watch_since > seconds)
      own_end =
          fmt::format("{}{}: the device has not done its work for {:.3g} s: it, or that of another rank, is stuck",
                      named(rank), place, seconds);
  }
  if (!own_end.empty()) end_all(own_end);
  if (next >= 0 && start_of(peers[static_cast<size_t>(next)].process) != peers[static_cast<size_t>(next)].start)
    end_all(fmt::format("{} has ended{}", named(next), in_step()));
  if (waited_for.empty() || lived - silent_since < seconds) return;
  lost(waited_for, fmt::format("has not answered for {:.3g} s", seconds));
}

void Communicator::Talk::live() {
  const auto now = Clock::now();
  lived += std::min(kStep, std::chrono::duration<double>(now - lived_at).count());
  lived_at = now;
}

void Communicator::Talk::beat() {
  {
    const std::lock_guard lock(mutex);
    if (!works_alone || lived - beat_at < kBeat) return;
  }
  beat_at = lived;
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    MPI_Request request;
    if (MPI_Isend(nullptr, 0, MPI_BYTE, other, kBeats, MPI_COMM_WORLD, &request) == MPI_SUCCESS)
      MPI_Request_free(&request);
  }
}

bool Communicator::Talk::hear_beats() {
  for (bool heard = false;; heard = true) {
    int there = 0;
    MPI_Status from;
    MPI_Iprobe(MPI_ANY_SOURCE, kBeats, MPI_COMM_WORLD, &there, &from);
    if (there == 0) return heard;
    MPI_Recv(nullptr, 0, MPI_BYTE, from.MPI_SOURCE, kBeats, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
}

// Most runs end so soon after a signal that there is nothing to say.
void Communicator::Talk::notice_stop() {
  std::string words;
  {
    const std::lock_guard lock(mutex);
    if (rank != 0 || stop_told || !stop || !stop()) return;
    if (stop_since == Clock::time_point{}) stop_since = Clock::now();
    if (Clock::now() - stop_since < kHaste) return;
    stop_told = true;
    words = place + resume;
  }
  if (is_said()) return;
  std::fprintf(stderr, "furious: a signal came%s, should this end before it has saved\n", words.c_str());
  std::fflush(stderr);
}

// Whether another rank has told why all end.
bool Communicator::Talk::is_said() {
  int said = 0;
  // One look takes in a message or two, of which this may be the last.
  for (int i = 0; i < kPatience && said == 0; ++i)
    MPI_Iprobe(MPI_ANY_SOURCE, kSaid, MPI_COMM_WORLD, &said, MPI_STATUS_IGNORE);
  return said != 0;
}

std::string Communicator::Talk::named(int which) const {
  const Peer& peer = peers[static_cast<size_t>(which)];
  return fmt::format("rank {} ({}, process {})", which, peer.host, peer.process);
}

std::string Communicator::Talk::in_step() {
  const std::lock_guard lock(mutex);
  return place;
}

// The first of those that are left tells; the others let it.
void Communicator::Talk::lost(const std::vector<int>& ranks, const std::string& what) {
  int teller = 0;
  while (std::ranges::find(ranks, teller) != ranks.end()) ++teller;
  if (rank != teller) std::this_thread::sleep_for(kGrace);
  std::vector<std::string> names;
  for (const int lost_rank : ranks) names.push_back(named(lost_rank));
  end_all(fmt::format("{} {}{}", fmt::join(names, ", "), what, in_step()));
}

// With one line, whoever comes first: the others are told that it was said.
void Communicator::Talk::end_all(const std::string& line) {
  std::string words;
  {
    const std::lock_guard lock(mutex);
    words = resume;
  }
  if (!is_said()) {
    std::fprintf(stderr, "furious: %s%s\n", line.c_str(), words.c_str());
    std::fflush(stderr);
    MPI_Request ignored;
    for (int other = 0; other < size; ++other)
      if (other != rank) MPI_Isend(nullptr, 0, MPI_BYTE, other, kSaid, MPI_COMM_WORLD, &ignored);
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

Communicator::Talk::Talk() {
  fail("this furious was built without MPI");
}
Communicator::Talk::~Talk() = default;
void Communicator::Talk::exchange(std::span<const Piece>, std::span<const Piece>) {}
std::string Communicator::Talk::named(int) const {
  return {};
}

}  // namespace furious

#endif
