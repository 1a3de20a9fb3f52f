// The CUDA side of device.h; device.cpp answers for it in a build without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace furious {

void synchronize_cuda(int index);
int cuda_version();  // of the toolkit: 1000 · major + 10 · minor

// While it lives, what this thread launches on the device goes to a stream of its own, unseen by other threads and by
// the device's stream: there a graph is captured.
class CaptureStream {
 public:
  explicit CaptureStream(int index);
  ~CaptureStream();
  CaptureStream(const CaptureStream&) = delete;
  CaptureStream& operator=(const CaptureStream&) = delete;
};

// The staging buffer of a Feed (feed.h).
void* open_staging_cuda(int index, size_t bytes);
void close_staging_cuda(void* staging);
void* staging_memory_cuda(void* staging);   // pinned
void wait_for_staging_cuda(void* staging);  // until what was sent has left that memory
void send_cuda(void* staging);              // behind what arrived last
void arrive_cuda(void* staging, void* to);

namespace memory {

void* allocate_cuda(int index, size_t bytes);
void release_cuda(int index, void* pointer);
void copy_cuda(int index, void* to, const void* from, size_t bytes);  // in the order of that device's work; either end
                                                                      // on any device; done when it returns
void clear_cuda(int index, void* pointer, size_t bytes);
int64_t available_cuda(int index);

}  // namespace memory
}  // namespace furious
