// Parallel loops over one pool of threads (OpenMP's, which the matrix library uses too).
//
// A loop inside a loop runs serially on its thread, so an operation may use these freely: the outermost loop gets the
// threads. Which thread runs which index never changes a result: bodies write disjoint memory.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace furious {

inline int threads() {
  return omp_in_parallel() ? 1 : omp_get_max_threads();
}

inline void set_threads(int count) {
  omp_set_num_threads(count);
}

// Catches what a body throws, so that it leaves the loop on the calling thread.
class FirstException {
 public:
  template <class Body>
  void guard(Body&& body) {
    try {
      body();
    } catch (...) {
#pragma omp critical(furious_first_exception)
      if (!first_) first_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

// body(i) for i in [0, count), handed out one by one: for uneven, large pieces of work.
template <class Body>
void parallel_for(int64_t count, Body&& body) {
  if (count <= 1 || threads() == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  FirstException exception;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) exception.guard([&] { body(i); });
  exception.rethrow();
}

// The same, or on this thread alone when there is too little work to share.
template <class Body>
void parallel_for_if(bool worth_it, int64_t count, Body&& body) {
  if (worth_it) return parallel_for(count, body);
  for (int64_t i = 0; i < count; ++i) body(i);
}

// body(begin, end) over equal ranges of [0, count), each of at least `grain` items: for even, small pieces of work.
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, Body&& body) {
  if (count <= 0) return;
  const int64_t pieces = std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, threads());
  parallel_for(pieces, [&](int64_t piece) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}

}  // namespace furious
