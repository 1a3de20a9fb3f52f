// The memory that tensors live in, one arena per device.
//
// A step of training asks for the same sizes in the same order every time, so what one step released serves the next:
// after the first step the device is asked for nothing. Freed blocks merge with their neighbours; the lowest block that
// fits is taken, so addresses repeat from step to step (a CUDA graph can be replayed over them).
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

  // While it lives, tensors that this thread makes on the arena's device lie in that arena.
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
  void trim();  // gives segments that hold no live block back to the device
  // From now on every segment stays: a captured graph has their addresses, also of blocks that are free again.
  void keep_segments() { keeps_segments_ = true; }
  // Takes one segment of so many bytes from the device ahead of need; what one segment holds is not fragmented over
  // several. Does nothing where the device has not as much.
  void reserve(size_t bytes);
  void set_limit(size_t bytes) { limit_ = bytes; }  // on what is taken from the device; 0: what it has

  struct Usage {
    size_t live = 0;           // bytes in blocks that are held now
    size_t peak = 0;           // the most that live has been since reset_peak
    size_t reserved = 0;       // bytes taken from the device
    size_t segments_made = 0;  // how often the device was asked, ever
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
  std::map<std::byte*, size_t> free_;  // of them those that are not used, with their bytes: the search looks only here
  Usage usage_;
  size_t limit_ = 0;
  bool keeps_segments_ = false;
};

}  // namespace furious
