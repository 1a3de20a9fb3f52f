#include "base/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/subnormals.h"
#include "strided.h"

namespace furious {
namespace {

using testing::with_threads;

TEST(Parallel, RunsEveryIndexOnce) {
  for (int count : {1, 2, 5})
    for (int64_t size : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> visits(size);
      with_threads(count, [&] {
        parallel_for(size, [&](int64_t i) { ++visits[i]; });
        return 0;
      });
      for (int64_t i = 0; i < size; ++i) ASSERT_EQ(visits[i], 1) << i << " of " << size << ", " << count << " threads";
    }
}

TEST(Parallel, RangesCoverEveryIndexOnceAndKeepTheGrain) {
  for (int count : {1, 3, 8})
    for (int64_t size : {1, 2, 9, 100})
      for (int64_t grain : {0, 1, 4, 1000}) {
        std::vector<std::atomic<int>> visits(size);
        std::atomic<int64_t> shortest = size;
        std::atomic<int> ranges = 0;
        with_threads(count, [&] {
          parallel_ranges(size, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) ++visits[i];
            ++ranges;
            int64_t seen = shortest;
            while (end - begin < seen && !shortest.compare_exchange_weak(seen, end - begin)) continue;
          });
          return 0;
        });
        for (int64_t i = 0; i < size; ++i) ASSERT_EQ(visits[i], 1);
        EXPECT_LE(ranges, count * kPiecesPerThread);
        EXPECT_GE(shortest, std::min(grain, size));
      }
}

TEST(Parallel, RangesOfNothing) {
  parallel_ranges(0, 4, [](int64_t, int64_t) { FAIL(); });
}

TEST(Parallel, AnExceptionReachesTheCaller) {
  for (int count : {1, 4})
    with_threads(count, [&] {
      testing::expect_error([] { parallel_for(100, [](int64_t i) { require(i != 37, "index {} is bad", i); }); },
                            {"index 37 is bad"});
      testing::expect_error([] { parallel_ranges(100, 1, [](int64_t, int64_t) { fail("range is bad"); }); },
                            {"range is bad"});
      return 0;
    });
}

TEST(Parallel, NestedLoopsAreSerial) {
  with_threads(4, [] {
    EXPECT_EQ(threads(), 4);
    std::atomic<int> most = 0;
    std::atomic<int> visits = 0;
    parallel_for(8, [&](int64_t) {
      const auto outer = std::this_thread::get_id();
      if (threads() > most) most = threads();
      parallel_for(16, [&](int64_t) {
        ++visits;
        EXPECT_EQ(std::this_thread::get_id(), outer);
      });
    });
    EXPECT_EQ(most, 1);
    EXPECT_EQ(visits, 8 * 16);
    return 0;
  });
}

// Waits until this many bodies of a loop run concurrently, each on another thread.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  void arrive() {
    for (++arrived_; arrived_ < expected_;) std::this_thread::yield();
  }

 private:
  int expected_;
  std::atomic<int> arrived_ = 0;
};

TEST(Parallel, UsesTheRequestedNumberOfThreads) {
  for (const int count : {2, 5}) {
    const ThreadLimit limit(count);
    Meeting meeting(count);
    std::mutex mutex;
    std::set<std::thread::id> seen;
    parallel_for(count, [&](int64_t) {
      meeting.arrive();
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
    EXPECT_EQ(seen.size(), static_cast<size_t>(count));
  }
}

TEST(Parallel, SmallLoopsAreSerial) {
  const ThreadLimit limit(4);
  const auto here = std::this_thread::get_id();
  parallel_ranges(kElementsPerThread, kElementsPerThread,
                  [&](int64_t, int64_t) { EXPECT_EQ(std::this_thread::get_id(), here); });
  parallel_for_if(false, 8, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), here); });
}

TEST(Parallel, NumberOfThreadsIsPerThread) {
  set_threads(0);
  const int all = threads();
  EXPECT_EQ(all, available_cores());
  cpu_set_t own;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(own), &own), 0);
  EXPECT_GE(all, 1);
  EXPECT_LE(all, CPU_COUNT(&own));
  {
    const ThreadLimit limit(all + 3);
    EXPECT_EQ(threads(), all + 3);
    std::thread([&] { EXPECT_EQ(threads(), all); }).join();
    {
      const ThreadLimit unchanged(0);
      EXPECT_EQ(threads(), all + 3);
    }
  }
  EXPECT_EQ(threads(), all);
}

// If several fail, the exception of a serial loop.
TEST(Parallel, RethrowsTheExceptionOfTheLowestIndex) {
  const ThreadLimit limit(4);
  for (int i = 0; i < 50; ++i)
    testing::expect_error([] { parallel_for(64, [](int64_t at) { require(at < 7, "index {} is bad", at); }); },
                          {"index 7 is bad"});
}

