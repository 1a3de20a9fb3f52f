#include "base/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <limits>
#include <mutex>
#include <string>
#include <thread>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace furious {
namespace {

using Clock = std::chrono::steady_clock;

// How long a waiting thread spins before it sleeps: about the cost of waking it up.
constexpr auto kSpin = std::chrono::microseconds(100);
// A spinning thread that was preempted for this long shares its core with another program. From then on, threads sleep
// without spinning for the duration kCrowded.
constexpr auto kInterruption = std::chrono::microseconds(50);
constexpr auto kCrowded = std::chrono::milliseconds(20);

thread_local int chosen_threads = 0;  // 0: all available cores
thread_local bool in_loop = false;

void pause_briefly() {
#ifdef __SSE2__
  _mm_pause();
#endif
}

// The floating-point control register: rounding mode and treatment of subnormals.
struct FloatMode {
#ifdef __SSE2__
  unsigned mode = _mm_getcsr();
  void use() const {
    _mm_setcsr(mode);
  }
#else
  void use() const {}
#endif
};

struct Loop {
  // A range of indices. Each thread starts with its own lane, the same one in all loops of equal size, so that data in
  // its cache is reused by the next loop. Then it continues with the other lanes.
  struct alignas(64) Lane {
    std::atomic<int64_t> next = 0;  // first index that no thread has started
    int64_t end = 0;
  };
  static constexpr int kMostLanes = 16;

  void (*body)(void* context, int64_t i);
  void* context;
  FloatMode mode = {};
  int lanes_used;
  std::array<Lane, kMostLanes> lanes = {};
  std::atomic<int> helpers = 0;     // workers that are running this loop
  int wanted = 0;                   // workers that may still join; guarded by the pool's mutex
  std::mutex mutex = {};            // guards problem and failed
  std::exception_ptr problem = {};  // of the smallest index that failed, as in a serial loop
  int64_t failed = std::numeric_limits<int64_t>::max();

  Loop(int64_t count, int workers, void (*function)(void*, int64_t), void* argument)
      : body(function), context(argument), lanes_used(std::min(workers + 1, kMostLanes)) {
    for (int i = 0; i < lanes_used; ++i) {
      lanes[i].next.store(count * i / lanes_used, std::memory_order_relaxed);
      lanes[i].end = count * (i + 1) / lanes_used;
    }
  }

  bool has_more() const {
    return std::any_of(lanes.begin(), lanes.begin() + lanes_used,
                       [](const Lane& lane) { return lane.next.load(std::memory_order_relaxed) < lane.end; });
  }

  void take_part(int place) {
    for (int i = 0; i < lanes_used; ++i) {
      Lane& lane = lanes[(place + i) % lanes_used];
      for (int64_t at; (at = lane.next.fetch_add(1, std::memory_order_relaxed)) < lane.end;) run(at);
    }
  }

  void run(int64_t i) {
    try {
      body(context, i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (i >= failed) return;
      problem = std::current_exception();
      failed = i;
    }
  }
};

class Pool {
 public:
  // Never destroyed: workers run until the process exits, after static destructors. The child of a fork has no workers
  // and gets a new pool.
  static Pool*& current() {
    static Pool* pool = [] {
      ::pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
      return new Pool;
    }();
    return pool;
  }

  void run(Loop& loop, int workers) {
    post(loop, workers);
    loop.take_part(0);
    finish(loop);
  }

 private:
  void post(Loop& loop, int workers) {
    int asleep = 0;
    {
      const std::lock_guard lock(mutex_);
      if (workers > workers_) make_workers(workers);
      loop.wanted = std::min(workers, workers_);
      if (loop.wanted == 0) return;
      open_.push_back(&loop);
      has_open_.store(true, std::memory_order_release);
      asleep = std::min(sleeping_, loop.wanted);
    }
    for (; asleep > 0; --asleep) posted_.notify_one();
  }

  // All indices are started: waits for the workers that are still running one.
  void finish(Loop& loop) {
    {
      const std::lock_guard lock(mutex_);
      if (loop.wanted > 0) {
        loop.wanted = 0;
        std::erase(open_, &loop);
        has_open_.store(!open_.empty(), std::memory_order_relaxed);
      }
    }
    const auto is_done = [&] { return loop.helpers.load(std::memory_order_acquire) == 0; };
    spin_until(is_done);
    if (is_done()) return;
    std::unique_lock lock(mutex_);
    left_.wait(lock, is_done);
  }

