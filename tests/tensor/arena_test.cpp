#include "tensor/arena.h"

#include <cstring>

#include "support.h"

namespace furious {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Releases in another order than it allocates, as a training step does.
std::vector<void*> step(Arena& arena, const std::vector<size_t>& sizes) {
  std::vector<void*> pointers;
  for (size_t size : sizes) {
    pointers.push_back(arena.allocate(size));
    std::memset(pointers.back(), 1, size);
  }
  for (size_t first : {0, 1})
    for (size_t i = first; i < pointers.size(); i += 2) arena.release(pointers[i]);
  return pointers;
}

TEST(Arena, LaterStepsAllocateNothingAndReuseTheSameAddresses) {
  Arena arena{Device{}};
  testing::Random random(1);
  std::vector<size_t> sizes;
  for (int i = 0; i < 40; ++i) sizes.push_back(random.integer(0, 3 * kMiB));
  step(arena, sizes);
  const Arena::Usage first = arena.usage();
  const std::vector<void*> addresses = step(arena, sizes);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(step(arena, sizes), addresses);
    EXPECT_EQ(arena.usage().segments_made, first.segments_made);
    EXPECT_EQ(arena.usage().reserved, first.reserved);
    EXPECT_EQ(arena.usage().peak, first.peak);
    EXPECT_EQ(arena.usage().live, 0u);
  }
}

TEST(Arena, LiveBlocksDoNotOverlapAndAreAligned) {
  Arena arena{Device{}};
  testing::Random random(2);
  struct Held {
    std::byte* pointer;
    size_t bytes;
    int mark;
  };
  std::vector<Held> held;
  for (int i = 0; i < 500; ++i) {
    if (!held.empty() && random.integer(0, 2) == 0) {
      const int64_t index = random.integer(0, static_cast<int64_t>(held.size()) - 1);
      for (size_t k = 0; k < held[index].bytes; ++k) ASSERT_EQ(held[index].pointer[k], std::byte(held[index].mark));
      arena.release(held[index].pointer);
      held.erase(held.begin() + index);
    } else {
      const size_t bytes = random.integer(1, 5000);
      auto* pointer = static_cast<std::byte*>(arena.allocate(bytes));
      ASSERT_EQ(reinterpret_cast<uintptr_t>(pointer) % 256, 0u);
      std::memset(pointer, i % 251, bytes);
      held.push_back({pointer, bytes, i % 251});
    }
  }
  for (const Held& block : held) arena.release(block.pointer);
  EXPECT_EQ(arena.usage().live, 0u);
}

TEST(Arena, NeighboursMergeInEveryOrder) {
  const std::vector<std::vector<int>> orders = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const std::vector<int>& order : orders) {
    Arena arena{Device{}};
    void* pointers[3];
    for (void*& pointer : pointers) pointer = arena.allocate(kMiB);
    for (int i : order) arena.release(pointers[i]);
    void* const whole = arena.allocate(3 * kMiB);
    EXPECT_EQ(whole, pointers[0]);
    EXPECT_EQ(arena.usage().segments_made, 1u);
    arena.release(whole);
  }
}

TEST(Arena, PeakIsTheMaximumOfLive) {
  Arena arena{Device{}};
  void* const a = arena.allocate(kMiB);
  void* const b = arena.allocate(kMiB);
  const size_t both = arena.usage().live;
  EXPECT_GE(both, 2 * kMiB);
  arena.release(a);
  EXPECT_LT(arena.usage().live, both);
  EXPECT_EQ(arena.usage().peak, both);
  arena.reset_peak();
  EXPECT_EQ(arena.usage().peak, arena.usage().live);
  arena.release(b);
}

TEST(Arena, TrimReleasesEmptySegments) {
  Arena arena{Device{}};
  void* const large = arena.allocate(16 * kMiB);
  void* const small = arena.allocate(kMiB);
  const size_t reserved = arena.usage().reserved;
  EXPECT_EQ(arena.usage().segments_made, 2u);
  arena.release(large);
  EXPECT_EQ(arena.usage().reserved, reserved);
  arena.trim();
  EXPECT_LT(arena.usage().reserved, reserved);
  EXPECT_GE(arena.usage().reserved, kMiB);
  std::memset(small, 1, kMiB);
  arena.release(small);
  arena.trim();
  EXPECT_EQ(arena.usage().reserved, 0u);
  arena.release(arena.allocate(10));
  EXPECT_EQ(arena.usage().segments_made, 3u);
}

