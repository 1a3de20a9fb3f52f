// Parallel loops on one thread pool per process.
//
// The calling thread takes part in its own loop and runs every index that no worker has started: a worker that the
// system does not schedule delays nobody. A nested loop runs serially on its thread, so an operation may use parallel
// loops freely: the outermost one is parallel. Which thread runs which index never changes a result: bodies write
// disjoint memory, and workers use the caller's floating-point mode.
//
// Workers are created on first use, sleep when idle, and have all signals blocked. If the system cannot create more
// threads, loops run on the existing ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace furious {

int available_cores();        // cores this process may use, by its affinity and the quota of its cgroup
int threads();                // maximum for a loop of this thread, which counts as one; 1 inside a loop
void set_threads(int count);  // for loops of this thread; 0: all available cores

// Limits the threads of this thread's loops during its lifetime. 0 leaves the limit unchanged.
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
// body(context, i) for i in [0, count) on up to threads() threads. Rethrows the exception of the smallest index that
// failed, after the loop has finished.
void run_parallel(int64_t count, void (*body)(void* context, int64_t i), void* context);
}  // namespace detail

// body(i) for i in [0, count), scheduled one index at a time: for few, large items of uneven cost.
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

// The same, or serially if the work is too small to share.
template <class Body>
void parallel_for_if(bool worth_it, int64_t count, Body&& body) {
  if (worth_it) return parallel_for(count, body);
  for (int64_t i = 0; i < count; ++i) body(i);
}

// Minimum number of elements for which waking a thread pays off, for operations of up to a nanosecond per element.
constexpr int64_t kElementsPerThread = 1 << 15;
// Ranges per thread in parallel_ranges: more than one, so that other threads take over the ranges of a delayed one.
constexpr int64_t kPiecesPerThread = 4;

// body(begin, end) over equal ranges of [0, count), each of at least `grain` items: for many small, equal items.
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, Body&& body) {
  if (count <= 0) return;
  const int64_t pieces = std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, kPiecesPerThread * threads());
  parallel_for(pieces, [&](int64_t piece) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}

}  // namespace furious