TEST(Parallel, ConcurrentLoopsOfManyThreads) {
  std::vector<std::thread> callers;
  std::atomic<int64_t> total = 0;
  for (int caller = 0; caller < 8; ++caller)
    callers.emplace_back([&, caller] {
      const ThreadLimit limit(1 + caller % 4);
      for (int repeat = 0; repeat < 200; ++repeat) {
        std::vector<int64_t> squares(37);
        parallel_for(37, [&](int64_t i) { squares[i] = i * i; });
        for (int64_t i = 0; i < 37; ++i) total += squares[i];
      }
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 8 * 200 * 36 * 37 * 73 / 6);
}

TEST(Parallel, WorkersHaveAllSignalsBlocked) {
  const ThreadLimit limit(3);
  const auto here = std::this_thread::get_id();
  Meeting meeting(3);
  std::atomic<int> workers = 0;
  parallel_for(3, [&](int64_t) {
    meeting.arrive();
    sigset_t mask;
    ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, nullptr, &mask), 0);
    if (std::this_thread::get_id() == here) return;
    ++workers;
    for (const int signal : {SIGALRM, SIGPROF, SIGTERM, SIGINT, SIGUSR1, SIGHUP})
      EXPECT_EQ(::sigismember(&mask, signal), 1) << signal;
  });
  EXPECT_EQ(workers, 2);
}

// In the loop that creates the workers and in later ones, workers flush subnormals as the caller does.
TEST(Parallel, WorkersComputeInTheCallersFloatingPointMode) {
  const ThreadLimit limit(4);
  const auto halves = [] {
    std::vector<float> result(4);
    Meeting meeting(4);
    volatile float smallest = std::numeric_limits<float>::min();
    parallel_for(4, [&](int64_t i) {
      meeting.arrive();
      result[i] = smallest / 2;
    });
    return result;
  };
  for (int repeat = 0; repeat < 2; ++repeat) {
#ifdef __SSE2__
    {
      const FlushSubnormals flush;
      EXPECT_EQ(halves(), std::vector<float>(4, 0.0f));
    }
#endif
    EXPECT_EQ(halves(), std::vector<float>(4, std::numeric_limits<float>::min() / 2));
  }
}

TEST(Parallel, IdleThreadsSleep) {
  {
    const ThreadLimit limit(4);
    Meeting meeting(4);
    parallel_for(4, [&](int64_t) { meeting.arrive(); });
  }
  const auto running = [] {  // other threads of this process that do not sleep
    int count = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      if (task.path().filename() == std::to_string(::gettid())) continue;
      std::string stat;
      std::getline(std::ifstream(task.path() / "stat"), stat);
      const size_t name_end = stat.rfind(')');
      if (name_end != std::string::npos && stat.size() > name_end + 2 && stat[name_end + 2] == 'R') ++count;
    }
    return count;
  };
  for (int i = 0; i < 2000 && running() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(running(), 0);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // which support neither fork nor little memory

// Runs f in a child process and returns its exit status.
template <class F>
int in_child(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(f() ? 0 : 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

bool sums_right() {
  std::vector<int64_t> numbers(1000);
  parallel_for(1000, [&](int64_t i) { numbers[i] = i; });
  int64_t sum = 0;
  for (const int64_t number : numbers) sum += number;
  return sum == 999 * 500;
}

TEST(Parallel, WorksAfterFork) {
  const ThreadLimit limit(4);
  EXPECT_TRUE(sums_right());
  EXPECT_EQ(in_child([] {
              Meeting meeting(4);
              parallel_for(4, [&](int64_t) { meeting.arrive(); });  // with its own workers
              return sums_right();
            }),
            0);
  EXPECT_TRUE(sums_right());
}

TEST(Parallel, RunsSeriallyIfThreadsCannotBeCreated) {
  EXPECT_EQ(in_child([] {
              // No memory for the stack of a thread, and none of a thread that has ended is large enough.
              pthread_attr_t attributes;
              if (::pthread_attr_init(&attributes) != 0 ||
                  ::pthread_attr_setstacksize(&attributes, size_t{1} << 30) != 0 ||
                  ::pthread_setattr_default_np(&attributes) != 0)
                return false;
              // Small blocks are still allocated, from memory that the process has got before.
              constexpr int kBlocks = 16, kBytes = 6000;
              std::vector<std::unique_ptr<std::byte[]>> blocks;
              for (int i = 0; i < kBlocks; ++i) blocks.push_back(std::make_unique<std::byte[]>(kBytes));
              blocks.clear();
              const rlimit little{1 << 20, 1 << 20};
              if (::setrlimit(RLIMIT_AS, &little) != 0) return false;
              const ThreadLimit limit(8);
              const auto here = std::this_thread::get_id();
              std::atomic<bool> alone = true;
              parallel_for(100, [&](int64_t) { alone = alone && std::this_thread::get_id() == here; });
              return alone && sums_right();
            }),
            0);
}

#endif

}  // namespace
}  // namespace furious