TEST(Arena, AtTheLimitReleasesUnusedSegmentsThenThrowsOutOfMemory) {
  Arena arena{Device{}};
  arena.set_limit(20 * kMiB);
  arena.release(arena.allocate(8 * kMiB));
  void* const large = arena.allocate(16 * kMiB);  // fits after the first segment is released
  EXPECT_GE(arena.usage().reserved, 16 * kMiB);
  EXPECT_LT(arena.usage().reserved, 17 * kMiB);  // under sanitizers a block is a little larger
  testing::expect_error([&] { arena.allocate(8 * kMiB); },
                        {"out of memory on cpu", "8.0 MiB requested", "4.0 MiB of 20.0 are free"});
  arena.release(large);
  arena.release(arena.allocate(19 * kMiB));
}

// A graph contains addresses of blocks that are free by now.
TEST(Arena, UsableMemoryCountsWhatTheArenaHoldsUnused) {
  Tensor::empty({1 << 20}, DType::f32);  // released at once
  const Arena::Usage held = Arena::of({}).usage();
  EXPECT_GE(held.reserved - held.live, size_t{4} << 20);
  // No process has a share of the rest worth counting.
  EXPECT_EQ(usable_memory({}, int64_t{1} << 60), static_cast<int64_t>(held.reserved - held.live));
  EXPECT_GT(usable_memory({}), usable_memory({}, int64_t{1} << 60));
}

TEST(Arena, KeptSegmentsAreNeverReleased) {
  Arena arena{Device{}};
  arena.set_limit(20 * kMiB);
  arena.keep_segments();
  void* const block = arena.allocate(8 * kMiB);
  arena.release(block);
  const size_t reserved = arena.usage().reserved;
  testing::expect_error([&] { arena.allocate(16 * kMiB); }, {"out of memory on cpu", "16.0 MiB requested"});
  arena.trim();
  EXPECT_EQ(arena.usage().reserved, reserved);
  EXPECT_EQ(arena.allocate(8 * kMiB), block);
  arena.release(block);
}

TEST(Arena, ReserveAllocatesOneSegmentAndIgnoresOutOfMemory) {
  Arena arena{Device{}};
  arena.set_limit(64 * kMiB);
  arena.reserve(32 * kMiB);
  EXPECT_EQ(arena.usage().segments_made, 1u);
  std::vector<void*> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(arena.allocate(10 * kMiB));
  EXPECT_EQ(arena.usage().segments_made, 1u);
  arena.reserve(100 * kMiB);
  EXPECT_EQ(arena.usage().segments_made, 1u);
  for (void* block : blocks) arena.release(block);
}

// A search over all blocks would take a minute here.
TEST(Arena, ReusesFortyThousandBlocks) {
  Arena arena{Device{}};
  std::vector<void*> blocks;
  for (int i = 0; i < 40000; ++i) blocks.push_back(arena.allocate(256));
  for (size_t i = 0; i < blocks.size(); i += 2) arena.release(blocks[i]);
  const size_t segments = arena.usage().segments_made;
  for (size_t i = 0; i < blocks.size(); i += 2) blocks[i] = arena.allocate(1);
  EXPECT_EQ(arena.usage().segments_made, segments);
  for (void* block : blocks) arena.release(block);
}

TEST(Arena, ForeignAndDoubleReleasesAreErrors) {
  Arena arena{Device{}};
  int foreign = 0;
  testing::expect_error([&] { arena.release(&foreign); }, {"arena of cpu", "not an allocated block"});
  void* const block = arena.allocate(10);
  arena.release(block);
  testing::expect_error([&] { arena.release(block); }, {"arena of cpu", "not an allocated block"});
}

TEST(Arena, OnePerDevice) {
  EXPECT_EQ(&Arena::of({}), &Arena::of({}));
  EXPECT_NE(&Arena::of({}), &Arena::of({DeviceKind::cuda, 1}));
}

}  // namespace
}  // namespace furious
