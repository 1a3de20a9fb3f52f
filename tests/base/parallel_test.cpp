#include "base/parallel.h"

#include <atomic>
#include <vector>

#include "strided.h"

namespace furious {
namespace {

using testing::with_threads;

TEST(Parallel, EveryIndexOnce) {
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
        EXPECT_LE(ranges, count);
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

TEST(Parallel, ALoopInsideALoopIsSerial) {
  with_threads(4, [] {
    EXPECT_EQ(threads(), 4);
    std::atomic<int> most = 0;
    std::atomic<int> visits = 0;
    parallel_for(8, [&](int64_t) {
      const int outer = omp_get_thread_num();
      if (threads() > most) most = threads();
      parallel_for(16, [&](int64_t) {
        ++visits;
        EXPECT_EQ(omp_get_thread_num(), outer);
      });
    });
    EXPECT_EQ(most, 1);
    EXPECT_EQ(visits, 8 * 16);
    return 0;
  });
}

}  // namespace
}  // namespace furious
