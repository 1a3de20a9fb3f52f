// The state store used by several threads at once. `make tsan` runs this under the thread sanitizer.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "serve/snapshots.h"
#include "temporary_directory.h"

namespace furious::serve {
namespace {

TEST(StateStoreThreads, UseItAtOnce) {
  const furious::testing::TemporaryDirectory folder;
  Warnings warnings;
  StateStore store(small_config(), "0123456789abcdef",
                   {.host_bytes = 20'000, .directory = folder.path(), .disk_bytes = 60'000, .warn = warnings.sink()});
  std::atomic<int> hits = 0, named = 0;
  const auto work = [&](int thread) {
    furious::testing::Random random(static_cast<uint64_t>(thread));
    const std::string name = "state-" + std::to_string(thread % 2);  // two threads fight for each name
    for (int i = 0; i < 120; ++i) {
      Ids ids(static_cast<size_t>(random.integer(1, 4)));
      for (int32_t& id : ids) id = static_cast<int32_t>(random.integer(0, 2));
      store.put(ids, contents_of(ids), std::string(ids.begin(), ids.end()) + ";");
      ids.push_back(1);
      if (const auto match = store.find(prompt_of(ids))) {
        ++hits;
        const Ids& own = match->snapshot->ids;
        ASSERT_TRUE(std::equal(own.begin(), own.end(), ids.begin()));
        expect_equal(match->snapshot->restored(), contents_of(own));
      }
      try {
        if (i % 4 == 0) store.create(name, ids, contents_of(ids));
        if (i % 4 == 3) store.remove(name);
        if (i % 8 == 1) store.fork(name, name + "-copy");
        if (i % 8 == 6) store.remove(name + "-copy");
        if (i % 4 == 2) {
          const auto snapshot = store.state(name);
          expect_equal(snapshot->restored(), contents_of(snapshot->ids));
          ++named;
        }
      } catch (const StateExists&) {
      } catch (const UnknownState&) {
      }
      if (i % 40 == 0) store.flush();
      (void)store.list();
      (void)store.statistics();
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  store.flush();
  EXPECT_GT(hits, 100);
  EXPECT_GT(named, 0);
  for (const std::string& line : warnings.lines()) ADD_FAILURE() << line;
  const StateStoreStatistics statistics = store.statistics();
  EXPECT_EQ(statistics.damaged_files, 0);
  EXPECT_LE(statistics.disk_bytes, 60'000u);
  EXPECT_EQ(statistics.pending_writes, 0);
}

}  // namespace
}  // namespace furious::serve
