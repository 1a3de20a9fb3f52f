// The thread of a Communicator that calls MPI. In a build without MPI mpi_transport.cpp has a stub that fails.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/communicator.h"

namespace furious {

struct Communicator::Transport {
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::string host;
    int process = 0;
    int64_t start = 0;  // start time of the process
  };

  Transport();
  ~Transport();

  void run();  // the thread
  void initialize();
  void work();
  void exchange(std::span<const Message> receive, std::span<const Message> send);
  void check_ranks(const std::vector<int>& waited_for);
  void advance_clock();
  void check_stop();
  void send_heartbeat();
  bool receive_heartbeats();
  static bool abort_announced();
  std::string named(int rank) const;
  std::string in_step();
  [[noreturn]] void lost(const std::vector<int>& ranks, const std::string& what);
  [[noreturn]] void end_all(const std::string& line);

  int rank = 0, size = 1, local_rank = 0, local_size = 1, cores = 1;
  std::vector<Peer> peers;
  int next = -1;  // rank on this machine that this one monitors; -1: none is visible

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> posted;
  bool busy = true;  // until MPI is initialized
  bool quit = false;
  std::exception_ptr failed;
  std::string step_text, resume;  // " in step 17" and "; resume with …"
  std::function<bool()> stop;
  Clock::time_point stop_since{};
  bool stop_reported = false;
  std::string abort_message;  // of abort()
  double timeout = 600;
  int64_t watches = 0;     // begins and ends: odd while this rank waits for its device
  bool solo_work = false;  // the others wait for this rank without a timeout
  std::thread thread;

  // Used by the thread only. A clock in seconds that does not advance while this process is stopped, so that a resumed
  // process does not count the pause as silence of the others.
  double elapsed = 0;
  Clock::time_point clock_at = Clock::now();
  double waiting_since = 0;  // on the clock: when the current wait began
  int64_t watch = 0;         // the last value seen, and since when
  double watch_since = 0;
  double heartbeat_at = 0;
};

}  // namespace furious
