// The CUDA part of device.h. In a build without CUDA, device.cpp defines these functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace furious {

void synchronize_cuda(int index);
int cuda_version();  // of the toolkit: 1000 · major + 10 · minor

// During its lifetime, this thread's launches on the device go to a private stream instead of the device's stream. Used
// to capture a graph without the launches of other threads.
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
void wait_for_staging_cuda(void* staging);  // until the last copy out of that memory is done
void send_cuda(void* staging);              // after the last arrive_cuda
void arrive_cuda(void* staging, void* to);

namespace memory {

void* allocate_cuda(int index, size_t bytes);
void release_cuda(int index, void* pointer);
void copy_cuda(int index, void* to, const void* from, size_t bytes);  // in stream order; source and destination on
                                                                      // any device; blocks until done
void clear_cuda(int index, void* pointer, size_t bytes);
int64_t available_cuda(int index);

}  // namespace memory
}  // namespace furious
