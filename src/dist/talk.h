// The thread behind a Communicator that alone calls MPI; talk_mpi.cpp has it, or a stand-in without MPI.
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

struct Communicator::Talk {
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::string host;
    int process = 0;
    int64_t start = 0;  // when the process was started
  };

  Talk();
  ~Talk();

  void run();  // the thread
  void join_world();
  void work();
  void exchange(std::span<const Piece> receive, std::span<const Piece> send);
  void look_around(const std::vector<int>& waited_for);
  void live();
  void notice_stop();
  void beat();
  bool hear_beats();
  static bool is_said();
  std::string named(int rank) const;
  std::string in_step();
  [[noreturn]] void lost(const std::vector<int>& ranks, const std::string& what);
  [[noreturn]] void end_all(const std::string& line);

  int rank = 0, size = 1, local_rank = 0, local_size = 1, cores = 1;
  std::vector<Peer> peers;
  int next = -1;  // rank on this machine, which this one watches; -1: there is none that it can see

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> posted;
  bool busy = true;  // until the others are met
  bool quit = false;
  std::exception_ptr failed;
  std::string place, resume;  // " in step 17" and "; resume from …"
  std::function<bool()> stop;
  Clock::time_point stop_since{};
  bool stop_told = false;
  std::string last_words;  // of abort()
  double timeout = 600;
  int64_t watches = 0;       // begun and ended: odd while this rank waits for its device
  bool works_alone = false;  // at what only it does, while the others wait for it
  std::thread thread;

  // Of the thread. Seconds that it has lived through: while this process was stopped, none pass, and so it does not
  // blame others for the silence when it goes on.
  double lived = 0;
  Clock::time_point lived_at = Clock::now();
  double silent_since = 0;  // those that this rank waits for
  int64_t watch = 0;        // that was seen last, and since when
  double watch_since = 0;
  double beat_at = 0;
};

}  // namespace furious
