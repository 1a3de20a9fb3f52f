// The caching allocator of tensors, one arena per device.
//
// A training step allocates the same sizes in the same order every time, so blocks released in one step are reused in
// the next: after the first step the device allocates nothing. Freed blocks merge with free neighbours, and an
// allocation takes the free block with the lowest address that fits, so addresses repeat from step to step.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "tensor/device.h"

namespace furious {

class Arena {
 public:
  explicit Arena(Device device) : device_(device) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  static Arena& of(Device device);

  // During its lifetime, this thread allocates tensors of the arena's device in `arena`.
  class Scope {
   public:
    explicit Scope(Arena& arena);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena* before_;
  };

  void* allocate(size_t bytes);
  void release(void* pointer);
  void trim();  // returns segments without live blocks to the device
  // Disables trim(): a captured graph contains addresses of the segments, also of blocks that are free by now.
  void keep_segments() { keeps_segments_ = true; }
  // Allocates one segment of this size in advance, which avoids fragmentation over several segments. Does nothing if
  // the device has less free memory.
  void reserve(size_t bytes);
  void set_limit(size_t bytes) { limit_ = bytes; }  // on the bytes allocated from the device; 0: no limit

  struct Usage {
    size_t live = 0;           // bytes in blocks in use
    size_t peak = 0;           // maximum of live since reset_peak
    size_t reserved = 0;       // bytes allocated from the device
    size_t segments_made = 0;  // number of allocations from the device since the start
  };
  Usage usage() const;
  void reset_peak();

 private:
  struct Block {
    size_t bytes = 0;
    bool used = false;
    bool starts_segment = false;
  };

  using Blocks = std::map<std::byte*, Block>;

  std::byte* new_segment(size_t bytes);
  Blocks::iterator add_segment(size_t bytes);
  void give_back();
  Blocks::iterator merge(Blocks::iterator block);

  Device device_;
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::map<std::byte*, size_t> free_;  // free blocks by address, with their bytes
  Usage usage_;
  size_t limit_ = 0;
  bool keeps_segments_ = false;
};

// Bytes that tensors can still take: what the device has left, of which so many processes have a share each, and what
// the arena of this one holds unused.
int64_t usable_memory(Device device, int64_t processes = 1);

}  // namespace furious
