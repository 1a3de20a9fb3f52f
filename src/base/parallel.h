// Parallel loops over one pool of threads, which all threads of a program share.
//
// The calling thread takes part in its own loop, and does all of it that no other thread has begun: a worker that the
// system does not run delays nobody. A loop inside a loop runs serially on its thread, so an operation may use these
// freely: the outermost loop gets the threads. Which thread runs which index never changes a result: bodies write
// disjoint memory, and workers compute with the caller's floating-point mode.
//
// Workers are made when they are first wanted, sleep when there is nothing to do, and have all signals blocked. Where
// the system has no more threads to give, loops run on those that there are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace furious {

int available_cores();        // that this process may use: its affinity, and the quota of its cgroup
int threads();                // that a loop of this thread may use, itself included; 1 inside a loop
void set_threads(int count);  // for loops of this thread; 0: all available cores

// While it lives, loops of this thread use so many threads. 0 leaves it as it is.
class ThreadLimit {
 public:
  explicit ThreadLimit(int count);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  int before_;
};

namespace detail {
// body(context, i) for i in [0, count) on up to threads() threads. Throws the first exception of a body, when all that
// had begun are done.
void run_parallel(int64_t count, void (*body)(void* context, int64_t i), void* context);
}  // namespace detail

// body(i) for i in [0, count), handed out one by one: for uneven, large pieces of work.
template <class Body>
void parallel_for(int64_t count, Body&& body) {
  if (count <= 1 || threads() == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  using Plain = std::remove_reference_t<Body>;
  detail::run_parallel(
      count, [](void* context, int64_t i) { (*static_cast<Plain*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// The same, or on this thread alone when there is too little work to share.
template <class Body>
void parallel_for_if(bool worth_it, int64_t count, Body&& body) {
  if (worth_it) return parallel_for(count, body);
  for (int64_t i = 0; i < count; ++i) body(i);
}

// Elements of an operation that takes a nanosecond or less for each: so many are worth waking up a thread.
constexpr int64_t kElementsPerThread = 1 << 15;
// Of a loop over ranges, where there is enough to do: threads that come late or are held up leave theirs to others.
constexpr int64_t kPiecesPerThread = 4;

// body(begin, end) over equal ranges of [0, count), each of at least `grain` items: for even, small pieces of work.
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, Body&& body) {
  if (count <= 0) return;
  const int64_t pieces = std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, kPiecesPerThread * threads());
  parallel_for(pieces, [&](int64_t piece) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}

}  // namespace furious
