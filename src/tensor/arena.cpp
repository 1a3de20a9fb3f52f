#include "tensor/arena.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(pointer, bytes) ((void)(pointer), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(pointer, bytes) ((void)(pointer), (void)(bytes))
#endif

namespace furious {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kSmallestSegment = size_t{4} << 20;

// Poisoned bytes between blocks, so that AddressSanitizer detects a write past the end of one.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kRedZone = kAlignment;
#else
constexpr size_t kRedZone = 0;
#endif

thread_local Arena* chosen = nullptr;  // of the innermost Scope

}  // namespace

Arena::Scope::Scope(Arena& arena) : before_(std::exchange(chosen, &arena)) {}

Arena::Scope::~Scope() {
  chosen = before_;
}

Arena::~Arena() {
  for (auto& [pointer, block] : blocks_) {
    if (!block.starts_segment) continue;
    memory::release(device_, pointer);
  }
}

Arena& Arena::of(Device device) {
  if (chosen != nullptr && chosen->device_ == device) return *chosen;
  // Never destroyed: tensors with static lifetime may be released later than any static object.
  static auto& mutex = *new std::mutex;
  static auto& arenas = *new std::map<std::pair<DeviceKind, int>, Arena*>;
  const std::lock_guard lock(mutex);
  Arena*& arena = arenas[{device.kind, device.index}];
  if (arena == nullptr) arena = new Arena(device);
  return *arena;
}

// If the device is out of memory, returns unused segments to it and tries once more.
std::byte* Arena::new_segment(size_t bytes) {
  const auto take = [&] {
    if (limit_ > 0 && usage_.reserved + bytes > limit_)
      throw OutOfMemory(fmt::format("out of memory on {}: {:.1f} MiB requested, {:.1f} MiB of {:.1f} are free",
                                    name_of(device_), static_cast<double>(bytes) / 0x1p20,
                                    static_cast<double>(limit_ - std::min(limit_, usage_.reserved)) / 0x1p20,
                                    static_cast<double>(limit_) / 0x1p20));
    return static_cast<std::byte*>(memory::allocate(device_, bytes));
  };
  try {
    return take();
  } catch (const OutOfMemory&) {
    give_back();
    return take();
  }
}

Arena::Blocks::iterator Arena::add_segment(size_t bytes) {
  std::byte* const pointer = new_segment(bytes);
  usage_.reserved += bytes;
  ++usage_.segments_made;
  if (device_.is_cpu()) ASAN_POISON_MEMORY_REGION(pointer, bytes);
  free_.emplace(pointer, bytes);
  return blocks_.emplace(pointer, Block{bytes, false, true}).first;
}

void Arena::reserve(size_t bytes) {
  const std::lock_guard lock(mutex_);
  try {
    add_segment((bytes + kAlignment - 1) / kAlignment * kAlignment);
  } catch (const OutOfMemory&) {  // allocations then add segments as needed
  }
}

void* Arena::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const size_t wanted = (std::max<size_t>(bytes, 1) + kRedZone + kAlignment - 1) / kAlignment * kAlignment;
  const auto found = std::ranges::find_if(free_, [&](const auto& entry) { return entry.second >= wanted; });
  const auto block =
      found != free_.end() ? blocks_.find(found->first) : add_segment(std::max(wanted, kSmallestSegment));
  free_.erase(block->first);
  if (block->second.bytes > wanted) {
    const size_t rest = block->second.bytes - wanted;
    blocks_.emplace(block->first + wanted, Block{rest, false, false});
    free_.emplace(block->first + wanted, rest);
    block->second.bytes = wanted;
  }
  block->second.used = true;
  usage_.live += wanted;
  usage_.peak = std::max(usage_.peak, usage_.live);
  if (device_.is_cpu()) ASAN_UNPOISON_MEMORY_REGION(block->first, bytes);
  return block->first;
}

// Merges a free block with the next one if that is free and in the same segment.
Arena::Blocks::iterator Arena::merge(Blocks::iterator block) {
  const auto next = std::next(block);
  if (next == blocks_.end() || next->second.used || next->second.starts_segment) return block;
  block->second.bytes += next->second.bytes;
  free_[block->first] = block->second.bytes;
  free_.erase(next->first);
  blocks_.erase(next);
  return block;
}

void Arena::release(void* pointer) {
  const std::lock_guard lock(mutex_);
  auto block = blocks_.find(static_cast<std::byte*>(pointer));
  require(block != blocks_.end() && block->second.used,
          "arena of {}: release of a pointer that is not an allocated block", name_of(device_));
  if (device_.is_cpu()) ASAN_POISON_MEMORY_REGION(block->first, block->second.bytes);
  block->second.used = false;
  usage_.live -= block->second.bytes;
  free_.emplace(block->first, block->second.bytes);
  block = merge(block);
  if (!block->second.starts_segment) {
    const auto previous = std::prev(block);
    if (!previous->second.used) merge(previous);
  }
}

void Arena::trim() {
  const std::lock_guard lock(mutex_);
  give_back();
}

void Arena::give_back() {
  if (keeps_segments_) return;
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto next = std::next(block);
    const bool whole_segment =
        block->second.starts_segment && (next == blocks_.end() || next->second.starts_segment) && !block->second.used;
    if (whole_segment) {
      if (device_.is_cpu()) ASAN_UNPOISON_MEMORY_REGION(block->first, block->second.bytes);
      usage_.reserved -= block->second.bytes;
      memory::release(device_, block->first);
      free_.erase(block->first);
      blocks_.erase(block);
    }
    block = next;
  }
}

Arena::Usage Arena::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

void Arena::reset_peak() {
  const std::lock_guard lock(mutex_);
  usage_.peak = usage_.live;
}

int64_t usable_memory(Device device, int64_t processes) {
  const Arena::Usage held = Arena::of(device).usage();
  return memory::available(device) / processes + static_cast<int64_t>(held.reserved - held.live);
}

}  // namespace furious