  void make_workers(int count) {
    if (Clock::now() < next_try_) return;
    // Workers inherit the signal mask: signals are handled by the program's own threads.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; workers_ < count; ++workers_) std::thread([this, place = workers_ + 1] { work(place); }).detach();
    } catch (const std::exception&) {  // no more threads or memory: continue with the existing ones
      next_try_ = Clock::now() + std::chrono::seconds(1);
    }
    if (workers_ >= available_cores())  // a spinning thread would occupy the core of a working one
      crowded_until_.store(std::numeric_limits<Clock::rep>::max(), std::memory_order_relaxed);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void work(int place) {
    in_loop = true;
    for (;;) {
      Loop& loop = join();
      loop.mode.use();
      loop.take_part(place);
      // The loop may be destroyed once its count of helpers is zero.
      if (loop.helpers.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      { const std::lock_guard lock(mutex_); }
      left_.notify_all();
    }
  }

  Loop& join() {
    spin_until([this] { return has_open_.load(std::memory_order_acquire); });
    std::unique_lock lock(mutex_);
    for (;;) {
      ++sleeping_;
      posted_.wait(lock, [this] { return !open_.empty(); });
      --sleeping_;
      Loop& loop = *open_.front();
      open_.pop_front();
      const bool joins = loop.has_more();
      loop.wanted = joins ? loop.wanted - 1 : 0;
      if (joins) loop.helpers.fetch_add(1, std::memory_order_relaxed);
      if (loop.wanted > 0) open_.push_back(&loop);  // round robin with loops of other threads
      has_open_.store(!open_.empty(), std::memory_order_relaxed);
      if (joins) return loop;
    }
  }

  template <class Condition>
  void spin_until(const Condition& condition) {
    const Clock::rep begin = ticks();
    if (begin < crowded_until_.load(std::memory_order_relaxed)) return;
    const Clock::rep end = begin + ticks_of(kSpin);
    for (Clock::rep before = begin, now = begin; now < end && !condition(); before = now) {
      for (int i = 0; i < 8; ++i) pause_briefly();
      now = ticks();
      if (now - before > ticks_of(kInterruption))
        return crowded_until_.store(now + ticks_of(kCrowded), std::memory_order_relaxed);
    }
  }
  static Clock::rep ticks() { return Clock::now().time_since_epoch().count(); }
  static constexpr Clock::rep ticks_of(auto time) { return std::chrono::duration_cast<Clock::duration>(time).count(); }

  std::mutex mutex_;
  std::condition_variable posted_, left_;
  std::deque<Loop*> open_;  // loops that workers may join
  std::atomic<bool> has_open_ = false;
  std::atomic<Clock::rep> crowded_until_ = 0;
  int workers_ = 0, sleeping_ = 0;
  Clock::time_point next_try_ = {};
};

// The CPU quota of a cgroup, in cores; 0: no limit.
double quota_in(const std::string& folder) {
  std::string quota;
  double period = 0, used = 0;
  if (std::ifstream file(folder + "/cpu.max"); file >> quota >> period)  // version 2: "max 100000" or "150000 100000"
    return quota == "max" || period <= 0 ? 0 : std::atof(quota.c_str()) / period;
  std::ifstream(folder + "/cpu.cfs_period_us") >> period;  // version 1: -1 is no limit
  std::ifstream(folder + "/cpu.cfs_quota_us") >> used;
  return used <= 0 || period <= 0 ? 0 : used / period;
}

// The smallest quota of this process's cgroup and all its ancestors; 0: no limit.
double own_quota() {
  double smallest = 0;
  std::ifstream groups("/proc/self/cgroup");  // "0::/path", or "4:cpu,cpuacct:/path" in version 1
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      const double quota = quota_in(root + path);
      if (quota > 0) smallest = smallest > 0 ? std::min(smallest, quota) : quota;
      if (path.find('/') == std::string::npos) break;
    }
  }
  return smallest;
}

int count_cores() {
  cpu_set_t own;
  CPU_ZERO(&own);
  int cores = ::sched_getaffinity(0, sizeof(own), &own) == 0 ? CPU_COUNT(&own)
                                                             : static_cast<int>(std::thread::hardware_concurrency());
  if (const double quota = own_quota(); quota > 0) cores = std::min(cores, static_cast<int>(quota + 0.5));
  return std::max(cores, 1);
}

}  // namespace

int available_cores() {
  static const int cores = count_cores();
  return cores;
}

int threads() {
  if (in_loop) return 1;
  return chosen_threads > 0 ? chosen_threads : available_cores();
}

void set_threads(int count) {
  chosen_threads = count;
}

ThreadLimit::ThreadLimit(int count) : before_(chosen_threads) {
  if (count > 0) chosen_threads = count;
}

ThreadLimit::~ThreadLimit() {
  chosen_threads = before_;
}

void detail::run_parallel(int64_t count, void (*body)(void* context, int64_t i), void* context) {
  const auto workers = static_cast<int>(std::min<int64_t>(threads(), count)) - 1;
  Loop loop(count, workers, body, context);
  {
    const struct InLoop {
      InLoop() { in_loop = true; }
      ~InLoop() { in_loop = false; }
    } here;
    Pool::current()->run(loop, workers);
  }
  if (loop.problem) std::rethrow_exception(loop.problem);
}

}  // namespace furious
